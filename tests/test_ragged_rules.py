"""Arguments at the edges of single rules of `ragged.vmap`, found by reading them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import one_by_one
from jax import lax

from ostinato import ragged

ROWS = np.random.default_rng(4).standard_normal((10, 4))
LENGTHS = (3, 1, 4)
PARTS = [jnp.asarray(part) for part in np.split(ROWS, np.cumsum(LENGTHS))[:3]]


def batch():
    """Return a batch of eight tokens and a capacity of ten."""
    return ragged.RaggedArray(ROWS, LENGTHS, max_length=6)


def equal(got, want, error=1e-12):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=error, atol=error)


# ---------------------------------------------------------------------- dynamic slices

WINDOWS = {
    "of tokens": lambda x, i: lax.dynamic_slice(x, (0 * i, i), (x.shape[0], 2)),
    "along an axis": lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1),
    "without a ragged axis": lambda x, i: lax.dynamic_slice(x.sum(0), (i,), (2,)),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("start", [-9, -5, -1, 0, 3, 7])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_begin_before_the_axis(name, start, own):
    """A start that is negative twice over was counted from the end twice."""
    window, start = WINDOWS[name], jnp.int32(start)
    mapped = ragged.vmap(window, in_axes=(0, 0 if own else None))
    got = mapped(batch(), jnp.full(3, start) if own else start)
    equal(list(got), one_by_one(lambda x: window(x, start), PARTS))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
def test_starts_of_every_integer_type(dtype):
    def window(x, i):
        return lax.dynamic_slice(x, (jnp.zeros((), dtype), i), (x.shape[0], 2))

    start = jnp.ones((), dtype)
    got = ragged.vmap(window, in_axes=(0, None))(batch(), start)
    equal(got.to_list(), one_by_one(lambda x: window(x, start), PARTS))


@pytest.mark.parametrize("shape", [(0, 4), (1, 0)])
def test_updates_without_elements_change_nothing(shape):
    def write(x):
        return lax.dynamic_update_slice(x, jnp.zeros(shape), (0, 0))

    equal(ragged.vmap(write)(batch()).to_list(), PARTS)


# ----------------------------------------------------------- largest and least elements


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
@pytest.mark.parametrize("value", [-np.inf, np.inf, 0.0, np.nan])
def test_padding_has_no_share_of_the_gradient_of_the_largest(reduce, value):
    """It tied with elements that are all infinite, and took a share."""
    others = [jnp.full(2, value), jnp.full(3, value), jnp.full(1, value)]
    pairs = ragged.RaggedArray.from_list(others, dim="m", max_length=8)

    def extreme(x, y):
        return reduce(x[:, :1] + y[None], axis=1).sum()

    def loss(b):
        return jnp.sum(ragged.vmap(extreme)(b, pairs))

    got = ragged.grad(loss)(batch()).to_list()
    equal(got, [jax.grad(extreme)(x, y) for x, y in zip(PARTS, others, strict=True)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_top_k_takes_nan_with_a_sign_before_padding(dtype):
    """0 / 0 has the sign bit on x86, and is less than -inf in the order of `top_k`."""
    nan = np.copysign(np.nan, -1)
    parts = [jnp.asarray(p, dtype) for p in ([1.0, nan], [nan, -np.inf, 2.0])]
    tokens = ragged.RaggedArray.from_list(parts, max_length=5)
    values, places = ragged.vmap(lambda x: lax.top_k(x, 2), min_length=2)(tokens)
    want = [lax.top_k(part, 2) for part in parts]
    equal(values.astype(np.float64), [v.astype(np.float64) for v, _ in want])
    equal(places, [p for _, p in want])
