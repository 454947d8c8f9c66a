"""Loops of the native library at sizes where it divides its work; what it stores."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost
from benchmarks.steps import networks

needs_cpu = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


def wide(params, states, x, t):
    """Run a step whose rows are wide, with values of different widths side by side."""
    h, c = states
    z = x @ params["w"] + params["b"][None] + h @ params["u"]
    i, f, g, o = jnp.split(z, 4, -1)
    mean = jnp.mean(z, -1, keepdims=True)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g - mean)
    z = z * params["s"][None]  # the product is read again, after narrower values
    rest = jnp.tanh(z[:, : h.shape[1]] + z[:, -h.shape[1] :])
    h = jax.nn.sigmoid(o) * jnp.tanh(c + rest)
    return (h, c), h @ params["v"]


def arguments(steps, batch, inputs, units, outputs):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.3 * rng.standard_normal(shape))  # noqa: E731
    params = {
        "w": draw(inputs, 4 * units),
        "b": draw(4 * units),
        "s": draw(4 * units),
        "u": draw(units, 4 * units) / 4,
        "v": draw(units, outputs),
    }
    return params, draw(steps, batch, inputs), (draw(batch, units), draw(batch, units))


def results(given, backend, lengths=None):
    """Return outputs and final states, and the same with all gradients."""

    def net(params, x, states):
        return ost.recurrent_net(
            wide,
            x,
            states,
            params=params,
            time_major=True,
            padding="zero",
            seq_lengths=lengths,
            backend=backend,
        )

    def loss(params, x, states):
        out = net(params, x, states)
        y = out.outputs
        slope = 1 + jnp.arange(y.size).reshape(y.shape) / y.size
        return jnp.sum(jnp.sin(y * slope)) + jnp.sum(out.states[1]), out

    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return fast_jit(net)(*given), fast_jit(run)(*given)


@needs_cpu
@pytest.mark.parametrize(
    "sizes, ragged",
    [
        # Rows so wide that instructions run for some sequences after others, and more
        # tokens than a gradient adds up at once.
        ((31, 9, 5, 300, 3), False),
        ((31, 9, 5, 300, 3), True),
        ((5, 35, 3, 90, 16), True),
        # One sequence, whose products of all steps are divided among threads.
        ((150, 1, 40, 64, 48), False),
    ],
    ids=["wide", "wide-ragged", "groups", "one"],
)
def test_results_equal_those_of_scan(sizes, ragged):
    given = arguments(*sizes)
    lengths = np.arange(sizes[1]) * sizes[0] // sizes[1] if ragged else None
    got, want = (results(given, backend, lengths) for backend in ("cpu", "scan"))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        scale = max(1.0, float(jnp.max(jnp.abs(b))))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * scale, err_msg=name)


@needs_cpu
@pytest.mark.parametrize("name", list(networks(4)))
def test_networks_of_the_benchmark_run_in_the_native_loop(name):
    network = networks(4)[name]
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        params = network.init(jax.random.key(0))
        x, memory = jnp.ones((3, 2, 4), jnp.float32), jnp.ones((2, 5, 4), jnp.float32)
        step = network.step or network.cell_on(memory)
        states = network.cell.initial_state(2)
        told = ost.explain(step, x, states, params=params, time_major=True)
    assert told.backend == "cpu", str(told)


# ------------------------------------------------------------------- what is stored


def stored(name, **options):
    """Return the elements that a network stores for a sequence and unit, per step."""
    steps, batch, size = 7, 2, 8
    network = networks(size)[name]
    memory = jnp.ones((batch, 30, size), jnp.float32)
    step = network.step or network.cell_on(memory)
    states = network.cell.initial_state(batch)

    def loss(params, x):
        out = ost.recurrent_net(
            step, x, states, params=params, time_major=True, **options
        )
        return jnp.sum(out.outputs)

    x = jnp.ones((steps, batch, size), jnp.float32)
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(network.init(jax.random.key(0)), x)
    loop = next(e for e in jaxpr.eqns if e.primitive.name == "ostinato_loop")
    sizes = [v.aval.size for v in loop.outvars if v.aval.shape[:1] == (steps,)]
    return sum(sizes[1:]) / (steps * batch * size)  # without the output


def test_results_of_gates_take_the_place_of_products():
    # Two states, four gates and tanh(c); not two products of four units.
    assert stored("LSTM") == stored("peephole LSTM") == 7
    # h, and the result of tanh.
    assert stored("leaky tanh RNN") == 2


def test_no_more_is_stored_than_products_and_sums_take():
    # Products have gradients of their own: gates come on top of them.
    assert stored("MI-LSTM") == 10
    # Two products, and the scale of a norm.
    assert 10 <= stored("layer norm LSTM") < 10.5
    # Not the energies of every entry of a memory.
    assert stored("attention LSTM") < 30


@needs_cpu
def test_values_of_all_sequences_stay_while_some_run_after_others():
    """Rows are so wide that instructions run for a part of the sequences at once."""
    rng = np.random.default_rng(0)
    p, x, h = (rng.normal(size=s) for s in ((4, 300), (64, 3, 300), (64, 300)))

    def step(p, h, x, t):
        for k in range(4):
            shared = jnp.cos(p[k] * (1 + t.astype(h.dtype)))
            h = jnp.tanh(h * shared[None] + x)
        return h, h

    out = ost.recurrent_net(step, x, h, params=p, backend="cpu").outputs
    for t in range(3):
        for k in range(4):
            h = np.tanh(h * np.cos(p[k] * (1 + t)) + x[:, t])
        np.testing.assert_allclose(out[:, t], h, rtol=1e-9, atol=1e-12)


@needs_cpu
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_a_sum_over_nothing_is_zero_without_a_warning(shape):
    def step(w, states, x, t):
        h, nothing = states
        total = nothing.sum(tuple(range(1, nothing.ndim)))
        h = jnp.tanh(h @ w + x + total[:, None])
        return (h, 0.8 * nothing), h

    rng = np.random.default_rng(0)
    w, h, x = (0.4 * rng.standard_normal(s) for s in ((6, 6), (2, 6), (2, 3, 6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = ost.recurrent_net(
            step, x, (h, np.zeros((2, *shape))), params=w, backend="cpu"
        )
    wanted = h
    for t in range(3):
        wanted = np.tanh(wanted @ w + x[:, t])
    np.testing.assert_allclose(out.states[0], wanted, rtol=1e-12)
