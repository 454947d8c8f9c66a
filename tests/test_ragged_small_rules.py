"""Cases of single rules of `ragged.vmap` that faults planted in them showed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import one_by_one
from jax import lax
from test_ragged_rules import PARTS, ROWS, batch, equal

from ostinato import ragged


def all_equal(run):
    """Compare every result of `run`, mapped, with those of a loop."""
    got = ragged.vmap(run)(batch())
    for part, rows in enumerate(zip(*one_by_one(run, PARTS), strict=True)):
        equal(list(got[part]), rows)


def test_the_largest_along_an_axis_before_the_tokens():
    all_equal(lambda x: (jnp.argmax(x.T, 0), jnp.argmin(x.T, 0)))


def test_windows_of_one_token_with_padding():
    """No window has two tokens, but there are more windows than tokens."""

    def run(x):
        pads = ((1, 2), (0, 0))
        most = lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), pads)
        return jnp.maximum(most, -9.0), lax.reduce_window(
            x, 0.0, lax.add, (1, 2), (1, 2), pads
        )

    all_equal(run)


def test_an_axis_before_the_tokens_is_taken_apart():
    def run(x):
        first, _, _, last = jnp.unstack(x.T)
        return first - last, jnp.stack([first, last]) * first[None]

    all_equal(run)


def test_a_loop_from_the_end_over_features():
    """Its number of steps is the same for all examples."""

    def run(x):
        def step(h, x_t):
            return 0.5 * h + x_t, h * x_t

        return lax.scan(step, jnp.zeros(x.shape[0]), x.T, reverse=True)

    all_equal(run)


def test_a_complex_vector_is_correlated():
    """The second vector is conjugated, whichever is ragged."""
    v = jnp.array([1 + 2j, 0.5 - 1j])

    def run(correlate, x):
        z = lax.complex(x[:, 0], x[:, 1])
        y = correlate(z, v, "full"), correlate(v, z, "full")
        return [jnp.stack([a.real, a.imag], -1) for a in y]

    got = ragged.vmap(lambda x: run(ragged.correlate, x))(batch())
    want = [run(jnp.correlate, x) for x in PARTS]
    for part in range(2):
        equal(list(got[part]), [one[part] for one in want])


def test_a_product_over_tokens_and_features():
    """All axes of one operand are contracted, in another order than those of both."""

    def run(x):
        cube = x[:, :, None] * jnp.sin(x[:, None] + jnp.arange(4.0)[None, None])
        return (
            jnp.einsum("nd,ndk->k", x, cube),
            jnp.einsum("dn,ndk->k", x.T, cube),
            jnp.einsum("kdn,nd->k", cube.T, x),
        )

    all_equal(run)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "float32"])
def test_what_a_place_beyond_the_last_token_reads(dtype):
    """The fill value of `jnp.take`, which each kind of number has for itself."""
    x = batch().with_data(jnp.asarray(ROWS > 0).astype(dtype))

    def run(x):
        return jnp.take(x, jnp.array([0, 9]), axis=0, mode="fill")

    want = [run(jnp.asarray(p > 0).astype(dtype)) for p in PARTS]
    equal(list(ragged.vmap(run)(x)), want)


def test_rows_of_a_convolution_come_to_another_axis():
    """The tokens are the rows of the convolution, and its result has them last."""
    kernel = jnp.asarray(ROWS[:6].reshape(3, 2, 4)[:, :, :2])

    def run(x):
        dims = ("NWC", "WIO", "WCN")
        rows = x.reshape(x.shape[0], 2, 2)
        y = lax.conv_general_dilated(rows, kernel, (1,), "SAME", dimension_numbers=dims)
        return y.sum(0), y.swapaxes(0, 2)

    all_equal(run)


@pytest.mark.parametrize("derivative", ["gradient", "tangent"])
@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_derivatives_inside_of_the_least_of_windows(padding, derivative):
    """What is past the end of an example is no window's least element."""

    def least(x):
        y = x + 0.1 * jnp.sin(jnp.arange(x.shape[0]))[:, None]
        return lax.reduce_window(y, np.inf, lax.min, (2, 1), (1, 1), padding)

    def run(x):
        if derivative == "tangent":
            return jax.jvp(least, (x,), (jnp.cos(x),))[1]
        return jax.grad(lambda x: jnp.sum(jnp.sin(least(x))))(x)

    rows = [p for p in PARTS if len(p) > 1]
    x = ragged.RaggedArray.from_list(rows, capacity=10, max_length=6)
    equal(ragged.vmap(run, min_length=2)(x).to_list(), one_by_one(run, rows))


