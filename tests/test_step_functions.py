"""Steps with callbacks, with derivatives of their own, and without any float."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step_hunt import B, T, assert_same, draw

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


@pytest.mark.parametrize("backend", [None, "xla", "cpu"])
def test_functions_whose_derivatives_raise_run_forward(backend):
    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    def raises(residuals, g):
        raise NotImplementedError("f has no gradient")

    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    @g.defjvp
    def _(primals, tangents):
        raise ValueError("g is not differentiable")

    f.defvjp(lambda x: (f(x), None), raises)
    x, h = draw(0, B, T, 64), draw(1, B, 64)
    for function in (f, g):

        def step(p, h, x, t, function=function):
            h = function(h + x)
            return h, h

        out = ost.recurrent_net(step, x, h, backend=backend)
        assert_same(out, ost.recurrent_net(step, x, h, backend="scan"))


@pytest.mark.parametrize("of", ["inputs", "numbers"])
def test_callbacks_take_one_step_at_a_time(of):
    shapes = set()

    def double(a):
        shapes.add(np.shape(a))
        return 2 * np.asarray(a)

    def step(p, h, x, t):
        given = x if of == "inputs" else jnp.full_like(x[0, 0], 1) * t.astype(x.dtype)
        made = jax.pure_callback(double, jax.typeof(given), given)
        h = jnp.tanh(h + made @ p if of == "inputs" else h + made)
        return h, h

    p, x, h = draw(2, 64, 64), draw(0, B, T, 64), draw(1, B, 64)
    out = ost.recurrent_net(step, x, h, params=p)
    assert shapes == {(B, 64) if of == "inputs" else ()}
    assert_same(out, ost.recurrent_net(step, x, h, params=p, backend="scan"))
    with pytest.raises(NotImplementedError, match="pure_callback"):
        ost.recurrent_net(step, x, h, params=p, backend="cpu")


def test_a_step_without_floats_says_so():
    def step(p, h, x, t):
        return h + x, h

    x, h = jnp.ones((B, T), jnp.int32), jnp.zeros(B, jnp.int32)
    with pytest.raises(NotImplementedError, match="it has no floats"):
        ost.recurrent_net(step, x, h, backend="cpu")


AXES_BEFORE_SEQUENCES = {
    "argmax": lambda h: h + jnp.argmax(jnp.sin(3 * h).T, 0).astype(h.dtype)[:, None],
    "argmin": lambda h: h - jnp.argmin(jnp.sin(3 * h).T, 0).astype(h.dtype)[:, None],
    "max": lambda h: h * jnp.max(jnp.sin(h).T, 0)[:, None],
    "sum": lambda h: h - jnp.sum(jnp.sin(h).T, 0)[:, None] / 4,
    "min of two": lambda h: h - jnp.min(
        jnp.sin(h).T.reshape(2, 2, -1) * jnp.array([1.0, 2.0])[:, None, None], (0, 1)
    )[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", AXES_BEFORE_SEQUENCES)
def test_reductions_over_axes_before_that_of_sequences(name):
    """Check them against a loop without the native library."""
    change = AXES_BEFORE_SEQUENCES[name]
    h = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))
    step = lambda p, h, x, t: (0.5 * change(h),) * 2  # noqa: E731
    out = ost.recurrent_net(step, None, h, length=3, backend="cpu")
    for t in range(3):
        h = 0.5 * change(h)
        np.testing.assert_allclose(out.outputs[:, t], h, rtol=1e-10)


ALIKE = {
    "rows": lambda h, t: jnp.sum(
        jnp.zeros((2, 3, 4)).at[:, t % 3].add(h)
        * jnp.sin(jnp.zeros((2, 3, 4)).at[:, t % 3].add(h * h)),
        1,
    ),
    "set": lambda h, t: jnp.sum(
        jnp.ones((2, 3, 4)).at[:, t % 3].set(h)
        - jnp.ones((2, 3, 4)).at[:, t % 3].set(2 * h) ** 2,
        1,
    ),
    "sums": lambda h, t: (
        jnp.sum(h.reshape(2, 2, 2), 2).repeat(2, 1)
        * jnp.sum(h.reshape(2, 2, 2), (1, 2))[:, None]
    ),
    "one matrix twice": lambda h, t: h + jnp.tanh(h[:, ::-1]),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("backend", ["cpu", None])
def test_operations_that_differ_in_one_operand_are_two(name, backend):
    """Check what a program shares against a loop without the native library."""
    change, rng = ALIKE[name], np.random.default_rng(0)
    w, x, h_0 = rng.random((4, 4)), rng.random((2, 5, 4)), rng.random((2, 4)) - 0.5

    def step(w, h, x, t):
        h = jnp.tanh(x @ w + change(h, t) @ w)
        return h, h

    def net(w):
        out = ost.recurrent_net(step, x, h_0, params=w, backend=backend)
        return out.outputs

    def plain(w):
        h, found = h_0, []
        for t in range(5):
            h, _ = step(w, h, x[:, t], t)
            found.append(h)
        return jnp.stack(found, 1)

    np.testing.assert_allclose(net(w), plain(w), rtol=1e-9)
    slopes = [jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(w))))(w) for f in (net, plain)]
    np.testing.assert_allclose(*slopes, rtol=1e-8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_a_short_inner_loop_runs_in_its_own_order(reverse, backend):
    """Check states and rows of a loop inside of a step against numpy."""
    rng = np.random.default_rng(0)
    w, x, h = rng.random((3, 4, 4)), rng.random((2, 5, 4)), rng.random((2, 4))

    def step(w, h, x, t):
        one = lambda h, w: (jnp.tanh(h @ w + x), h)  # noqa: E731
        h, rows = jax.lax.scan(one, h, w, reverse=reverse)
        return h, jnp.moveaxis(rows, 0, 1)

    out = ost.recurrent_net(step, x, h, params=w, backend=backend)
    for t in range(5):
        for k in reversed(range(3)) if reverse else range(3):
            np.testing.assert_allclose(out.outputs[:, t, k], h, rtol=1e-10)
            h = np.tanh(h @ w[k] + x[:, t])
    np.testing.assert_allclose(out.states, h, rtol=1e-10)
