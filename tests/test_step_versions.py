"""Operations of later versions of JAX, on the native loop.

Where a version lacks one, a primitive of its name takes its place, without derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from test_step_hunt import assert_same, both, draw

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")

LATER = {
    "one_minus_square": lambda x: 1 - x * x,
    "log2": lambda x: jnp.log(x) / np.log(2.0),
    "polynomial": lambda x, a, b, c: a + x * (b + x * c),
}
GIVEN = {"polynomial": lambda name: lambda x, *c: getattr(lax, name)(x, c)}


def operation(name):
    """Return an operation of `lax`, or a primitive that does the same."""
    if hasattr(lax, name):
        return GIVEN.get(name, lambda name: getattr(lax, name))(name)
    primitive, plain = Primitive(name), LATER[name]
    primitive.def_abstract_eval(lambda x, *_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    return primitive.bind


@pytest.mark.parametrize("name", LATER)
def test_operations_of_later_versions(name):
    of_name, more = operation(name), name == "polynomial"

    def step(p, s, x, t):
        x = jnp.tanh(s @ p + x)
        coefficients = [jnp.full_like(x, c) for c in (0.5, -1.0, 2.0)] * more
        s = of_name(jnp.square(x) + 1, *coefficients)
        return s, s

    def run(backend, p, x):
        return ost.recurrent_net(step, x, draw(0, 3, 5), params=p, backend=backend)

    got, want = both(run, 0.3 * draw(1, 5, 5), draw(2, 3, 4, 5))
    assert_same(got, want)


def test_a_hyperbolic_tangent_is_trained_in_the_native_loop():
    """In some versions its derivative has an operation of its own."""

    def step(p, s, x, t):
        s = jnp.tanh(s @ p + x)
        return s, s

    def loss(backend, p, x):
        out = ost.recurrent_net(step, x, draw(0, 3, 5), params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs))

    def slope(backend, *arguments):
        return jax.grad(lambda *a: loss(backend, *a))(*arguments)

    got, want = both(slope, draw(1, 5, 5), draw(2, 3, 4, 5))
    assert_same(got, want)
