"""Run a jaxpr on the values of all examples, one rule per primitive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ..._source_lines import user_line
from .regions import Region, with_regions
from .registry import Unsupported, entry_of
from .sizes import symbolic_axes
from .values import Flat, Padded, Shared, Value, ragged_axes

if TYPE_CHECKING:
    from .context import Context


def evaluate(ctx: Context, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
    """Return the results of `jaxpr`, closed or without constants, on `values`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    closed = ctx.varying(list(getattr(jaxpr, "consts", ())))
    consts = [Shared(c, jnp.shape(c)) for c in closed]
    known: dict[Any, Value] = dict(zip(inner.constvars, consts, strict=True))
    known |= dict(zip(inner.invars, values, strict=True))

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            number = int(atom.val) if isinstance(atom.val, (int, np.integer)) else None
            x = jnp.asarray(np.asarray(atom.val), aval.dtype)
            (x,) = ctx.varying([x])
            return Shared(x, (), number=number)
        return known[atom]

    tiered = ctx.options.tiers and not isinstance(inner, Region)
    for eqn in with_regions(inner) if tiered else inner.eqns:
        with eqn.ctx.manager:
            results = _apply(ctx.at(eqn), eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in inner.outvars]


def _apply(ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    entry = entry_of(eqn.primitive)
    rule = entry.rule if entry else _without_rule
    try:
        results = rule(ctx, eqn, *values, **eqn.params)
    except Unsupported as reason:
        operands = ", ".join(str(atom.aval) for atom in eqn.invars)
        raise NotImplementedError(
            f"ragged.vmap cannot map the primitive '{eqn.primitive.name}': {reason}\n"
            f"  operands: {operands}\n"
            f"  at {user_line(ctx.equations)}"
        ) from None
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    arrays = ctx.varying([v.x for v in results])
    results = [
        v if v.x is x else dataclasses.replace(v, x=x)
        for v, x in zip(results, arrays, strict=True)
    ]
    for variable, value in zip(eqn.outvars, results, strict=True):
        _check(ctx, eqn, variable.aval, value)
    if any(map(ragged_axes, values)) or not values:
        return [_of_complete(ctx, value) for value in results]
    return results


def _of_complete(ctx: Context, value: Value) -> Value:
    """Return a value that has lost its ragged axes, safe for incomplete examples."""
    if isinstance(value, Padded) and not ragged_axes(value):
        return dataclasses.replace(value, x=ctx.of_complete(value.x))
    return value


def _check(ctx: Context, eqn: JaxprEqn, aval: Any, value: Value) -> None:
    """Raise TypeError where a rule returns another type than the primitive does."""
    shape = ctx.at_max(value.shape)
    if isinstance(value, Padded):
        shape = (ctx.batch, *shape)
    elif isinstance(value, Flat):
        shape = ctx.flat_shape(value.shape, value.axis)
    got = (value.shape, value.x.shape, value.x.dtype)
    want = (tuple(aval.shape), shape, aval.dtype)
    if got != want:
        raise TypeError(
            f"the ragged rule of '{eqn.primitive.name}' must give a "
            f"{type(value).__name__} of shape, array shape and dtype {want}, got {got}"
        )


def _without_rule(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    """Map a primitive without a rule: exact where no size depends on the example.

    Raises:
        Unsupported: a size depends on the example.
    """
    atoms = [*eqn.invars, *eqn.outvars]
    if any(symbolic_axes(getattr(atom.aval, "shape", ())) for atom in atoms):
        raise Unsupported(
            "it has no rule for an axis of different sizes; write one with "
            "ragged.register, or use other operations"
        )
    params = eqn.primitive.get_bind_params(eqn.params)

    def bind(_: Any, *arrays: Any) -> list:
        results = eqn.primitive.bind(*arrays, **params)
        return results if eqn.primitive.multiple_results else [results]

    return ctx.batched(bind, values, ctx.out_shapes(eqn), sized=False)
