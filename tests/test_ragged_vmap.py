"""`ragged.vmap` as a transformation: arguments, results, JAX around and inside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import CountedJit, fast_jit
from jax import lax
from ragged_examples import (
    DENSE,
    LENGTHS,
    MAX_LENGTH,
    WEIGHTS,
    XS,
    D,
    X,
    attention,
    attention_alone,
    batch,
    each,
    examples,
    score,
    score_alone,
)
from tolerance import assert_close

from ostinato import ragged

# ------------------------------------------------------------------------- arguments


def test_arguments_are_pytrees_with_axes_as_in_jax_vmap():
    def function(args, transposed, shift, *, factor):
        return {"y": args["x"] @ args["w"] * transposed + shift[0], "z": factor}

    args = {"x": X, "w": WEIGHTS}
    in_axes = ({"x": 0, "w": None}, -1, (None,))
    mapped = ragged.vmap(function, in_axes=in_axes)
    with jax.numpy_rank_promotion("allow"):
        out = fast_jit(mapped)(args, DENSE.T, (2.0,), factor=DENSE)
    want = [x @ WEIGHTS * d[None] + 2.0 for x, d in zip(XS, DENSE, strict=True)]
    each(out["y"].to_list(), want)
    each(out["z"], DENSE)


def test_none_shares_a_whole_argument():
    weights = {"a": WEIGHTS, "b": [WEIGHTS[0]]}
    mapped = ragged.vmap(lambda p, x: x @ p["a"] @ p["b"][0], in_axes=(None, 0))
    want = [x @ WEIGHTS @ WEIGHTS[0] for x in XS]
    each(mapped(weights, X).to_list(), want)


def test_none_in_a_tree_is_no_leaf():
    weights = {"a": None, "b": WEIGHTS, "c": None}

    def function(p, x, key):
        assert key is None
        return {"sum": x.sum(0) @ p["b"], "none": p["a"], "weights": p["b"]}

    for axes in (None, {"a": None, "b": None, "c": None}):
        out_axes = {"sum": 1, "none": None, "weights": None}
        mapped = ragged.vmap(function, (axes, 0, 0), out_axes)
        out = fast_jit(mapped)(weights, X, None)
        each(out["sum"].T, [x.sum(0) @ WEIGHTS for x in XS])
        assert out["none"] is None
        assert out["weights"].shape == WEIGHTS.shape


def test_without_ragged_arguments_it_is_jax_vmap():
    out = ragged.vmap(lambda d, w: d @ w, in_axes=(0, None), out_axes=1)(DENSE, WEIGHTS)
    each(out, (DENSE @ WEIGHTS).T)


def test_out_axes():
    def function(x, w, d):
        return x.sum(0), (jnp.outer(x.sum(0), d), w)

    mapped = ragged.vmap(function, (0, None, 0), out_axes=(-1, (1, None)))
    sums, (outer, w) = mapped(X, WEIGHTS, DENSE)
    want = [x.sum(0) for x in XS]
    each(sums.T, want)
    each(jnp.moveaxis(outer, 1, 0), map2(jnp.outer, want, DENSE))
    assert w.shape == WEIGHTS.shape


def map2(function, *lists):
    return [function(*items) for items in zip(*lists, strict=True)]


def test_several_dims():
    ys = examples((2, 5, 1), seed=1)
    y = batch(ys, dim="m", max_length=6)
    run = ragged.vmap(lambda x, y: (x @ y.T, jnp.concatenate([x, y]), y + 1))
    scores, both, only_y = fast_jit(run)(X, y)
    assert isinstance(scores, ragged.PaddedRagged)
    assert scores.dims == ((0, "n"), (1, "m"))
    assert len(scores) == len(XS)
    each(scores.to_list(), map2(lambda a, b: a @ b.T, XS, ys))
    np.testing.assert_array_equal(both.lengths, [5, 6, 5])
    each(both.to_list(), map2(lambda a, b: jnp.concatenate([a, b]), XS, ys))
    assert only_y.dim == "m"


def test_inputs_of_one_dim_may_differ_in_capacity_and_bound():
    wider = batch(examples(shape=()), capacity=20, max_length=9)
    out = ragged.vmap(lambda x, s: x * s[:, None])(X, wider)
    want = map2(lambda x, s: x * s[:, None], XS, examples(shape=()))
    each(out.to_list(), want)


def test_the_ragged_axis_may_be_any():
    turned = ragged.RaggedArray.from_list([x.T for x in XS], axis=1, capacity=9)
    out = ragged.vmap(lambda x: (x.sum(1), x * 2))(turned)
    each(out[0], [x.sum(0) for x in XS])
    assert out[1].axis == 1
    each(out[1].to_list(), [2 * x.T for x in XS])


def test_results_can_be_mapped_again():
    doubled, rest = ragged.vmap(lambda x: (2 * x, x[1:]))(X)
    assert doubled.dim == "n"
    np.testing.assert_array_equal(rest.lengths, [n - 1 for n in LENGTHS])
    again = ragged.vmap(lambda x, y: (x + y).sum(0))(X, doubled)
    each(again, [3 * x.sum(0) for x in XS])
    sums = ragged.vmap(lambda x: x.sum(0), min_length=0)(rest)
    each(sums, [x[1:].sum(0) for x in XS])


def test_dtypes_are_those_of_the_function():
    single = X.with_data(X.data.astype(jnp.float32))
    out = ragged.vmap(lambda x: (x.sum(0), x.astype(jnp.bfloat16), x > 0))(single)
    assert out[0].dtype == jnp.float32
    assert [o.data.dtype for o in out[1:]] == [jnp.bfloat16, bool]


def test_batch_without_examples():
    none = ragged.RaggedArray(jnp.zeros((4, D)), np.zeros(0, np.int32), max_length=3)
    run = fast_jit(ragged.vmap(lambda x, d: (x.sum(0) * d, x + 1, x @ x.T)))
    dense, tokens, pairs = run(none, jnp.zeros((0, D)))
    assert dense.shape == (0, D)
    assert tokens.to_list() == [] == pairs.to_list()


# -------------------------------------------------------------------- transformations


@functools.cache
def loop_gradient(function, wrt_w=True):
    total = lambda w, xs: sum(function(x, w) for x in xs)  # noqa: E731
    return fast_jit(jax.grad(total, argnums=0 if wrt_w else 1))


def ragged_total(w, data, function=score):
    return ragged.vmap(function, in_axes=(0, None))(X.with_data(data), w).sum()


def test_one_compilation_serves_all_lengths_of_a_capacity():
    def function(x, w):
        return attention(x, w), x.mean(0)

    mapped = CountedJit(ragged.vmap(function, in_axes=(0, None)))
    for lengths in ([3, 1, 4], [5, 5, 2], [1, 1, 1], [4, 3, 5]):
        xs = examples(lengths)
        tokens, means = mapped(batch(xs), WEIGHTS)
        each(tokens.to_list(), [attention_alone(x, WEIGHTS) for x in xs])
        each(means, [x.mean(0) for x in xs])
    assert mapped.traces == 1
    mapped(batch(XS, capacity=13), WEIGHTS)
    assert mapped.traces == 2


def test_gradients_of_tokens_and_weights():
    grads = fast_jit(jax.grad(ragged_total, (0, 1)))(WEIGHTS, X.data)
    assert_close(grads[0], loop_gradient(score)(WEIGHTS, XS), terms=100)
    tokens = jnp.concatenate(loop_gradient(score, False)(WEIGHTS, XS))
    assert_close(grads[1][: len(tokens)], tokens, terms=100)
    np.testing.assert_array_equal(grads[1][len(tokens) :], 0)


def test_gradient_of_a_ragged_array_is_one():
    """Only `data` has a gradient; that of the lengths is JAX's float0."""
    total = lambda x: ragged.vmap(lambda s: (s**2).sum())(x).sum()  # noqa: E731
    gradient = jax.grad(total, allow_int=True)(X)
    assert isinstance(gradient, ragged.RaggedArray)
    tokens = jnp.concatenate(XS)
    assert_close(gradient.data[: len(tokens)], 2 * tokens)


