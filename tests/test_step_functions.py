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
