"""Tests of initial weights: distributions, positions, errors."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_says

import ostinato as ost

KEY = jax.random.key(0)
SPEC = ost.RNNSpec("lstm", 20, 30, 2, bidirectional=True, proj_size=10)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_uniform_fills_the_interval_and_no_more(dtype):
    weights = ost.init_weights(KEY, SPEC, dtype)
    assert weights.shape == (SPEC.num_params,) and weights.dtype == jnp.dtype(dtype)
    values, k = np.asarray(weights, np.float64), 30**-0.5
    assert np.abs(values).max() <= k * (1 + 2 * float(jnp.finfo(dtype).eps))
    assert values.max() > 0.98 * k and values.min() < -0.98 * k
    assert abs(values.mean()) < 0.02 * k  # 12 standard errors for about 20k draws
    assert abs(values.var() / (k * k / 3) - 1) < 0.05


def test_default_is_uniform_float32_and_keys_matter():
    first = ost.init_weights(KEY, SPEC)
    again = ost.init_weights(KEY, SPEC, jnp.float32, "uniform")
    other = ost.init_weights(jax.random.key(1), SPEC)
    assert first.dtype == jnp.float32
    assert (first == again).all() and not (first == other).any()
    old_kind = ost.init_weights(jax.random.PRNGKey(0), SPEC)
    assert (first == old_kind).all()


def test_layers_do_not_share_values():
    layers = ost.unpack_weights(ost.init_weights(KEY, SPEC), SPEC)
    for name in ("w_hh", "b_ih", "w_hr"):
        a, b, c, d = (np.asarray(getattr(layer, name)) for layer in layers)
        assert not (a == b).any() and not (a == c).any() and not (c == d).any()


@pytest.mark.parametrize("mode", ["rnn_tanh", "gru", "lstm"])
def test_glorot_orthogonal_has_orthogonal_gates_and_no_bias(mode):
    spec = ost.RNNSpec(mode, 6, 8)
    weights = ost.init_weights(KEY, spec, jnp.float64, "glorot_orthogonal")
    (layer,) = ost.unpack_weights(weights, spec)
    blocks = np.asarray(layer.w_hh).reshape(-1, 8, 8)
    for block in blocks:
        np.testing.assert_allclose(block @ block.T, np.eye(8), atol=1e-12)
    bound = np.sqrt(6 / (6 + 8))  # by one gate's block, not by all gates
    assert 0.8 * bound < np.abs(layer.w_ih).max() <= bound
    assert not layer.b_ih.any() and not layer.b_hh.any()


def test_orthogonal_matrices_of_a_batch_are_drawn_one_after_another():
    """JAX's threads can wait for each other in factorisations of several batches."""
    draw = lambda key: ost.init_weights(key, SPEC, scheme="glorot_orthogonal")  # noqa: E731
    keys = jax.random.split(KEY, 3)
    text = str(jax.make_jaxpr(jax.vmap(draw))(keys))
    factors = re.findall(r":f32\[([\d,]+)\] = qr\[", text)
    assert factors and all(shape.count(",") == 1 for shape in factors)
    same = [draw(key) for key in keys]
    np.testing.assert_array_equal(jax.vmap(draw)(keys), same)


@pytest.mark.parametrize("bias", ["double", "input", "recurrent"])
@pytest.mark.parametrize("scheme", ["uniform", "glorot_orthogonal"])
def test_forget_bias_is_the_sum_of_both_biases(bias, scheme):
    spec = ost.RNNSpec("lstm", 3, 4, 2, bias=bias)
    with_bias = ost.init_weights(KEY, spec, scheme=scheme, forget_bias=1.5)
    without = ost.init_weights(KEY, spec, scheme=scheme)
    pairs = (ost.unpack_weights(w, spec) for w in (with_bias, without))
    for a, b in zip(*pairs, strict=True):
        total = sum(v for v in (a.b_ih, a.b_hh) if v is not None)
        np.testing.assert_array_equal(total[4:8], 1.5)
        for name in ("b_ih", "b_hh"):
            x, y = getattr(a, name), getattr(b, name)
            if x is not None:
                np.testing.assert_array_equal(np.delete(x, range(4, 8)),
                                              np.delete(y, range(4, 8)))  # fmt: skip
        np.testing.assert_array_equal(a.w_hh, b.w_hh)


@pytest.mark.parametrize(
    "number", [np.float64(1.5), np.array(1.5), jnp.bfloat16(1.5), jnp.float32(1.5)]
)
def test_an_array_without_axes_is_a_number(number):
    want = ost.init_weights(KEY, SPEC, forget_bias=1.5)
    assert (ost.init_weights(KEY, SPEC, forget_bias=number) == want).all()
    spec = ost.RNNSpec("lstm", 3, 4, cell_clip=number)
    assert hash(spec) == hash(ost.RNNSpec("lstm", 3, 4, cell_clip=1.5))
    assert ost.cells.LSTM(3, 4, forget_bias=number).forget_bias == 1.5