def test_jvp_and_linearize():
    tangent = jnp.cos(WEIGHTS)
    run = functools.partial(ragged_total, data=X.data)
    want = (loop_gradient(score)(WEIGHTS, XS) * tangent).sum()
    forward = fast_jit(lambda w, t: jax.jvp(run, (w,), (t,))[1])
    assert_close(forward(WEIGHTS, tangent), want, terms=1000)
    _, linear = jax.linearize(jax.jit(run), WEIGHTS)
    assert_close(linear(tangent), want, terms=1000)


def test_hessian():
    w = WEIGHTS[0]

    def one(x, w):
        return jnp.tanh(x @ w).sum() + jax.nn.logsumexp(x @ w)

    total = lambda w: ragged.vmap(one, (0, None))(X, w).sum()  # noqa: E731
    want = fast_jit(jax.hessian(lambda w: sum(one(x, w) for x in XS)))(w)
    assert_close(fast_jit(jax.hessian(total))(w), want, terms=1000)


def test_gradient_of_a_gradient():
    """Reverse mode over reverse mode, through tokens and weights."""

    def slope(total):
        def squared(w, x):
            return sum(
                (g**2).sum() for g in jax.tree.leaves(jax.grad(total, (0, 1))(w, x))
            )

        return fast_jit(jax.grad(squared))

    def alone(w, xs):
        return sum(score(x, w) for x in xs)

    got = slope(ragged_total)(WEIGHTS, jnp.nan_to_num(X.data))
    assert_close(got, slope(alone)(WEIGHTS, XS), terms=1000)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_over_many_tokens_of_few_digits(dtype):
    """One by one they would stay at 256 in bfloat16 and at 2048 in float16."""
    lengths = (2500, 3)
    x = ragged.RaggedArray(np.ones((2503, 2), dtype), lengths)
    scaled = ragged.vmap(
        lambda x, own, b: (x * own[None] * b[None]).sum(0, dtype=dtype), (0, 0, None)
    )
    own, shared = jnp.ones((2, 2), dtype), jnp.ones(2, dtype)
    expected = np.repeat(np.asarray(lengths, dtype)[:, None], 2, 1)
    np.testing.assert_array_equal(scaled(x, own, shared), expected)
    total = lambda own, b: scaled(x, own, b).astype(jnp.float32).sum()  # noqa: E731
    got, of_shared = jax.grad(total, (0, 1))(own, shared)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(of_shared.astype(jnp.float32), 2503.0, rtol=0.01)


