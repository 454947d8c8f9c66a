"""Functions inside of a `shard_map`, traced apart from the axes that values vary over.

A step is traced without these axes, and what stands in it keeps its types, so that JAX
cannot differentiate a loop over it among values that vary. Here such a function is one
operation, which holds it as a jaxpr; its derivatives are such operations, too.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat
from .._rnn.eager import always_jitted
from .._rnn.sharding import make_varying, shaped_array, unvarying, varying
from .._typing import Array
from .gradients import is_float
from .jaxprs import evaluate, split_at, struct, type_of

Function = Callable[..., list[Array]]


def call(function: Function, *args: Any) -> list[Array]:
    """Return `function(*args)`, as one operation if some of the arrays vary."""
    types = [jax.typeof(a) for a in args]
    if not any(map(varying, types)):
        return function(*args)
    closed = jax.make_jaxpr(function)(*map(unvarying, types))
    given = make_varying([*closed.consts, *args])
    return apart_p.bind(*given, jaxpr=closed.jaxpr)


def jvp(
    function: Function, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Array], list[Any]]:
    """Return the results of `function(*primals)` and their tangents."""
    which = [
        i
        for i, (p, t) in enumerate(zip(primals, tangents, strict=True))
        if type(t) is not ad.Zero and is_float(p)
    ]

    def of_values(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        of_some = lambda *values: function(*_replaced(primals, which, values))  # noqa: E731
        return jax.jvp(of_some, [primals[i] for i in which], list(tangents))

    def dots(*values: Any) -> list[Array]:
        results, found = of_values(*split_at(values, [len(primals)]))
        return [d for r, d in zip(results, found, strict=True) if is_float(r)]

    given = [tangents[i] for i in which]
    if not any(varying(jax.typeof(a)) for a in (*primals, *given)):
        return of_values(primals, given)
    results = call(function, *primals)
    found = iter(call(dots, *primals, *given))
    return results, [next(found) if is_float(r) else no_tangent(r) for r in results]


def transpose(
    function: Function, cotangents: Sequence[Any], args: Sequence[Any]
) -> list[Any]:
    """Return the cotangents of those arguments that are not known.

    Args:
        function: is linear in them.
        cotangents: of its results.
        args: arrays, and types in place of what is not known.
    """
    which = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    others = [i for i in range(len(args)) if i not in which]
    types = [struct(args[i].aval) for i in which]
    bar = [a for a in map(ad.instantiate_zeros, cotangents) if is_float(a)]

    def back(*values: Any) -> list[Array]:
        known, bar = split_at(values, [len(others)])
        full = _replaced([None] * len(args), others, known)

        def of_unknown(*unknown: Any) -> list[Array]:
            results = function(*_replaced(full, which, unknown))
            return [a for a in results if is_float(a)]

        return jax.linear_transpose(of_unknown, *types)(bar)

    found = call(back, *(args[i] for i in others), *bar)
    return _replaced([None] * len(args), which, found)


def lowered(function: Callable) -> Callable:
    """Return the lowering rule that traces a function apart from these axes."""
    rule = mlir.lower_fun(function, True)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        return rule(_compat.with_types(ctx, unvarying), *args, **params)

    return lower


def no_tangent(result: Array) -> ad.Zero:
    """Return the tangent of a result that has none."""
    return ad.Zero(jax.typeof(result).to_tangent_aval())


def _replaced(values: Sequence[Any], at: Sequence[int], others: Sequence[Any]) -> list:
    full = list(values)
    for i, other in zip(at, others, strict=True):
        full[i] = other
    return full


# --------------------------------------------------------------------- the operation


def _run(*args: Array, jaxpr: Jaxpr) -> list[Array]:
    constants, given = split_at(args, [len(jaxpr.constvars)])
    return evaluate(ClosedJaxpr(jaxpr, constants), given)


def _types(*avals: Any, jaxpr: Jaxpr) -> list[Any]:
    results = map(type_of, jaxpr.outvars)
    return [shaped_array(a.shape, a.dtype, avals) for a in results]


def _jvp(primals: Any, tangents: Any, *, jaxpr: Jaxpr) -> Any:
    return jvp(ft.partial(_run, jaxpr=jaxpr), primals, tangents)


def _transpose(cotangents: Any, *args: Any, jaxpr: Jaxpr) -> list[Any]:
    return transpose(ft.partial(_run, jaxpr=jaxpr), cotangents, args)


def _batch(args: Any, dims: Any, *, jaxpr: Jaxpr) -> tuple[list[Array], list[int]]:
    mapped = jax.vmap(ft.partial(_run, jaxpr=jaxpr), in_axes=tuple(dims))
    out = call(mapped, *args)
    return out, [0] * len(out)


apart_p = Primitive("ostinato_apart")
apart_p.multiple_results = True


@ft.partial(jax.jit, static_argnames="jaxpr")
def _apply(*args: Array, jaxpr: Jaxpr) -> list[Array]:
    return apart_p.bind(*args, jaxpr=jaxpr)


apart_p.def_impl(always_jitted(_apply))
apart_p.def_abstract_eval(_types)
ad.primitive_jvps[apart_p] = _jvp
ad.primitive_transposes[apart_p] = _transpose
batching.primitive_batchers[apart_p] = _batch
mlir.register_lowering(apart_p, lowered(_run))
