"""Derivatives that the mapped function takes itself, of operations with a JAX rule.

JAX's rules are traced with symbols for sizes there. The oracle is a loop over the
examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit, one_by_one
from jax import lax
from jax.export import export, symbolic_shape

from ostinato import ragged

LENGTHS = (3, 1, 4)
ROWS = np.random.default_rng(9).standard_normal((8, 2))
PARTS = [jnp.asarray(p) for p in np.split(ROWS, np.cumsum(LENGTHS))[:-1]]
LONGER = PARTS[::2]


def matrix(x):
    return 2 * jnp.eye(x.shape[0]) + jnp.sin(x) @ jnp.cos(x.T)


SCANS = (lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
FUNCTIONS = {
    f"{scan.__name__}_{reverse}": lambda x, scan=scan, reverse=reverse: (
        scan(x, 0, reverse) ** 2
    ).sum()
    for scan in SCANS
    for reverse in (False, True)
} | {
    "product": lambda x: jnp.cumprod(x, 0)[-1].sum(),
    "lu": lambda x: jnp.sum(lax.linalg.lu(matrix(x))[0] ** 2),
    "inverse": lambda x: jnp.sum(jnp.linalg.inv(matrix(x)) ** 2),
    "log_determinant": lambda x: jnp.exp(jnp.linalg.slogdet(matrix(x))[1]),
}
ORDERS = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.sin(x),))[1],
    "second": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.sin(x),))[1],
}


def check(function, parts, **options):
    x = ragged.RaggedArray.from_list(parts)
    got = fast_jit(ragged.vmap(function, **options))(x)
    got = got.to_list() if isinstance(got, ragged.RaggedArray) else got
    for a, b in zip(got, one_by_one(function, parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.alike
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inner_derivatives(name, order):
    check(ORDERS[order](FUNCTIONS[name]), PARTS)


@pytest.mark.parametrize("order", ORDERS)
def test_inner_derivatives_of_determinants_need_sizes_above_one(order):
    """JAX's rule has a case `n == 1`, which is False for a symbol."""

    def determinant(x):
        return jnp.linalg.det(matrix(x))

    derivative = ORDERS[order](determinant)
    check(derivative, LONGER, min_length=2)
    x = ragged.RaggedArray.from_list(PARTS)
    refused = (NotImplementedError, jax.errors.InconclusiveDimensionOperation)
    with pytest.raises(refused, match=r"'lu'.*det.*`min_length=2`|'n' > '1'"):
        fast_jit(ragged.vmap(derivative))(x)
    check(determinant, PARTS)
    gradient = ragged.grad(lambda x: ragged.vmap(determinant)(x).sum())(x)
    want = one_by_one(jax.grad(determinant), PARTS)
    for a, b in zip(gradient.to_list(), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_the_scan_of_jax_is_as_before_after_a_trace():
    rules = dict(jax.interpreters.ad.primitive_jvps)
    check(jax.grad(FUNCTIONS["product"]), PARTS)
    assert rules == jax.interpreters.ad.primitive_jvps


@pytest.mark.parametrize("below", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", [(0,), (0, 2)])
def test_padding_of_nothing_by_a_size(shape, below):
    def function(x):
        config = [(x.shape[0] * below[0], x.shape[0] * below[1], 0)]
        padded = lax.pad(jnp.zeros(shape), 3.0, config + [(0, 0, 0)] * (len(shape) - 1))
        return padded + (x[:, 0] if len(shape) == 1 else x)

    check(function, PARTS)


def test_derivatives_by_kernels_say_where_to_take_them():
    def function(x):
        def filtered(kernel):
            signal, kernel = x.T[None, :1], kernel[None, None]
            return lax.conv_general_dilated(signal, kernel, (1,), "SAME").sum()

        return jax.grad(filtered)(jnp.ones(3))

    with pytest.raises(NotImplementedError, match=r"outside of ragged\.vmap"):
        ragged.vmap(function)(ragged.RaggedArray.from_list(PARTS))


@pytest.mark.parametrize("scan", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_loop_within_a_function_with_its_own_derivative(kind, scan):
    """The loop's condition is the same for all examples, which leave the scan apart."""

    def doubled(x):
        def body(state):
            return 2 * state[0], jnp.sin(state[1])

        return lax.while_loop(lambda state: state[0] < 5, body, (1.0, x))[1]

    if kind == "jvp":
        own = jax.custom_jvp(doubled)
        own.defjvp(lambda x, dx: (doubled(*x), doubled(*x) * dx[0]))
    else:
        own = jax.custom_vjp(doubled)
        own.defvjp(lambda x: (doubled(x), x), lambda x, dy: (dy * jnp.cos(x),))

    def function(x):
        return lax.scan(lambda c, t: (own(c + t.sum()), c), 0.0, x)[0]

    parts = ragged.RaggedArray.from_list(PARTS)
    loss = lambda parts: ragged.vmap(function, scan=scan)(parts).sum()  # noqa: E731
    got = fast_jit(ragged.grad(loss))(parts)
    for a, x in zip(got.to_list(), PARTS, strict=True):
        np.testing.assert_allclose(a, jax.grad(function)(x), rtol=1e-9)


@pytest.mark.parametrize("scan", ["padded", "packed"])
def test_a_scan_that_is_unrolled_as_a_whole(scan):
    def function(x):
        step = lambda c, t: (jnp.sort(jnp.stack([c, t.sum()]))[1], c)  # noqa: E731
        most = lax.scan(step, 0.0, x, unroll=True)[0]
        add = lambda i, c: c + x[i].sum()  # noqa: E731
        return most + lax.fori_loop(0, x.shape[0], add, 0.0, unroll=True)

    parts = ragged.RaggedArray.from_list(PARTS)
    got = fast_jit(ragged.vmap(function, scan=scan))(parts)
    np.testing.assert_allclose(got, [function(x) for x in PARTS], rtol=1e-12)


def test_a_symbol_for_the_number_of_examples():
    def total(data, lengths):
        x = ragged.RaggedArray(data, lengths, max_length=4)
        return ragged.vmap(lambda x: x.sum())(x)

    (number,) = symbolic_shape("B")
    data = jax.ShapeDtypeStruct((8,), jnp.float64)
    lengths = jax.ShapeDtypeStruct((number,), jnp.int32)
    with pytest.raises(NotImplementedError, match="number of examples, got .* B"):
        export(jax.jit(total))(data, lengths)