def test_a_row_of_a_matrix_of_two_sizes_is_written():
    """The updates have one ragged axis and the matrix has two."""

    def run(x):
        pairs = x @ x.T
        return pairs.at[0].set(x[:, 0]), pairs.at[:, -1].add(2 * x[:, 1])

    got = ragged.vmap(run)(batch())
    for part, rows in enumerate(zip(*one_by_one(run, PARTS), strict=True)):
        equal(list(got[part]), rows)


def test_one_place_of_two_axes_is_written():
    """What is written has the axis that is left."""

    def run(x):
        cube = x[:, :, None] * x[:, None, :3]
        return cube.at[0, 1].set(x[0, :3]), cube.at[-1, 3].add(x[-1, 1:])

    got = ragged.vmap(run)(batch())
    for part, rows in enumerate(zip(*one_by_one(run, PARTS), strict=True)):
        equal(list(got[part]), rows)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_places_before_the_first_token_are_dropped(dtype):
    """A negative index that is still negative after it was counted from the end."""
    places = jnp.array([-9, 0, -1], dtype)

    def run(x, i):
        added = x.at[i].add(1.0, mode="drop")
        return added, x.at[i].get(mode="fill", fill_value=7.0)

    got = ragged.vmap(run, in_axes=(0, None))(batch(), places)
    for part, rows in enumerate(zip(*[run(x, places) for x in PARTS], strict=True)):
        equal(list(got[part]), rows)


@pytest.mark.parametrize("padded", [False, True])
def test_ties_of_the_first_key_are_sorted_by_the_second(padded):
    """As `jnp.lexsort` does, on tokens and along an axis of padded examples."""
    sizes = (4, 1, 6)
    rng = np.random.default_rng(3)
    first = [rng.integers(0, 2, n) for n in sizes]
    second = [rng.permutation(n) for n in sizes]
    tokens = [ragged.RaggedArray.from_list(a, capacity=14) for a in (first, second)]

    def run(a, b):
        if padded:  # a row for each token
            a, b = (jnp.broadcast_to(x, (x.size, x.size)) for x in (a, b))
        places = jnp.broadcast_to(jnp.arange(a.shape[-1]), a.shape)
        order = lax.sort((a, b, places), dimension=a.ndim - 1, num_keys=2)[2]
        return order[0] if padded else order

    got = ragged.vmap(run)(*tokens)
    for k, pair in enumerate(zip(second, first, strict=True)):
        np.testing.assert_array_equal(got[k], np.lexsort(pair))


def combine(a, b):
    """Compose two affine functions, the first one first."""
    return a[0] * b[0], b[0] * a[1] + b[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_derivatives_inside_of_an_associative_scan(reverse):
    """From either end, of the gradient and of the tangent in one example."""

    def scanned(scan, x):
        return scan(combine, (jnp.sin(x), x), reverse=reverse)[1]

    def run(scan, x):
        y = jax.jvp(lambda x: scanned(scan, x), (x,), (jnp.cos(x),))[1]
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(scanned(scan, x))))(x)
        return y, gradient

    got = ragged.vmap(lambda x: run(ragged.associative_scan, x))(batch())
    want = one_by_one(lambda x: run(lax.associative_scan, x), PARTS)
    for part in range(2):
        equal(list(got[part]), [one[part] for one in want])


def test_examples_counted_from_the_end_under_jit():
    """Numbers that are traced may be negative, as those that are known."""
    rows = [np.full(n, n) for n in (3, 1, 4)]
    batch = ragged.RaggedArray.from_list(rows, capacity=10)
    chosen = jax.jit(lambda b, i: b[i])(batch, jnp.array([-1, 0, -3, -2]))
    for got, k in zip(chosen.to_list(), (2, 0, 0, 1), strict=True):
        np.testing.assert_array_equal(got, rows[k])


def test_a_matrix_of_two_sizes_is_tiled():
    """The copies of an example lie side by side, without padding between them."""

    def run(x):
        square = x[:, None, 0] * jnp.cos(x[None, :, 1])
        return (jnp.diagonal(jnp.tile(square, (2, 2))),)

    all_equal(run)


def test_every_second_column_of_a_matrix_of_two_sizes():
    def run(x):
        square = x[:, None, 0] * jnp.cos(x[None, :, 1])
        return (lax.slice_in_dim(square, 0, x.shape[0], 2, axis=1).sum(1),)

    all_equal(run)


def test_every_second_token_of_the_last_few():
    """Their number is the same for all examples, their first place is not."""

    def run(x):
        y = jnp.concatenate([x] * 6)
        n = y.shape[0]
        return lax.slice_in_dim(y, n - 5, n - 1, 2), lax.slice_in_dim(y, n - 4, n, 2)

    all_equal(run)
