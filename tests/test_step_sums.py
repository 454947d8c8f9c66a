"""Sums over sequences of what lies in another order, or has few digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from test_step_hunt import B, T, assert_same, both, draw, gradient_of

import ostinato as ost
from ostinato._step.programs.builder import Builder
from ostinato._step.programs.values import Unsupported

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


def test_gradients_of_short_floats_are_not_rounded_before_their_sum():
    """What sequences contribute cancels but for the last digits of its products."""
    u, odd = 2.0**-7, np.arange(64)[:, None] % 2
    short = lambda a: jnp.asarray(a * np.ones(8), jnp.bfloat16)  # noqa: E731
    h, weight = short(1 + u * odd), short(np.where(odd, 1 + u, -1 - 2 * u))

    def loss(x):
        def run(h):
            step = lambda p, h, x, t: (h, h * x)  # noqa: E731
            return ost.recurrent_net(step, x[None], h[None], backend="cpu").outputs[0]

        outputs = jax.vmap(run)(h)
        return jnp.sum((outputs * weight[:, None]).astype(jnp.float32))

    got = fast_jit(jax.grad(loss))(short(np.ones((T, 1))))
    np.testing.assert_array_equal(got, short(np.full((T, 1), 32 * u**2)))


@pytest.mark.parametrize(
    "turned, shape",
    [(lambda a: a[:, ::-1], (8,)), (lambda a: a.swapaxes(1, 2), (4, 4))],
    ids=["back", "turned"],
)
def test_gradients_of_parameters_that_a_step_reads_in_another_order(turned, shape):
    def step(p, h, x, t):
        h = jnp.tanh(h + x)
        return h, turned(h + jnp.broadcast_to(p, h.shape))

    given = draw(0, *shape), draw(1, B, T, *shape), draw(2, B, *shape)
    assert_same(*both(gradient_of(step), *given))


@pytest.mark.parametrize("part", ["second", "back", "first"])
def test_gradients_of_a_matrix_times_spread_elements_of_an_input(part):
    def step(p, h, x, t):
        if part == "second":
            x = x[:, ::2]
        else:
            x = x[:, 7::-1] if part == "back" else jnp.broadcast_to(x[:, :1], h.shape)
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h

    p = {"w": draw(0, 8, 8), "u": draw(1, 8, 8)}
    assert_same(*both(gradient_of(step), p, draw(2, B, T, 16), draw(3, B, 8)))


@pytest.mark.parametrize(
    "operation, first, second",
    [
        ("add", "sum", "number"),
        ("subtract", "number", "sum"),
        ("multiply", "sum", "sum"),
        ("divide", "number", "sum"),
        ("divide", "sum", "sum"),
        ("max", "sum", "sum"),
        ("abs", "sum", None),
    ],
)
def test_what_is_no_sum_of_what_sequences_have_is_refused(operation, first, second):
    b = Builder(batch=2, steps=1)
    summed = b.local((3,), 0)._replace(axis=None, summed=True)
    values = {"sum": summed, "number": b.constant(2.0, 3.0, 4.0)}
    with pytest.raises(Unsupported, match="different sequences"):
        b.elementwise(operation, *(values[name] for name in (first, second) if name))


@pytest.mark.parametrize("operation", ["multiply", "divide"])
def test_a_sum_over_sequences_times_a_number_is_a_sum(operation):
    b = Builder(batch=2, steps=1)
    summed = b.local((3,), 0)._replace(axis=None, summed=True)
    assert b.elementwise(operation, summed, b.constant(2.0, 3.0, 4.0)).summed


OF_NOTHING = {
    "maximum": lambda p, h: jnp.max(h[:, :0], -1, keepdims=True, initial=-0.5),
    "minimum of rows": lambda p, h: jnp.min(
        h[:, None][:, :0], 1, initial=0.5
    ),
    "product without columns": lambda p, h: jnp.pad(h @ p[:, :0], ((0, 0), (4, 4))),
    "product without rows": lambda p, h: h[:, 8:] @ p[8:],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NOTHING)
def test_maxima_and_products_of_nothing(name):
    def step(p, h, x, t):
        h = jnp.tanh(h @ p + x + OF_NOTHING[name](p, h))
        return h, h

    given = draw(0, 8, 8), draw(1, B, T, 8), draw(2, B, 8)
    results = [
        fast_jit(lambda *a, b=b: gradient_of(step)(b, *a))(*given)
        for b in (None, "scan")
    ]
    assert_same(*results)


OVER_SEQUENCES = {
    "sum": lambda h: jnp.sum(h, 0, keepdims=True),
    "maximum": lambda h: jnp.max(h, 0, keepdims=True),
    "product": lambda h: h[:, :1].T @ h,
    "for each": lambda h: jnp.broadcast_to(jnp.sum(h, 0, keepdims=True), h.shape),
}


@pytest.mark.parametrize("name", OVER_SEQUENCES)
def test_a_sum_over_the_only_sequence_is_an_output(name):
    def step(p, h, x, t):
        h = jnp.tanh(x + h @ p)
        return h, OVER_SEQUENCES[name](h)

    def gradient(backend):
        def loss(p, x, h):
            out = ost.recurrent_net(step, x, h, params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs)), out

        given = draw(0, 8, 8), draw(1, 1, 5, 8), draw(2, 1, 8)
        return fast_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*given)

    assert_same(gradient("cpu"), gradient("scan"))