def test_jit_and_vmap_draw_the_same_weights():
    spec = ost.RNNSpec("gru", 2, 3)
    keys = jax.random.split(KEY, 3)
    many = jax.jit(jax.vmap(lambda k: ost.init_weights(k, spec)))(keys)
    assert (many[1] == ost.init_weights(keys[1], spec)).all()


BAD = {
    "key": (lambda: ost.init_weights(0, SPEC), TypeError, "`key` PRNG int"),
    "dtype": (
        lambda: ost.init_weights(KEY, SPEC, jnp.int32),
        TypeError,
        "`dtype` floating int32",
    ),
    "scheme": (
        lambda: ost.init_weights(KEY, SPEC, scheme="he"),
        ValueError,
        "`scheme` 'uniform' 'glorot_orthogonal' 'he'",
    ),
    "forget-gru": (
        lambda: ost.init_weights(KEY, ost.RNNSpec("gru", 2, 3), forget_bias=1.0),
        ValueError,
        "`forget_bias` 'lstm' 'gru'",
    ),
    "forget-none": (
        lambda: ost.init_weights(
            KEY, ost.RNNSpec("lstm", 2, 3, bias="none"), forget_bias=1.0
        ),
        ValueError,
        "`forget_bias` 'none'",
    ),
    "forget-text": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias="1"),
        TypeError,
        "`forget_bias` number str",
    ),
    "forget-array": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=jnp.ones(2, "f")),
        TypeError,
        "`forget_bias` number float32",
    ),
    "forget-masked": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=np.ma.masked),
        ValueError,
        "`forget_bias` masked",
    ),
    "forget-key": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=KEY),
        TypeError,
        "`forget_bias` number key",
    ),
    "forget-bool": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=jnp.bool_(True)),
        TypeError,
        "`forget_bias` number bool",
    ),
    "forget-list": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=[1.0, 2.0]),
        TypeError,
        "`forget_bias` number list",
    ),
    "forget-nan": (
        lambda: ost.init_weights(KEY, SPEC, forget_bias=float("nan")),
        ValueError,
        "`forget_bias` finite nan",
    ),
    "dtype-none": (
        lambda: ost.init_weights(KEY, SPEC, None),
        TypeError,
        "`dtype` floating None",
    ),
    "dtype-text": (
        lambda: ost.init_weights(KEY, SPEC, "foo"),
        TypeError,
        "`dtype` floating foo",
    ),
    "spec": (lambda: ost.init_weights(KEY, "lstm"), TypeError, "`spec` RNNSpec str"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_raises_with_name_want_and_got(name):
    run, error, words = BAD[name]
    with pytest.raises(error) as info:
        run()
    assert_says(info, words)


@pytest.mark.parametrize("scheme", ["uniform", "glorot_orthogonal"])
@pytest.mark.parametrize("mode, heads", [("gru", 1), ("lstm", 1), ("slstm", 2)])
def test_gates_and_heads_do_not_share_values(mode, heads, scheme):
    spec = ost.RNNSpec(mode, 8 // heads, 8, num_heads=heads)
    (layer,) = ost.unpack_weights(ost.init_weights(KEY, spec, scheme=scheme), spec)
    size = 8 // heads
    blocks = np.concatenate([layer.w_ih, layer.w_hh]).reshape(-1, size, size)
    for a, b in itertools.combinations(blocks, 2):
        assert not (a == b).any()


@pytest.mark.parametrize("name", ["w_hh", "w_hr"])
def test_uniform_matrices_of_heads_have_the_scale_of_a_head(name):
    spec = ost.RNNSpec("slstm", 8, 32, proj_size=16, num_heads=4)
    (layer,) = ost.unpack_weights(ost.init_weights(KEY, spec), spec)
    most, bound = np.abs(getattr(layer, name)).max(), (32 / 4) ** -0.5
    assert 0.9 * bound < most <= bound


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_orthogonal_matrices_of_narrow_floats(dtype):
    """LAPACK has no factorisation of them."""
    spec = ost.RNNSpec("gru", 4, 4)
    weights = ost.init_weights(KEY, spec, dtype, "glorot_orthogonal")
    (layer,) = ost.unpack_weights(weights, spec)
    assert layer.w_hh.dtype == dtype
    for block in np.asarray(layer.w_hh, np.float64).reshape(3, 4, 4):
        np.testing.assert_allclose(block @ block.T, np.eye(4), atol=0.02)


def test_the_forget_gate_of_a_projected_network_has_its_bias_alone():
    """The gates are i, f, g, o, of four units each, whatever is projected."""
    spec = ost.RNNSpec("lstm", 3, 4, proj_size=2)
    weights = ost.init_weights(
        KEY, spec, jnp.float64, "glorot_orthogonal", forget_bias=1.5
    )
    (layer,) = ost.unpack_weights(weights, spec)
    want = np.repeat([0, 1.5, 0, 0], 4)
    np.testing.assert_array_equal(layer.b_ih + layer.b_hh, want)
