"""`recurrent_net` with complex states and parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from test_step_hunt import B, T, assert_same, draw
from tolerance import assert_close

import ostinato as ost
from ostinato.cells.base import SizedCell


def total(out):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(out.outputs))


@dataclasses.dataclass(frozen=True)
class ComplexCell(SizedCell):
    """A cell with complex products, states and parameters."""

    input_size: int = 3
    output_size: int = 3

    def initial_state(self, batch, dtype=jnp.complex128):
        return jnp.zeros((batch, 3), dtype)

    def step(self, params, states, inputs_t, t):
        total = ost.tag(states @ params + inputs_t, "total")
        turned = total * lax.complex(jnp.cos(total.real), jnp.sin(total.real))
        states = turned + jnp.fft.fft(inputs_t)
        return states, jnp.abs(states) ** 2


def of_complex_states(step, **options):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(  # noqa: E731
        rng.standard_normal((*shape, 2)).view(np.complex128)[..., 0] * 0.4
    )
    arguments = draw(3, 3), draw(2, 5, 3), draw(2, 3)

    def loss(params, x, states):
        out = ost.recurrent_net(step, x, states, params=params, **options)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states).imag

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"recompute": ("total",)},
        {"segment_length": 2},
        {"segment_length": 2, "recompute": True, "reverse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["function", "cell"])
def test_complex_states_may_be_computed_again(kind, options):
    cell = ComplexCell()
    step = cell if kind == "cell" else lambda *a: cell.step(*a)
    want = of_complex_states(
        lambda *a: cell.step(*a), reverse=options.get("reverse", False)
    )
    got = of_complex_states(step, **options)
    jax.tree.map(lambda g, w: assert_close(g, w, terms=100), got, want)


def test_a_complex_cell_stores_no_complex_results():
    want = of_complex_states(lambda *a: ComplexCell().step(*a))
    got = of_complex_states(ComplexCell())
    jax.tree.map(lambda g, w: assert_close(g, w, terms=100), got, want)


def turned(h, x):
    z = jnp.tanh(h) * jnp.exp(1j * x)
    return jnp.real(z) + jnp.imag(z)


@jax.custom_jvp
def inside(h, x):
    return turned(h, x)


inside.defjvp(lambda given, dots: jax.jvp(turned, given, dots))


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("function", [turned, inside])
def test_a_real_step_has_complex_values(function, backend):
    def step(p, h, x, t):
        h = function(x @ p + h @ p, x)
        return h, h

    def gradient(backend):
        def loss(*given):
            p, x, h = given
            out = ost.recurrent_net(step, x, h, params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs)), out

        given = draw(0, 16, 16), draw(1, B, T, 16), draw(2, B, 16)
        return fast_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*given)

    with jax.numpy_dtype_promotion("standard"):
        assert_same(gradient(backend), gradient("scan"))
