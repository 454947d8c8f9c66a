"""Parameters of `recurrent_net`: their dtypes, what is no array, closures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from net_arguments import B, H, arrays
from tolerance import assert_close, assert_same_bits

import ostinato as ost


@pytest.mark.parametrize("options", [{}, {"segment_length": 64}, {"recompute": True}])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_16_bit_weights_add_up_in_float32(dtype, options):
    """Check sums that 16-bit additions would stop at 256 (bfloat16) or 2048."""
    step = lambda w, s, x, t: (s, (w + x).astype(jnp.float32))  # noqa: E731
    x = jnp.zeros((1, 4096), dtype)

    def loss(w):
        return ost.recurrent_net(step, x, None, params=w, **options).outputs.sum()

    got = jax.grad(loss)(jnp.zeros((), dtype))
    assert got.dtype == dtype and got == 4096


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"segment_length": 2}])
def test_params_may_hold_what_is_no_array(options):
    params = {"power": 2, "name": "tanh", "w": jnp.array([2.0, 3.0])}

    def step(params, s, x, t):
        weights = params["w"][None] ** params["power"]
        y = getattr(jnp, params["name"])(s * weights + x)
        return y, y

    def loss(w, x):
        out = ost.recurrent_net(
            step, x, jnp.zeros((1, 2)), params=params | {"w": w}, **options
        )
        return jnp.sum(out.outputs)

    def loop(w, x):
        s, total = jnp.zeros((1, 2)), 0.0
        for t in range(5):
            s = jnp.tanh(s * w[None] ** 2 + x[:, t])
            total += jnp.sum(s)
        return total

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2)))
    got, want = (jax.grad(f)(params["w"], x) for f in (loss, loop))
    assert_close(got, want, terms=50)


def test_closed_over_arrays_are_differentiated_like_params():
    x, w = arrays().x, arrays().params["w"]
    h_0 = jnp.zeros((B, H))

    def closing(w):
        step = lambda p, h, x, t: (jnp.tanh(x @ w + h),) * 2  # noqa: E731
        return jnp.sum(ost.recurrent_net(step, x, h_0).outputs ** 2)

    def given(w):
        step = lambda w, h, x, t: (jnp.tanh(x @ w + h),) * 2  # noqa: E731
        return jnp.sum(ost.recurrent_net(step, x, h_0, params=w).outputs ** 2)

    for transform in (jax.grad, jax.hessian):
        assert_same_bits(*(fast_jit(transform(f))(w) for f in (closing, given)))


def total(out):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(out.outputs))
