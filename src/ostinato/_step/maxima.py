"""Derivatives of maxima and of signs that do not depend on how XLA rounds.

XLA may compute a value twice, and round a product and a sum with it once or twice. The
derivative of a maximum compares what it was found in with the result: then no element,
or another one, equals it. The sign of a difference of equal numbers may be 0 for one
reader and 1 for the next. So what decides is stored once, see `once`.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from .._typing import Array
from .jaxprs import CHECKPOINTS, run_checkpoint, run_one

_AT_STORED = frozenset({"abs", "reduce_max", "reduce_min"})
_DECIDING = frozenset("clamp custom_jvp_call eq ge gt le lt ne sign".split())
"""What their results or derivatives are depends on a sign; `relu` is a custom one."""


def with_own_derivative(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Return the result of a maximum, or of the like; None for all other operations.

    This is a hook of `jaxprs.evaluate`, which changes nothing but derivatives. As in
    JAX, equal elements share that of a maximum.
    """
    name = eqn.primitive.name
    if name in CHECKPOINTS:
        return run_checkpoint(eqn, inputs, with_own_derivative)
    if name in _AT_STORED and _are_float(eqn.invars):
        return [at_stored(lambda x: run_one(eqn, [x])[0], *inputs)]
    if name in ("max", "min") and _are_float(eqn.invars):
        return [_of_two(eqn, *inputs)]
    return None


def steady(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Do the same as `with_own_derivative`, and store what decides by its sign.

    This is a hook of `jaxprs.evaluate`, for what is differentiated.
    """
    if eqn.primitive.name in CHECKPOINTS:
        return run_checkpoint(eqn, inputs, steady)
    if eqn.primitive.name in _DECIDING:
        pairs = zip(eqn.invars, inputs, strict=True)
        return run_one(eqn, [once(x) if _are_float([v]) else x for v, x in pairs])
    return with_own_derivative(eqn, inputs)


def _are_float(atoms: Iterable[Any]) -> bool:
    return all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in atoms)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def at_stored(function: Callable[[Array], Array], x: Array) -> Array:
    """Return `function(x)`, with its derivative at `x` as it is stored."""
    return function(x)


@at_stored.defjvp
def _at_stored_jvp(
    function: Callable[[Array], Array], primals: Any, tangents: Any
) -> tuple[Array, Array]:
    return jax.jvp(function, tuple(map(once, primals)), tangents)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_two(eqn: JaxprEqn, x: Array, y: Array) -> Array:
    return run_one(eqn, [x, y])[0]


def _of_two_jvp(eqn: JaxprEqn, primals: Any, tangents: Any) -> tuple[Array, Any]:
    """Compare both operands with each other, and not with the result."""
    x, y = map(once, primals)
    result = _of_two(eqn, x, y)
    is_taken = jnp.greater if eqn.primitive.name == "max" else jnp.less
    tangent = None
    for this, other, d in ((x, y, tangents[0]), (y, x, tangents[1])):
        if isinstance(d, SymbolicZero):
            continue
        half = jnp.where(this == other, d * 0.5, 0)
        part = jnp.where(is_taken(this, other), d, half)
        tangent = part if tangent is None else tangent + part
    return result, jnp.zeros_like(result) if tangent is None else tangent


_of_two.defjvp(_of_two_jvp, symbolic_zeros=True)


# -------------------------------------------------------------------------- primitive

once_p = Primitive("ostinato_once")


def once(x: Array) -> Array:
    """Return floats that XLA computes once and stores; single numbers as they are."""
    return once_p.bind(x) if jnp.ndim(x) > 0 else x


def _through_branch(x: Array) -> Array:
    """Return `x` out of a branch, from which XLA fuses nothing with what reads it.

    On CPUs it removes `lax.optimization_barrier` before it fuses operations, but after
    it has looked for branches whose condition is known.
    """
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


once_p.def_impl(lambda x: x)
once_p.def_abstract_eval(lambda x: x)
ad.primitive_jvps[once_p] = lambda x, d: (once(*x), *d)
batching.defvectorized(once_p)
mlir.register_lowering(once_p, mlir.lower_fun(lax.optimization_barrier, False))
mlir.register_lowering(once_p, mlir.lower_fun(_through_branch, False), platform="cpu")
