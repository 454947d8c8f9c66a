"""What JAX's piles and jumbles were tested for, each with values worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ostinato import ragged

LENGTHS, BOUND = (3, 1, 4), 5
OTHERS = (2, 5, 1)  # of a second dim, bound 6


def batch(arrays, dim="n", bound=BOUND, axis=0):
    """Return a batch with NaN in the unused capacity."""
    made = ragged.RaggedArray.from_list(
        arrays, axis=axis, dim=dim, capacity=None, max_length=bound
    )
    shape = list(made.data.shape)
    shape[axis] = 3
    data = jnp.concatenate([made.data, jnp.full(shape, jnp.nan)], axis)
    return ragged.RaggedArray(data, made.lengths, axis=axis, dim=dim, max_length=bound)


def counts(n, columns=None):
    """Return 0, 1, .. along the tokens."""
    tokens = np.arange(n, dtype=float)
    return tokens if columns is None else np.tile(tokens[:, None], columns)


def of_tokens(columns=None):
    return batch([counts(n, columns) for n in LENGTHS])


def at_token(n, *shape):
    """Return `[n, ...]` with the number of the token everywhere."""
    return np.broadcast_to(counts(n).reshape(-1, *[1] * len(shape)), (n, *shape))


def positions(x):
    return jnp.arange(x.shape[0], dtype=float)


# name: (function, inputs, what comes for an example of n tokens)
ONE_DIM = {
    "sum_of_positions": (lambda x: positions(x).sum(), None, lambda n: n * (n - 1) / 2),
    "positions": (positions, None, counts),
    "triple": (jax.jit(lambda x: 3 * x), None, lambda n: 3 * counts(n)),
    "square": (lambda x: x**2, None, lambda n: counts(n) ** 2),
    "dot": (lambda x: jnp.dot(x, x), None, lambda n: sum(k * k for k in range(n))),
    "contraction": (
        lambda x: jnp.ones((7, x.shape[0])) @ jnp.ones((x.shape[0], 7)),
        None,
        lambda n: np.full((7, 7), n),
    ),
    "times_weights": (
        lambda x: (
            ((x + 1)[:, None] * jnp.ones((x.shape[0], 2)))
            @ (lax.broadcasted_iota(float, (2, 4), 0) + 1)
        ),
        None,
        lambda n: 3 * (at_token(n, 4) + 1),
    ),
    "broadcast_behind": (
        lambda x: lax.broadcast_in_dim(x, (x.shape[0], 7), (0,)),
        None,
        lambda n: at_token(n, 7),
    ),
    "dense_to_ragged": (
        lambda x: lax.broadcast_in_dim(jnp.arange(12.0), (x.shape[0], 12), (1,)),
        None,
        lambda n: np.tile(np.arange(12.0), (n, 1)),
    ),
    "squeeze": (
        lambda x: jnp.squeeze(jnp.broadcast_to(x[:, None], (x.shape[0], 1)), 1),
        None,
        counts,
    ),
    "broadcast_before": (
        lambda x: jnp.broadcast_to(x[None], (4, x.shape[0])),
        None,
        lambda n: np.tile(counts(n), (4, 1)),
    ),
    "broadcast_to_its_square": (
        lambda x: jnp.broadcast_to(x[None], (x.shape[0], x.shape[0])),
        None,
        lambda n: np.tile(counts(n), (n, 1)),
    ),
    "transpose": (
        lambda x: jnp.broadcast_to(x[None], (7, x.shape[0])).T,
        None,
        lambda n: at_token(n, 7),
    ),
    "tensor_dimension": (
        lambda x: jnp.einsum(
            "te,ihqe->ithq", x, lax.broadcasted_iota(float, (3, 2, 7, 11), 1)
        ),
        11,
        lambda n: np.broadcast_to(
            11 * counts(n)[None, :, None, None] * np.arange(2.0)[:, None], (3, n, 2, 7)
        ),
    ),
    "tensor_and_contraction": (
        lambda x: jnp.einsum(
            "tsh,shq->thq",
            jnp.broadcast_to(x[None, :, None], (x.shape[0], x.shape[0], 2)),
            jnp.broadcast_to(x[:, None, None], (x.shape[0], 2, 7)),
        ),
        None,
        lambda n: np.full((n, 2, 7), sum(k * k for k in range(n))),
    ),
    "unpack": (
        lambda x: tuple(jnp.broadcast_to(x[None], (2, x.shape[0])))[0],
        None,
        counts,
    ),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ONE_DIM)
def test_one_dim(name, jitted):
    function, columns, want = ONE_DIM[name]
    mapped = ragged.vmap(function)
    out = (jax.jit(mapped) if jitted else mapped)(of_tokens(columns))
    examples = out if isinstance(out, jax.Array) else out.to_list()
    for n, got in zip(LENGTHS, examples, strict=True):
        np.testing.assert_array_equal(got, want(n), strict=False)
        assert got.shape == np.shape(want(n))


def test_tokens_lie_one_after_another():
    out = ragged.vmap(positions)(of_tokens())
    np.testing.assert_array_equal(out.data[:8], [0, 1, 2, 0, 0, 1, 2, 3])
    np.testing.assert_array_equal(out.lengths, LENGTHS)
    assert (out.dim, out.axis, out.max_length) == ("n", 0, BOUND)


def test_two_dims_come_padded():
    first = of_tokens()
    second = batch([counts(m) for m in OTHERS], dim="m", bound=6)
    out = ragged.vmap(lambda a, b: jnp.broadcast_to(a[:, None], (a.size, b.size)))(
        first, second
    )
    assert isinstance(out, ragged.PaddedRagged)
    assert out.data.shape == (3, BOUND, 6)
    assert out.dims == ((0, "n"), (1, "m"))
    np.testing.assert_array_equal(out.lengths, [LENGTHS, OTHERS])
    for n, m, got in zip(LENGTHS, OTHERS, out.to_list(), strict=True):
        np.testing.assert_array_equal(got, at_token(n, m))


def test_ragged_to_dense_is_an_error():
    """Even where the dense size is that of the bound or of an example."""
    for shape in ((4, 2), (BOUND, 2)):
        function = functools.partial(
            lax.broadcast_in_dim, shape=shape, broadcast_dimensions=(0,)
        )
        with pytest.raises(TypeError, match="broadcast"):
            ragged.vmap(function)(of_tokens())


def test_contracted_sizes_must_match():
    other = batch([counts(n) for n in OTHERS], dim="m", bound=6)
    with pytest.raises(TypeError, match=r"\(n,\).*\(m,\)"):
        ragged.vmap(jnp.dot)(of_tokens(), other)


def test_adding_different_dims_is_an_error():
    other = batch([counts(n) for n in LENGTHS], dim="m")
    with pytest.raises((TypeError, ValueError), match="n"):
        ragged.vmap(jnp.add)(of_tokens(), other)


def test_ragged_batch_is_not_mapped_by_another_axis():
    with pytest.raises(ValueError, match="in_axes"):
        ragged.vmap(positions, in_axes=1)(of_tokens())


def test_ragged_result_needs_out_axes_zero():
    with pytest.raises(ValueError, match="out_axes"):
        ragged.vmap(positions, out_axes=1)(of_tokens())


def test_addition_again_and_again():
    """The same kernel twice on one buffer once corrupted data."""
    x = of_tokens()
    double = jax.jit(ragged.vmap(lambda a: a + a))
    for _ in range(4):
        for n, got in zip(LENGTHS, double(x).to_list(), strict=True):
            np.testing.assert_array_equal(got, 2 * counts(n))


def transformer_layer(x, qkv, out, up, down):
    """Return layer norm, 4 heads, softmax over the keys, and gelu of a sequence."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normed = (x - mean) * lax.rsqrt(var + 1e-5)
    q, k, v = jnp.einsum("te,iehq->ithq", normed, qkv)
    weights = jax.nn.softmax(jnp.einsum("thq,shq->tsh", q, k), axis=1)
    mixed = jnp.einsum("tsh,shq->thq", weights, v)
    x = x + jnp.einsum("thq,hqe->te", mixed, out)
    return x + jax.nn.gelu(x @ up) @ down


def test_transformer_layer_equals_each_sequence_alone():
    rng = np.random.default_rng(0)
    shapes = (3, 8, 4, 2), (4, 2, 8), (8, 12), (12, 8)
    weights = [jnp.asarray(0.3 * rng.standard_normal(s)) for s in shapes]
    lengths = (13, 6, 10)
    arrays = [rng.standard_normal((n, 8)) for n in lengths]
    axes = (0, None, None, None, None)
    mapped = jax.jit(ragged.vmap(transformer_layer, in_axes=axes))
    out = mapped(batch(arrays, bound=16), *weights)
    assert out.data.shape == (32, 8)
    for x, got in zip(arrays, out.to_list(), strict=True):
        want = transformer_layer(jnp.asarray(x), *weights)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
