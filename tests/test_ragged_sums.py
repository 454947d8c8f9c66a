"""Sums over many tokens keep their digits, and their bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ostinato import ragged
from ostinato.ragged.types import segments

EPSILON = float(jnp.finfo(jnp.float32).eps)


SUMS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "product": lambda x: x @ x,
    "variance": lambda x: ((x - x.mean()) ** 2).sum(),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("many", [257, 70_001, 400_000])
def test_sums_of_many_tokens_keep_their_digits(name, many):
    f = SUMS[name]
    rng = np.random.default_rng(many)
    empty = [0] if name in ("sum", "product") else []
    xs = [rng.random(n, np.float32) for n in (3, many, *empty, 256, 512, 1)]
    call = ragged.vmap(f, min_length=min(len(x) for x in xs))
    got = call(ragged.RaggedArray.from_list(xs))
    want = [f(x.astype(np.float64)) for x in xs]
    np.testing.assert_allclose(got, want, rtol=20 * EPSILON)


@pytest.mark.parametrize("many", [257, 70_001, 400_000])
def test_derivatives_of_values_that_many_tokens_share_keep_their_digits(many):
    rng = np.random.default_rng(many)
    xs = [rng.random(n, np.float32) for n in (3, many, 0, 256, 512, 1)]
    batch = ragged.RaggedArray.from_list(xs)

    def loss(s):
        return ragged.vmap(lambda x, s: (x * s).sum(), min_length=0)(batch, s).sum()

    got = jax.grad(loss)(jnp.ones(len(xs), jnp.float32))
    want = [x.astype(np.float64).sum() for x in xs]
    np.testing.assert_allclose(got, want, rtol=20 * EPSILON)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_made_of_32(dtype):
    """Derivatives of what many tokens share, and sums, are rounded once."""
    rng = np.random.default_rng(5)
    xs = [np.asarray(rng.random(n) + 1, dtype) for n in (200, 3, 255)]
    batch = ragged.RaggedArray.from_list([jnp.asarray(x) for x in xs])

    def sums(s):
        return ragged.vmap(lambda x, s: (x * s).sum())(batch, s)

    got, pull_back = jax.vjp(sums, jnp.ones(3, dtype))
    want = [x.astype(np.float64).sum() for x in xs]
    rounding = float(jnp.finfo(dtype).eps)
    for found in (got, *pull_back(jnp.ones(3, dtype))):
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=rounding)


def test_sums_of_millions_of_tokens_keep_their_digits():
    many = 3_000_000
    x = jnp.full(many, 0.1, jnp.float32)
    batch = ragged.RaggedArray(x, [many - 77, 0, 77])

    def sums(s):
        return ragged.vmap(lambda x, s: (x * s).sum(), min_length=0)(batch, s)

    got, pull_back = jax.vjp(sums, jnp.ones(3, jnp.float32))
    want = np.array([many - 77, 0, 77]) * float(x[0])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(*pull_back(jnp.ones_like(got)), want, rtol=1e-5)


def test_blocks_of_blocks(monkeypatch):
    """Of so few tokens, that all borders are met; the shapes are of this test alone."""
    monkeypatch.setattr(segments, "_MOST_BLOCKS", 1)
    rng = np.random.default_rng(1)
    lengths = (0, 65_535, 3, 0, 65_537, 255, 257, 131_072, 0)
    xs = [rng.standard_normal(n) for n in lengths]
    batch = ragged.RaggedArray.from_list(xs, capacity=sum(lengths) + 1001)
    run = ragged.vmap(lambda x, s: (s * x).sum(), min_length=0)
    got, pull_back = jax.vjp(lambda s: run(batch, s), jnp.ones(len(xs)))
    want = [x.sum() for x in xs]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(*pull_back(jnp.ones_like(got)), want, atol=1e-9)


@pytest.mark.parametrize("f", [lambda x: x.sum(0), lambda x: x.T @ x], ids=["+", "@"])
def test_sums_of_an_example_have_the_same_bits_in_any_batch(f):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1003, 2), np.float32)
    others = [rng.standard_normal((n, 2), np.float32) for n in (77, 300, 5, 2049)]
    sums = [
        ragged.vmap(f)(ragged.RaggedArray.from_list([*before, x, *after]))[len(before)]
        for before, after in (
            ([], []),
            ([], others),
            (others, []),
            (others[:1], others[1:]),
        )
    ]
    for other in sums[1:]:
        np.testing.assert_array_equal(sums[0], other)


def test_unused_capacity_is_no_part_of_a_sum_of_many_tokens():
    rng = np.random.default_rng(1)
    lengths = np.array([700, 0, 300])
    tokens = np.full((1400,), np.nan, np.float32)
    tokens[:1000] = rng.random(1000, np.float32)
    batch = ragged.RaggedArray(jnp.asarray(tokens), jnp.asarray(lengths))
    call = ragged.vmap(lambda x: (x * x).sum(), min_length=0)
    parts = np.split(tokens[:1000].astype(np.float64), [700, 700])
    want = [(part**2).sum() for part in parts]
    np.testing.assert_allclose(call(batch), want, rtol=20 * EPSILON)
    gradient = jax.grad(lambda d: call(ragged.RaggedArray(d, lengths)).sum())(
        batch.data
    )
    np.testing.assert_array_equal(gradient[:1000], 2 * tokens[:1000])
    np.testing.assert_array_equal(gradient[1000:], 0)
