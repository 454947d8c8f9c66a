"""Cases for the tests of our own layers: torch as the oracle, streams that come and go.

Import it after ``pytest.importorskip("torch")``.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch

import ostinato as ost

B, T, IN, H = 3, 6, 4, 5
X = np.random.default_rng(0).standard_normal((B, T, IN)).astype("f4")
LENGTHS = np.array([4, 6, 1])
CASES = {
    "lstm": ("LSTM", {}),
    "lstm-proj": ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
    "gru": ("GRU", {"num_layers": 2, "bidirectional": True}),
    "tanh": ("RNN", {"num_layers": 2, "bias": "none"}),
    "relu": ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def module(kind, options):
    """Return the layer of torch, with asymmetric weights."""
    options = dict(options)
    bias = options.pop("bias", "double") == "double"
    made = getattr(torch.nn, kind)(IN, H, bias=bias, batch_first=True, **options)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.tensor(0.6 * rng.standard_normal(p.shape)))
    return made


def numbers(made):
    """Return the parameters of a module of torch by name, as arrays."""
    return {n: jnp.asarray(p.detach().numpy()) for n, p in made.named_parameters()}


def states_of(spec):
    """Return initial states that differ everywhere."""
    rng = np.random.default_rng(2)
    shapes = spec.state_shape(B)
    shapes = shapes if spec.mode == "lstm" else (shapes,)
    states = tuple(jnp.asarray(rng.standard_normal(s), "f4") for s in shapes)
    return states if spec.mode == "lstm" else states[0]


def run_torch(made, state):
    """Return outputs and states of sequences of the lengths `LENGTHS`."""
    state = jax.tree.map(lambda a: torch.tensor(np.asarray(a)), state)
    x = torch.nn.utils.rnn.pack_padded_sequence(
        torch.tensor(X), torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False
    )
    with torch.no_grad():
        y, state = made(x, state)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, True, total_length=T)
    return jax.tree.map(lambda a: a.numpy(), (y, state))


def swapped(kind, named):
    """Yield the parameters with two gates swapped, in every way."""
    for a, b in itertools.combinations(range(GATES[kind]), 2):
        order = list(range(GATES[kind]))
        order[a], order[b] = b, a
        yield {
            name: p
            if name.startswith("weight_hr")
            else jnp.concatenate([jnp.split(p, GATES[kind])[gate] for gate in order])
            for name, p in named.items()
        }


def close(a, b, tolerance=2e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=tolerance)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def assert_streams_are_whole_sequences(layer, steps=7, streams=100):
    """Step through streams that pause at random; compare with a call of `layer`."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((streams, steps, IN)), "f4")
    resets = rng.random((streams, steps)) < 0.2
    step = jax.jit(
        lambda x, state, resets, active: layer.step(
            x, state, resets=resets, active=active
        )
    )
    state = layer.initial_state(streams)
    done, rows = np.zeros(streams, int), np.arange(streams)
    ys = np.zeros((streams, steps, H), "f4")
    for active in rng.random((3 * steps, streams)) < 0.5:
        active = active & (done < steps)
        now = np.minimum(done, steps - 1)
        out = step(x[rows, now], state, resets[rows, now] & active, active)
        state = out.state
        ys[active, now[active]] = np.asarray(out.y)[active]
        assert not np.asarray(out.y)[~active].any()
        done += active
    assert 0 < done.min() < done.max() == steps
    whole = layer(x, seq_lengths=done, resets=jnp.asarray(resets))
    assert same_bits((ys, state), (whole.y, whole.state))


def assert_uniform(layer, names, bound):
    """The parameters are drawn as PyTorch draws them."""
    values = np.concatenate([np.ravel(getattr(layer, n)[...]) for n in names])
    assert 0.95 * bound < np.abs(values).max() <= bound
    assert abs(values.mean()) < 0.1 * bound
    assert abs(values.std() / (bound / np.sqrt(3)) - 1) < 0.05


def available():
    return ost.backends()["cpu"].available
