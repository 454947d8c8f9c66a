"""`constant`: `stop_gradient` for values that may be tangents."""

from __future__ import annotations

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._typing import Array

constant_p = Primitive("ragged_constant")
constant_p.def_impl(lambda x: x)
constant_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(constant_p, lambda _, x: [x])
ad.defjvp(constant_p, None)
ad.primitive_transposes[constant_p] = lambda cotangent, x: [None]
batching.defvectorized(constant_p)


def constant(x: Array) -> Array:
    """Return `x` as a constant that is neither differentiated nor transposed.

    `jax.lax.stop_gradient` has no transpose. A tangent that runs through the rules in
    the derivative of a `jax.custom_jvp` needs one.
    """
    return constant_p.bind(x)