def test_remat_around():
    run = jax.checkpoint(functools.partial(ragged_total, data=X.data))
    got = fast_jit(jax.grad(run))(WEIGHTS)
    assert_close(got, loop_gradient(score)(WEIGHTS, XS), terms=100)


def test_jax_vmap_around():
    """Over weights, and over batches of other tokens and other lengths."""
    several = jnp.stack([WEIGHTS, WEIGHTS.T])
    run = ragged.vmap(score, in_axes=(0, None))
    out = fast_jit(jax.vmap(run, in_axes=(None, 0)))(X, several)
    each(out, [jnp.stack([score_alone(x, w) for x in XS]) for w in several])

    others = examples((5, 2, 2), seed=3)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), X, batch(others))
    out = fast_jit(jax.vmap(run, in_axes=(0, None)))(stacked, WEIGHTS)
    each(out, [jnp.stack([score_alone(x, WEIGHTS) for x in xs]) for xs in (XS, others)])


def test_inside_scan():
    """A few steps of descent on a ragged batch."""

    def train(data):
        update = lambda w, _: (w - 0.1 * jax.grad(ragged_total)(w, data), None)  # noqa: E731
        return lax.scan(update, WEIGHTS, None, length=3)[0]

    want = WEIGHTS
    for _ in range(3):
        want = want - 0.1 * loop_gradient(score)(want, XS)
    assert_close(fast_jit(train)(X.data), want, terms=1000)


def test_closed_over_values():
    """Concrete and traced ones; both have gradients."""

    def total(w):
        return ragged.vmap(lambda x: score(x, w))(X).sum()

    assert_close(total(WEIGHTS), sum(score_alone(x, WEIGHTS) for x in XS), terms=100)
    want = loop_gradient(score)(WEIGHTS, XS)
    assert_close(fast_jit(jax.grad(total))(WEIGHTS), want, terms=100)


def test_lengths_and_tokens_may_be_traced_apart():
    """Batches made inside the jitted function."""

    @fast_jit
    def run(data, splits):
        x = ragged.RaggedArray.from_row_splits(data, splits, max_length=MAX_LENGTH)
        return ragged.vmap(lambda x: x.sum(0))(x)

    splits = np.concatenate([[0], np.cumsum(LENGTHS)])
    each(run(X.data, splits), [x.sum(0) for x in XS])


def test_inner_vmap_over_a_ragged_axis_is_dense():
    inner = lambda x: jax.vmap(lambda row: row @ WEIGHTS)(x)  # noqa: E731
    each(ragged.vmap(inner)(X).to_list(), [x @ WEIGHTS for x in XS])


def windowed(x):
    """Return attention to tokens nearby; no token is near the padding."""
    place = jnp.arange(x.shape[0])
    near = jnp.abs(place[:, None] - place[None]) <= 1
    return jax.nn.softmax(jnp.where(near, x @ x.T, -jnp.inf), -1) @ x


def test_padding_does_not_alarm_those_who_look_for_nan():
    x = X.with_data(jnp.nan_to_num(X.data))
    with jax.debug_nans(True):
        out = ragged.vmap(windowed)(x)
    each(out.to_list(), [windowed(x) for x in XS])
