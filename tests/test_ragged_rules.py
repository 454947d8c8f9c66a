"""Arguments at the edges of single rules of `ragged.vmap`, found by reading them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import one_by_one
from jax import lax

import ostinato as ost
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


@pytest.mark.parametrize("sign", [1, -1])
def test_pairs_are_sorted_without_the_padding_beside_them(sign):
    """Of all examples the longest has the most columns; those of others are padding."""

    def run(x):
        pairs = sign * (jnp.abs(x[:, :1]) + jnp.abs(x[:, 0])[None])
        return jnp.sort(pairs, 1)[:, 0] - jnp.argsort(-pairs, 1)[:, -1].astype(x.dtype)

    equal(list(ragged.vmap(run)(batch())), one_by_one(run, PARTS))


WAYS = {
    "subtract": lambda ref, x: ref.subtract(2.0 * x),
    "add": lambda ref, x: ref.add(2.0 * x),
    "multiply": lambda ref, x: ref.multiply(2.0 * x),
    "min": lambda ref, x: ref.min(0.0 * x),
    "max": lambda ref, x: ref.max(0.0 * x),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_write_into_a_part(name):
    """At a fixed place, at tokens, along an axis, and twice at the same place."""

    def run(x, w):
        write = WAYS[name]
        last = jnp.array([x.shape[0] - 1, 0])
        return (
            write(x.at[0], x[-1]), write(x.at[last], x[:1]), write(x.at[:, 1], x[:, 0]),
            write(w.at[jnp.array([2, 2])], x[:1].sum()),
        )  # fmt: skip

    w = jnp.asarray(ROWS[0])
    got = ragged.vmap(run, in_axes=(0, None))(batch(), w)
    want = one_by_one(lambda x: run(x, w), PARTS)
    for part in range(4):
        equal(list(got[part]), [one[part] for one in want])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_state_of_an_empty_example_is_its_first(reverse):
    rows = [jnp.asarray(ROWS[a:b]) for a, b in ((0, 3), (3, 3), (3, 7))]
    h_0 = jnp.asarray(np.random.default_rng(9).standard_normal((3, 4)))

    def run(x, h_0):
        out = ost.linear_recurrence(
            jnp.full(4, 0.5), x[None], h_0[None], reverse=reverse
        )
        return out[1][0]

    got = ragged.vmap(run, min_length=0)(ragged.RaggedArray.from_list(rows), h_0)
    want = []
    for x, h in zip(rows, h_0, strict=True):
        for row in x[::-1] if reverse else x:
            h = 0.5 * h + row
        want.append(h)
    equal(got, want)


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


@pytest.mark.parametrize("running", [lax.cummax, lax.cummin])
def test_padding_has_no_share_of_a_reverse_running_maximum(running):
    parts = [jnp.full(2, -jnp.inf), jnp.asarray([2.0, -jnp.inf, -jnp.inf])]
    tokens = ragged.RaggedArray.from_list(parts, max_length=6)
    pairs = ragged.RaggedArray.from_list([jnp.ones(2), jnp.ones(1)], dim="m")

    def run(x, y):
        weights = jnp.arange(1.0, 7.0)[: x.shape[0], None]
        return jnp.sum(running(x[:, None] * y[None], axis=0, reverse=True) * weights)

    got = ragged.grad(lambda b: jnp.sum(ragged.vmap(run)(b, pairs)))(tokens)
    want = [jax.grad(run)(x, jnp.ones(n)) for x, n in zip(parts, (2, 1), strict=True)]
    equal(got.to_list(), want)


def test_a_running_product_stays_finite_in_padding():
    """It went on over copies of the last element, until it was infinite."""
    parts = [jnp.full(3, 1e100), jnp.ones(8)]
    tokens = ragged.RaggedArray.from_list(parts)
    pairs = ragged.RaggedArray.from_list([jnp.ones(2), jnp.ones(3)], dim="m")

    def run(x, y):
        return jnp.sum(lax.cumprod(x[:, None] * y[None], axis=0))

    got = ragged.grad(lambda b: jnp.sum(ragged.vmap(run)(b, pairs)))(tokens)
    want = [jax.grad(run)(x, jnp.ones(n)) for x, n in zip(parts, (2, 3), strict=True)]
    equal(got.to_list(), want)


# ---------------------------------------------------- zero times the infinite is no NaN

PRODUCTS = {
    "of matrices": lambda x, y: jnp.sum(x @ y.T),
    "of elements": lambda x, y: jnp.sum(x[:, None] * y[None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_empty_example_sees_no_token_of_another_one(name):
    product, others = PRODUCTS[name], [jnp.ones((3, 2)), jnp.ones((1, 2))]
    parts = [jnp.zeros((0, 2)), jnp.full((2, 2), -jnp.inf)]
    x = ragged.RaggedArray.from_list(parts)
    y = ragged.RaggedArray.from_list(others, dim="m")

    def loss(y):
        return ragged.vmap(product, min_length=0)(x, y)[0]

    np.testing.assert_array_equal(ragged.grad(loss)(y).to_list()[0], np.zeros((3, 2)))


WRITES = {
    "from the second": lambda x, v: x.at[1:].multiply(v, unique_indices=True)[1:],
    "of one": lambda x, v: x.at[1].multiply(v, unique_indices=True)[1:],
}


@pytest.mark.parametrize("name", WRITES)
def test_a_product_outside_of_what_is_written_has_no_gradient(name):
    parts = [jnp.asarray([-jnp.inf, 2.0, 3.0]), jnp.asarray([jnp.inf, 5.0])]
    tokens = ragged.RaggedArray.from_list(parts)

    def write(x, v):
        return jnp.sum(WRITES[name](x, v))

    def loss(v):
        return jnp.sum(ragged.vmap(write, in_axes=(0, None), min_length=2)(tokens, v))

    want = sum(jax.grad(write, 1)(part, 2.0) for part in parts)
    assert jax.grad(loss)(2.0) == want


def test_a_factor_that_a_reset_hides_may_be_nan():
    factors = [jnp.asarray([0.5, jnp.nan, 0.3]), jnp.asarray([0.2, 0.1])]
    resets = [jnp.asarray([False, True, False]), jnp.asarray([False, False])]
    inputs, h_0 = [jnp.ones(3), jnp.ones(2)], jnp.asarray([1.0, 2.0])

    def run(a, b, r, h):
        parts = a[:, None], b[:, None], h[None]
        options = {"resets": r[:, None], "time_major": True}
        return ost.linear_recurrence(*parts, **options).h.sum()

    batches = [ragged.RaggedArray.from_list(p) for p in (factors, inputs, resets)]
    got = jax.grad(lambda h: jnp.sum(ragged.vmap(run)(*batches, h)))(h_0)
    each = zip(factors, inputs, resets, h_0, strict=True)
    equal(got, [jax.grad(run, 3)(*parts) for parts in each])


ASSOCIATIVE = {
    "norm": (lambda w: lambda a, b: jnp.sqrt(a * a + b * b), 0.0),
    "logsumexp": (lambda w: lambda a, b: jnp.log(jnp.exp(a) + jnp.exp(b)), -jnp.inf),
    "closed over": (
        lambda w: lambda a, b: jnp.sqrt((w * a) ** 2 + (w * b) ** 2) / w,
        0.0,
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ASSOCIATIVE)
def test_an_associative_scan_calls_its_function_on_no_first_token(name, inside):
    """Its result there is thrown away, but its derivative may be infinite."""
    make, first = ASSOCIATIVE[name]
    ends = ([2.0], [3.0, 4.0], [3.0])
    parts = [jnp.asarray([1.0 if i == 0 else first, *e]) for i, e in enumerate(ends)]
    tokens = ragged.RaggedArray.from_list(parts, capacity=9)

    def run(x, w):
        return jax.lax.associative_scan(make(w), x)[1:].sum()

    want = [jax.grad(run, (0, 1))(part, 1.5) for part in parts]
    if inside:
        mapped = ragged.vmap(jax.grad(run, (0, 1)), in_axes=(0, None), min_length=2)
        got, of_w = mapped(tokens, 1.5)
        of_w = jnp.sum(of_w)
    else:
        mapped = ragged.vmap(run, in_axes=(0, None), min_length=2)
        got, of_w = ragged.grad(lambda b, w: jnp.sum(mapped(b, w)), (0, 1))(tokens, 1.5)
    equal(got.to_list(), [x for x, _ in want])
    np.testing.assert_allclose(of_w, sum(w for _, w in want), atol=1e-12)


# -------------------------------------------------------------- batches and their names


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64"])
def test_examples_are_chosen_by_every_integer_type(dtype, traced):
    """Unsigned ones chose others, and small ones could not hold the batch."""
    batch = ragged.RaggedArray(jnp.arange(300.0), np.ones(300, int))
    index = np.asarray([1, 2, 127], dtype)
    if not dtype.startswith("u"):
        index = np.append(index, np.asarray([-1, -128], dtype))
    choose = lambda i: batch[i].to_padded()[:, 0]  # noqa: E731
    got = jax.jit(choose)(jnp.asarray(index)) if traced else choose(index)
    np.testing.assert_array_equal(got, np.arange(300.0)[index.astype(int)])


def test_a_gradient_beside_a_padded_batch():
    tokens = ragged.RaggedArray.from_list([jnp.ones(3), jnp.ones(1)])
    pairs = ragged.vmap(lambda x: x[:, None] * x[None])(tokens)

    def loss(w, b, p):
        return jnp.sum(w * p.data) + jnp.sum(b.map(lambda t: t * w).data)

    assert ragged.grad(loss)(1.0, tokens, pairs) == jax.grad(loss)(1.0, tokens, pairs)


def test_names_beside_a_name_that_stands_for_another():
    x = ragged.RaggedArray.from_list([jnp.ones(3), jnp.ones(2)], dim="a b")
    y = ragged.RaggedArray.from_list([jnp.ones(1), jnp.ones(4)], dim="dim0")
    both = ragged.vmap(lambda x, y: jnp.concatenate([x, y]))(x, y)
    assert both.dim == "(a b) + dim0"


@pytest.mark.parametrize("axis", ["0", 0.0, True])
def test_the_axis_of_an_associative_scan_is_an_integer(axis):
    with pytest.raises(TypeError, match="`axis` must be an integer"):
        ragged.associative_scan(jnp.add, jnp.ones(3), axis=axis)
