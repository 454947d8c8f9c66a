"""Examples that are empty, or shorter than `min_length`, and sizes that are 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from test_ragged_vmap import (
    WEIGHTS,
    batch,
    each,
    examples,
    loop_gradient,
    score,
)
from tolerance import assert_close

from ostinato import ragged

# ------------------------------------------------------------------- empty examples


def test_empty_examples_with_min_length_zero():
    xs = examples((0, 3, 0))
    sums, tokens = ragged.vmap(lambda x: (x.sum(0), x + 1), min_length=0)(batch(xs))
    each(sums, [x.sum(0) for x in xs])
    each(tokens.to_list(), [x + 1 for x in xs])


def test_tangents_of_empty_examples_are_zero():
    xs = examples((0, 3))
    x = batch(xs).with_data(jnp.nan_to_num(batch(xs).data))
    mapped = ragged.vmap(lambda x: jnp.max(x, 0, initial=-9.0), min_length=0)
    run = lambda data: mapped(x.with_data(data))  # noqa: E731
    out, tangent = fast_jit(lambda data: jax.jvp(run, (data,), (data,)))(x.data)
    np.testing.assert_array_equal(out[0], -9)
    np.testing.assert_array_equal(tangent[0], 0)
    np.testing.assert_allclose(tangent[1], xs[1].max(0))


READ_A_ROW = {
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.max(0),
    "median": lambda x: jnp.median(x, 0),
    "dynamic": lambda x: lax.dynamic_slice_in_dim(x, 0, 1)[0],
    "argmax": lambda x: x.argmax(0),
    "mean": lambda x: x.mean(0),
}


@pytest.mark.parametrize("name", READ_A_ROW)
def test_traced_empty_examples_give_nothing_of_their_neighbours(name):
    """NaN, or for integers the smallest one; the other examples are as ever."""
    function = READ_A_ROW[name]
    xs = examples((3, 0, 4))
    out = fast_jit(ragged.vmap(function))(batch(xs))
    np.testing.assert_allclose(out[0], function(xs[0]), rtol=1e-14)
    np.testing.assert_allclose(out[2], function(xs[2]), rtol=1e-14)
    if jnp.issubdtype(out.dtype, jnp.floating):
        assert np.isnan(out[1]).all()
    else:
        np.testing.assert_array_equal(out[1], jnp.iinfo(out.dtype).min)


@jax.custom_vjp
def cubed(x, w):
    """Return the cube of `x`; its derivative is another one on purpose."""
    return x @ w**3


cubed.defvjp(
    lambda x, w: (cubed(x, w), (x, w)),
    lambda kept, dy: (dy @ kept[1].T, 7 * kept[0].T @ dy),
)
TO_DENSE = {
    "mean": lambda x: x.mean(0),
    "own_derivative": lambda x: cubed(x, jnp.eye(x.shape[1])).sum(0),
    "max": lambda x: x.max(0),
    "normalised": lambda x: (x.max(0) - x.mean(0)) / jnp.ptp(x, 0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "whitened": lambda x: jnp.linalg.inv(x.T @ x + jnp.outer(x[0], x[0])) @ x.sum(0),
    "last_state": lambda x: jnp.log(
        lax.scan(lambda h, a: (h + a**2, h), x[0] * 0, x)[0]
    ),
}


@pytest.mark.parametrize("name", TO_DENSE)
def test_traced_empty_examples_do_not_spoil_what_all_share(name):
    """A result that is dropped leaves nothing, not even 0 * NaN, in the gradient."""

    def function(x, w):
        return (cubed(TO_DENSE[name](x)[None], w)).sum()

    def total(w, x):
        scores = ragged.vmap(function, in_axes=(0, None))(x, w)
        return jnp.where(x.lengths > 0, scores, 0).sum()

    xs = examples((0, 4, 0, 5))
    got = fast_jit(jax.grad(total))(WEIGHTS, batch(xs))
    want = loop_gradient(function)(WEIGHTS, [xs[1], xs[3]])
    assert_close(got, want, terms=10_000)


def test_traced_empty_examples_leave_gradients_alone():
    xs = examples((3, 0, 4))
    x = batch(xs)

    @fast_jit
    @jax.grad
    def gradient(w, x):
        scores = ragged.vmap(score, in_axes=(0, None))(x, w)
        return jnp.where(x.lengths > 0, scores, 0).sum()

    want = loop_gradient(score)(WEIGHTS, [xs[0], xs[2]])
    assert_close(gradient(WEIGHTS, x), want, terms=100)


def test_a_size_made_of_others_that_is_too_short():
    """Where lengths are traced, such an example is NaN, and its gradient nothing."""
    x, y = batch(examples((3, 1, 2))), ragged.RaggedArray(jnp.arange(1.0, 5), [2, 0, 1])

    def run(function, w, lengths):
        others = ragged.RaggedArray(y.data, lengths, dim="n - 1", max_length=4)
        return ragged.vmap(function, in_axes=(None, 0, 0))(w, x, others)

    sums = fast_jit(lambda n: run(lambda w, x, y: w + y.sum(), 1.0, n))(y.lengths)
    np.testing.assert_array_equal(sums, [4, np.nan, 4])

    def loss(w, lengths):
        means = run(lambda w, x, y: w * y.mean(), w, lengths)
        return jnp.where(lengths > 0, means, 0).sum()

    assert fast_jit(jax.grad(loss))(1.0, y.lengths) == 4.5


def test_a_size_made_of_others_is_known_not_to_be_empty():
    x = ragged.RaggedArray(jnp.arange(7.0), [3, 2, 2])
    y = ragged.RaggedArray(jnp.arange(1.0, 5), [2, 1, 1], dim="n - 1")
    np.testing.assert_array_equal(ragged.vmap(lambda x, y: y.max())(x, y), [2, 3, 4])


def test_batches_of_nothing_but_empty_examples_have_zero_gradients():
    def function(x, w):
        spread = jnp.sqrt(x.var(0) + 0.1) / x.mean()
        return (jax.nn.softmax(spread) @ w + x.mean(0) @ w).sum()

    @fast_jit
    @jax.grad
    def gradient(w, x):
        scores = ragged.vmap(function, in_axes=(0, None))(x, w)
        return jnp.where(x.lengths > 0, scores, 0).sum()

    np.testing.assert_array_equal(gradient(WEIGHTS, batch(examples((0, 0)))), 0)


@pytest.mark.parametrize("name", ["rows", "pairs", "other_dim"])
def test_traced_short_examples_get_no_token_of_a_neighbour(name):
    """NaN in results of their own tokens, too."""
    xs, ys = examples((1, 3)), examples((0, 2), seed=1)
    x, y = batch(xs), batch(ys, dim="m")
    if name == "other_dim":
        out = fast_jit(ragged.vmap(lambda x, y: x * y[0][None]))(x, y)
        want = xs[1] * ys[1][0][None]
    else:
        pairs = (lambda x: x @ x.T) if name == "pairs" else (lambda x: x)
        function = lambda x: pairs(x) * x[1, 0]  # noqa: E731
        out = fast_jit(ragged.vmap(function, min_length=2))(x)
        want = function(xs[1])
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out[1], want, rtol=1e-14)


# ----------------------------------------------------------------------- sizes of 0


def state_and_outputs(x):
    return lax.scan(lambda h, a: (h + a, h), jnp.zeros(x.shape[1]), x)


OF_FEWER_ROWS = {
    "scan": state_and_outputs,
    "map": lambda x: lax.map(jnp.sin, x),
    "argsort": lambda x: jnp.argsort(x[:, 0]),
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "gram": lambda x: x.T @ x,
    "sum": lambda x: x.sum(0),
    "joined": lambda x: jnp.concatenate([x, x[:0], x]),
}


@pytest.mark.parametrize(
    "options", [{}, {"scan": "packed"}, {"tiers": ((1, 2), (1, 1))}]
)
@pytest.mark.parametrize("name", OF_FEWER_ROWS)
def test_parts_that_no_example_has_any_token_of(name, options):
    """What is left of one or two tokens behind the first two."""
    function = lambda x: (OF_FEWER_ROWS[name](x[2:]), 2 * x)  # noqa: E731
    xs = examples((1, 2))
    x = batch(xs, max_length=2)
    got, doubled = jax.jit(ragged.vmap(function, **options))(x)
    assert doubled.max_length == 2
    each(doubled.to_list(), [2 * x for x in xs])
    is_ragged = lambda a: isinstance(a, ragged.RaggedArray)  # noqa: E731
    for i in range(2):
        part = jax.tree.map(lambda a, i=i: a[i], got, is_leaf=is_ragged)
        want = OF_FEWER_ROWS[name](jnp.zeros((0, xs[0].shape[1])))
        jax.tree.map(
            functools.partial(np.testing.assert_array_equal, strict=True), part, want
        )


OF_NO_FEATURES = {
    "sums": lambda x: (x.sum(0), x.sum(1), x.max(0)),
    "pairs": lambda x: x @ x.T,
    "scan": state_and_outputs,
    "moved": lambda x: (jnp.sort(x, 0), x[::-1], jnp.cumsum(x, 0)),
    "joined": lambda x: jnp.concatenate([x, x]).reshape(2 * x.shape[0], 0, 1),
}


@pytest.mark.parametrize("name", OF_NO_FEATURES)
def test_tokens_without_features(name):
    function = OF_NO_FEATURES[name]
    lengths = (3, 1)
    x = ragged.RaggedArray(np.zeros((5, 0)), lengths)
    got = jax.jit(ragged.vmap(function))(x)
    is_ragged = lambda a: not isinstance(a, (tuple, jax.Array))  # noqa: E731
    for i, n in enumerate(lengths):
        part = jax.tree.map(lambda a, i=i: a[i], got, is_leaf=is_ragged)
        want = function(jnp.zeros((n, 0)))
        jax.tree.map(
            functools.partial(np.testing.assert_array_equal, strict=True), part, want
        )
