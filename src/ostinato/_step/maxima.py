"""Derivatives of maxima and of signs that do not depend on how XLA rounds.

XLA may compute a value twice, and round a product and a sum with it once or twice. The
derivative of a maximum compares what it was found in with the result: then no element,
or another one, equals it. The sign of a difference of equal numbers may be 0 once and
1 once.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from .._typing import Array
from .jaxprs import (
    CHECKPOINTS,
    Hook,
    checkpoint_like,
    evaluate,
    run_one,
    trace,
    type_of,
)

_FOUND = frozenset({"reduce_max", "reduce_min"})
_DECISIONS = frozenset("clamp custom_jvp_call eq ge gt le lt ne sign".split())


def with_own_derivative(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Return the maximum or minimum of floats; None for all other operations.

    This is a hook of `jaxprs.evaluate`. As in JAX, equal elements share the derivative.
    """
    if eqn.primitive.name in CHECKPOINTS:
        return _recomputed(eqn, inputs, with_own_derivative)
    if not _is_float(eqn):
        return None
    if eqn.primitive.name in _FOUND:
        return [at_stored(lambda x: run_one(eqn, [x])[0], *inputs)]
    if eqn.primitive.name in ("max", "min"):
        return [_of_two(eqn, *inputs)]
    return None


class Steady:
    """A hook of `jaxprs.evaluate`, for one evaluation of what is differentiated.

    It does the same as `with_own_derivative`. What depends on the sign of a difference
    reads one that is stored.
    """

    def __init__(self) -> None:
        self._differences: dict[int, Any] = {}

    def __call__(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        name = eqn.primitive.name
        if name in CHECKPOINTS:
            return _recomputed(eqn, inputs, Steady())
        if name == "sub" and _is_float(eqn):
            results = run_one(eqn, inputs)
            self._differences |= {id(a): a for a in results}
            return results
        of_difference = any(id(a) in self._differences for a in inputs)
        if name == "abs" and of_difference:
            return [at_stored(lambda x: run_one(eqn, [x])[0], *inputs)]
        if name in ("max", "min", *_DECISIONS) and of_difference:
            inputs = [once(a) if id(a) in self._differences else a for a in inputs]
            return with_own_derivative(eqn, inputs) or run_one(eqn, inputs)
        return with_own_derivative(eqn, inputs)


def steadied(function: Callable) -> Callable:
    """Return a function that is evaluated with the hook `Steady`."""

    def run(*arguments: Any) -> Any:
        traced, results = trace(function, arguments)
        values = evaluate(traced, jax.tree.leaves(arguments), Steady())
        return jax.tree.unflatten(results, values)

    return run


def _recomputed(eqn: JaxprEqn, inputs: list[Any], hook: Hook) -> list[Any]:
    """Run what is under `jax.checkpoint`, with a hook, under it again."""
    (jaxpr,) = jaxprs_in_params(eqn.params)
    run = lambda *given: evaluate(ClosedJaxpr(jaxpr, ()), given, hook)  # noqa: E731
    return checkpoint_like(eqn, run)(*inputs)


def _is_float(eqn: JaxprEqn) -> bool:
    types = map(type_of, eqn.outvars)  # a callback may have no results
    return any(jnp.issubdtype(a.dtype, jnp.floating) for a in types)


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
    x, y = primals
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
    """Return an array of real numbers that XLA computes once and stores."""
    return once_p.bind(x)


def _through_branch(x: Array) -> Array:
    """Return `x` out of a branch, from which XLA fuses nothing with what reads it.

    On CPUs it removes `lax.optimization_barrier` before it fuses operations.
    """
    if x.size == 0:
        return x
    first = x[(0,) * x.ndim].astype(jnp.float32)
    never = jnp.isnan(first) & (first > 0)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


once_p.def_impl(lambda x: x)
once_p.def_abstract_eval(lambda x: x)
ad.primitive_jvps[once_p] = lambda x, d: (once(*x), *d)
batching.defvectorized(once_p)
mlir.register_lowering(once_p, mlir.lower_fun(lax.optimization_barrier, False))
mlir.register_lowering(once_p, mlir.lower_fun(_through_branch, False), platform="cpu")
