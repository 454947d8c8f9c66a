"""Steps that call functions under `jit` which close over arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tolerance import assert_close

import ostinato as ost

MATRIX = jax.random.normal(jax.random.key(0), (3, 3)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4, 3))
H_0 = jnp.full((2, 3), 0.5)
LENGTHS = jnp.array([4, 2])

product = jax.jit(lambda h: jnp.sin(h @ MATRIX) + h[..., np.array([2, 0, 1])])
cheap = jax.jit(lambda h: jnp.tanh(h) * MATRIX[0] + jnp.array([1.0, 2.0, 3.0]))


@jax.jit
def nested(h):
    return product(h) + jnp.cos(h) @ MATRIX.T


@jax.custom_jvp
def custom(h):
    return cheap(h)


custom.defjvp(lambda h, t: (custom(*h), jax.jvp(cheap, h, t)[1]))


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


PLACES = {
    "jit": lambda h, t: product(h),
    "nested": lambda h, t: nested(h),
    "vmap": lambda h, t: jax.vmap(nested)(h),
    "checkpoint": lambda h, t: jax.checkpoint(nested)(h),
    "custom": lambda h, t: custom(h),
    "gradient": lambda h, t: jax.grad(lambda h: nested(h).sum())(h),
    "expm": lambda h, t: jax.scipy.linalg.expm(h[..., None] * MATRIX / 9).sum(-1),
    "branch": lambda h, t: lax.cond(t > 1, cheap, lambda h: 2 * custom(h), h),
    "checkpoint in a branch": lambda h, t: lax.cond(
        t > 1, jax.checkpoint(cheap), lambda h: h, h
    ),
    "branch of products": lambda h, t: lax.switch(t % 3, [product, nested, cheap], h),
    "loop": lambda h, t: lax.fori_loop(0, 3, lambda i, h: product(h) * i, h),
    "loop under jit": lambda h, t: jax.jit(
        lambda h: lax.fori_loop(0, 3, lambda i, h: cheap(h) @ MATRIX, h)
    )(h),
    "reverse scan": lambda h, t: lax.scan(
        lambda h, i: (h * i + 1, cheap(h)), h, jnp.arange(2.0), reverse=True
    )[1].sum(0),
    "while": lambda h, t: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, nested(s[1])), (0, h)
    )[1],
}


def loss(scale, x, h_0, place, backend, **options):
    def step(scale, h, x, t):
        h = jnp.tanh(PLACES[place](h, t) * scale + x)
        return h, h

    run = ost.recurrent_net(
        step, x, h_0, params=scale, seq_lengths=LENGTHS, backend=backend, **options
    )
    return jnp.sum(run.outputs**2)


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
@pytest.mark.parametrize("place", PLACES)
def test_arrays_of_functions_under_jit_are_the_same_at_every_step(place, options):
    arguments = (jnp.full(3, 0.7), X, H_0)

    def found(backend):
        run = lambda *given: loss(*given, place, backend, **options)  # noqa: E731
        if place == "while":  # which JAX differentiates forward only
            return jax.jvp(run, arguments, arguments)
        return jax.value_and_grad(run, argnums=(0, 1, 2))(*arguments)

    want = jax.tree.leaves(found("scan"))
    for got, each in zip(jax.tree.leaves(found(None)), want, strict=True):
        assert_close(got, each, terms=100)


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_both_signs_are_two_constants(first):
    """Their reciprocals are infinities of opposite signs."""

    def step(p, h, x, t):
        one = jnp.where(h > 0, first, 2.0)
        other = jnp.where(h > 0, -first, 2.0)
        return jnp.tanh(x - h), (1 / one, 1 / other)

    x, h = np.random.default_rng(0).standard_normal((2, 3, 4)), np.ones((2, 4))
    out = ost.recurrent_net(step, x, h, params=None, backend="cpu")
    for t in range(3):
        for got, zero in zip(out.outputs, (first, -first), strict=True):
            with np.errstate(divide="ignore"):
                want = 1 / np.where(h > 0, zero, 2.0)
            np.testing.assert_array_equal(got[:, t], want)
        h = np.tanh(x[:, t] - h)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_inner_loop_over_a_function_with_an_array_keeps_its_order(reverse, backend):
    def step(p, h, x, t):
        def inner(h, i):
            return jnp.tanh(product(h) * i + x), h * i

        h, rows = jax.lax.scan(inner, h, jnp.arange(1.0, 4.0), reverse=reverse)
        return h, rows[0] - 2 * rows[2]

    def gradient(backend):
        def loss(x, h):
            out = ost.recurrent_net(step, x, h, backend=backend)
            return jnp.sum(jnp.sin(out.outputs)), out

        rng = np.random.default_rng(0)
        size = len(MATRIX)
        x, h = rng.normal(size=(2, 4, size)), rng.normal(size=(2, size))
        return jax.grad(loss, (0, 1), has_aux=True)(x, jnp.asarray(h))

    got, want = map(jax.tree.leaves, (gradient(backend), gradient("scan")))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
