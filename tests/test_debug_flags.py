"""The debugging flags of JAX: clean calls pass under each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import one_by_one
from jax import lax

import ostinato as ost
from ostinato import ragged

KINDS = [("lstm", jnp.bfloat16), ("gru", jnp.float32)]
B, T, F, H = 3, 5, 2, 4


def arguments(mode, dtype, **options):
    spec = ost.RNNSpec(mode, F, H, num_layers=2, **options)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    lengths = jnp.array([5, 0, 3])
    resets = jnp.asarray(rng.random((B, T)) < 0.3)
    return spec, draw(spec.num_params), draw(B, T, F), lengths, resets


def calls(mode, dtype):
    """Yield functions of arrays and their arguments, all on the device."""
    spec, weights, x, lengths, resets = arguments(mode, dtype, dropout=0.5)
    key = jax.random.key(0)

    def loss(weights, x, **options):
        y, state = ost.rnn(spec, weights, x, **options)
        return sum(jnp.sum(a, dtype=jnp.float32) for a in jax.tree.leaves((y, state)))

    yield loss, (weights, x), {"key": key}
    yield loss, (weights, x), {"resets": resets}
    yield loss, (weights, x), {"mask": resets}
    yield jax.grad(loss), (weights, x), {"seq_lengths": lengths}
    yield (lambda w, x: ost.rnn_step(spec, w, x)), (weights, x[:, 0]), {}
    yield (
        lambda w, x, resets: ost.rnn_step(spec, w, x, resets=resets, active=resets),
        (weights, x[:, 0], resets[:, 0]),
        {},
    )
    yield (lambda w, x: ost.rnn_forward(spec, w, x)), (weights, x), {}


@pytest.mark.parametrize(("mode", "dtype"), KINDS, ids=["lstm", "gru"])
def test_no_implicit_transfer(mode, dtype):
    """Outside of `jit` no constant moves to the device, apart from those of grad."""
    for f, args, options in calls(mode, dtype):
        with jax.transfer_guard("disallow"):
            jax.jit(f)(*args, **options)
    spec, weights, x, lengths, resets = arguments(mode, dtype)
    x_t, active, prepared = x[:, 0], resets[:, 0], ost.prepare(spec, weights)
    with jax.transfer_guard("disallow"):
        ost.rnn(spec, weights, x, seq_lengths=lengths)
        ost.rnn(spec, weights, x, resets=resets, padding="hold")
        ost.rnn(spec, weights, x, mask=resets)
        _, state = ost.rnn_step(spec, weights, x_t, active=active)
        ost.rnn_step(spec, prepared, x_t, state)
        ost.rnn_forward(spec, weights, x)


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_check_tracer_leaks"])
@pytest.mark.parametrize(("mode", "dtype"), KINDS, ids=["lstm", "gru"])
def test_clean_input_passes(mode, dtype, flag):
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        for f, args, options in calls(mode, dtype):
            jax.jit(f)(*args, **options)
    finally:
        jax.config.update(flag, before)


def test_ragged_and_recurrent_nets_under_all_flags():
    cell = ost.cells.GRU(F, H)
    params = cell.init(jax.random.key(0))
    batch = ragged.stack([jnp.ones((n, F), jnp.float32) for n in (3, 1, 2)])
    x, lengths = jnp.ones((B, T, F), jnp.float32), jnp.array([5, 0, 3])

    @jax.jit
    @jax.value_and_grad
    def loss(params, x, lengths, data):
        states = cell.initial_state(B)
        net = ost.recurrent_net(cell, x, states, params=params, seq_lengths=lengths)
        means = ragged.vmap(lambda a: jnp.tanh(a).sum(0))(batch.with_data(data))
        return net.outputs.sum() + means.sum()

    args = (params, x, lengths, batch.data)
    with (
        jax.transfer_guard("disallow"),
        jax.debug_nans(True),
        jax.checking_leaks(),
    ):
        assert np.isfinite(jax.device_get(loss(*args)[0]))


def test_debug_nans_still_finds_nans():
    spec, weights, x, *_ = arguments("lstm", jnp.float32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(ost.rnn(spec, weights, x.at[0, 0].set(jnp.nan)))


WITHOUT_JIT = {
    "std": lambda x: jnp.std(x, axis=0),
    "row": lambda x: x[jnp.argmax(x[:, 0])],
    "attention": lambda x: jax.nn.softmax(x @ x.T, axis=1) @ x,
    "scan": lambda x: lax.scan(lambda h, v: (jnp.tanh(h + v), h), jnp.zeros(F), x)[1],
    "fori_loop": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, total: total + x[i], jnp.zeros(F)
    ),
}
FLAGS = {
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "no jit": jax.disable_jit,
}


@pytest.mark.alike
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", WITHOUT_JIT)
def test_ragged_vmap_without_jit(name, flag):
    """Check that constants and padding alarm nobody, and that loops are loops."""
    function = WITHOUT_JIT[name]
    rows = [np.random.default_rng(n).normal(size=(n, F)) for n in (3, 2, 4)]
    batch = ragged.stack([jnp.asarray(row) for row in rows])
    weights = jnp.asarray(np.random.default_rng(0).normal(size=F))

    def one(x):
        y = function(x)
        return jnp.sum(y * jnp.broadcast_to(weights, y.shape))

    def loss(data):
        return ragged.vmap(one)(batch.with_data(data)).sum()

    with FLAGS[flag]():
        results = ragged.vmap(function)(batch)
        got = jax.grad(loss)(batch.data)
    results = results.to_list() if hasattr(results, "to_list") else list(results)
    for result, want in zip(results, one_by_one(function, rows), strict=True):
        np.testing.assert_allclose(result, want, atol=1e-12)
    want = np.concatenate(one_by_one(jax.grad(one), rows))
    np.testing.assert_allclose(got[: len(want)], want, atol=1e-12)


@pytest.mark.parametrize("flag", ["nans", "infs"])
def test_ragged_vmap_without_jit_says_which_operation_made_it(flag):
    batch = ragged.stack([jnp.ones(n) for n in (3, 1, 2)])
    wrong = {"nans": lambda x: jnp.log(x - 2), "infs": lambda x: 1 / (x - 1)}[flag]
    with FLAGS[flag](), pytest.raises(FloatingPointError, match="log|div"):
        ragged.vmap(wrong)(batch)
    far = batch.with_data(batch.data * {"nans": jnp.nan, "infs": jnp.inf}[flag])
    with FLAGS[flag](), pytest.raises(FloatingPointError):
        ragged.vmap(lambda x: x)(far)


@pytest.mark.parametrize("backend", [None, "scan"])
def test_a_step_has_its_values_where_jit_is_disabled(backend):
    """So that `print` and a debugger show them."""
    seen = []

    def step(p, h, x, t):
        if not isinstance(h, jax.core.Tracer):
            seen.append((int(t), np.asarray(h)))
        h = jnp.tanh(h @ p + x)
        return h, h

    rng = np.random.default_rng(0)
    h, p, x = (rng.normal(size=s) for s in ((2, 3), (3, 3), (2, 4, 3)))
    with jax.disable_jit():
        ost.recurrent_net(step, x, h, params=p, backend=backend)
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    for t, got in seen:
        np.testing.assert_allclose(got, h, rtol=1e-9)
        h = np.tanh(h @ p + x[:, t])
