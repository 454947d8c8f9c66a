"""Calls of a few steps: the layers run them as the layers whose place they take."""

import functools as ft
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import lenient

import ostinato as ost
from ostinato.nn._sequences import too_short_reason

os.environ.setdefault("KERAS_BACKEND", "jax")
X = np.random.default_rng(0).standard_normal((1, 8, 3)).astype("f4")
ONE, SEVERAL = X[:, :1], X
CARRY = np.zeros((1, 5), "f4")


def runs_fused(run, *args):
    return "ostinato_rnn" in str(jax.make_jaxpr(run)(*args))


@pytest.mark.parametrize(
    ("hidden", "batch", "fewest"), [(4, 1, 2), (300, 1, 8), (300, 2, 4), (600, 1, 16)]
)
def test_more_weights_need_more_steps(hidden, batch, fewest):
    spec = ost.RNNSpec("lstm", 3, hidden)
    at = [jax.ShapeDtypeStruct((batch, fewest - n, 3), jnp.float32) for n in (0, 1)]
    assert too_short_reason(spec, at[0]) is None
    assert str(spec.num_params) in str(too_short_reason(spec, at[1]))


def test_sixteen_bits_and_unknown_sizes_are_never_too_short():
    spec = ost.RNNSpec("gru", 3, 4)
    half = jax.ShapeDtypeStruct((1, 1, 3), jnp.bfloat16)
    (steps,) = jax.export.symbolic_shape("t")
    unknown = jax.ShapeDtypeStruct((1, steps, 3), jnp.float32)
    assert too_short_reason(spec, half) is None
    assert too_short_reason(spec, unknown) is None


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras():
    keras = pytest.importorskip("keras", reason="needs the extra `peers`")
    from ostinato.nn import keras as ours

    layer, theirs = ours.LSTM(5), keras.layers.LSTM(5)
    with lenient():
        layer.build(X.shape)
        theirs.build(X.shape)
        theirs.set_weights(layer.get_weights())
        assert layer.explain(SEVERAL).backend in ("cpu", "xla")
        assert "2 steps" in layer.explain(ONE).rejected["cpu"]
        np.testing.assert_allclose(layer(ONE), theirs(ONE), atol=2e-6)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")
    from ostinato.nn.flax import RNN, Bidirectional

    cell = nnx.GRUCell(3, 5, rngs=nnx.Rngs(0))
    layer = RNN(cell)
    assert layer.explain(SEVERAL).backend in ("cpu", "xla")
    assert "2 steps" in layer.explain(ONE).rejected["cpu"]
    run = ft.partial(layer, initial_carry=CARRY)
    assert runs_fused(run, SEVERAL) and not runs_fused(run, ONE)
    # What the other layer lacks, or does in another way, is fused.
    assert runs_fused(ft.partial(run, resets=jnp.ones((1, 1), bool)), ONE)
    assert runs_fused(ft.partial(run, seq_lengths=jnp.ones(1, jnp.int32)), ONE)
    np.testing.assert_allclose(layer(ONE), nnx.RNN(cell)(ONE), atol=2e-6)
    wide = nnx.GRUCell(3, 300, rngs=nnx.Rngs(0))
    options = {"time_major": True, "reverse": True, "return_carry": True}
    for keep_order in (False, True):
        pair = [c(wide, **options, keep_order=keep_order) for c in (RNN, nnx.RNN)]
        (carry, y), (want, y_want) = (c(X[:, :5].swapaxes(0, 1)) for c in pair)
        np.testing.assert_allclose(carry, want, atol=2e-6)
        np.testing.assert_allclose(y, y_want, atol=2e-6)
    both = Bidirectional(layer, RNN(cell))
    run = ft.partial(both, initial_carry=(CARRY, CARRY))
    assert runs_fused(run, SEVERAL) and not runs_fused(run, ONE)
    np.testing.assert_allclose(both(ONE)[..., :5], layer(ONE), atol=2e-6)


def test_linen():
    linen = pytest.importorskip("flax.linen")
    from ostinato.nn.linen import RNN, ScannedRNN

    layer = RNN(linen.OptimizedLSTMCell(5))
    params = layer.init(jax.random.key(0), X)
    assert runs_fused(layer.apply, params, SEVERAL)
    assert not runs_fused(layer.apply, params, ONE)
    said = layer.apply(params, ONE, method="explain")
    assert "2 steps" in said.rejected["cpu"]
    lengths = jnp.ones(1, jnp.int32)
    run = lambda p, x: layer.apply(p, x, seq_lengths=lengths)  # noqa: E731
    assert runs_fused(run, params, ONE)

    scanned, carry = ScannedRNN(), jnp.ones((1, 3), jnp.float32)
    at = ONE, np.array([[True]])
    params = scanned.init(jax.random.key(0), carry, at)
    assert not runs_fused(scanned.apply, params, carry, at)
    with_zeros = scanned.apply(params, jnp.zeros_like(carry), at)
    np.testing.assert_allclose(scanned.apply(params, carry, at)[1], with_zeros[1])


def test_equinox():
    eqx = pytest.importorskip("equinox")
    from ostinato.nn.equinox import scan

    cell = eqx.nn.LSTMCell(3, 5, dtype=jnp.float32, key=jax.random.key(0))
    run = lambda xs: scan(cell, xs)[1]  # noqa: E731
    assert runs_fused(run, SEVERAL[0]) and not runs_fused(run, ONE[0])
    np.testing.assert_allclose(run(ONE[0]), run(SEVERAL[0])[:1], atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3), (1, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("keep_order", [False, True])
def test_nnx_from_the_end(keep_order, shape):
    """Short calls have their steps along any axis."""
    nnx = pytest.importorskip("flax.nnx")
    from ostinato.nn import flax as ours

    cell = nnx.GRUCell(3, 40, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal(shape).astype("f4")
    options = {"reverse": True, "keep_order": keep_order, "return_carry": True}
    options["time_major"] = len(shape) == 3
    batch = shape[1:2] if options["time_major"] else shape[:-2]
    carry = np.zeros((*batch, 40), "f4")
    layers = nnx.RNN(cell, **options), ours.RNN(cell, **options)
    assert layers[1].explain(x).backend in ("cpu", "xla", "flax")
    want, got = (layer(x, initial_carry=carry) for layer in layers)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)
