"""The rules of functions of single elements, which run on the tokens as they lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from ..._compat import ELEMENTWISE
from ..._step.maxima import once_p, with_own_derivative
from ..._typing import Array
from ..core.context import Context
from ..core.registry import register
from ..core.sizes import evaluate, is_symbolic, symbolic_axes
from ..core.values import (
    Flat,
    Padded,
    Shared,
    Value,
    filled_as,
    ragged_axes,
    with_array,
)
from ..primitives.constant import constant_p
from ..types.segments import along

_SAME_NUMBER = {"convert_element_type", "copy", "copy_p", "stop_gradient"}


@register(*ELEMENTWISE, constant_p, once_p, cheap=True)
def _elementwise(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    params = eqn.primitive.get_bind_params(eqn.params)

    def bind(*arrays: Array) -> Array:
        # With symbolic sizes JAX leaves it to the primitive to repeat axes of size 1.
        full = jnp.broadcast_shapes(*(a.shape for a in arrays))
        arrays = tuple(a if a.ndim == 0 else jnp.broadcast_to(a, full) for a in arrays)
        own = with_own_derivative(eqn, list(arrays))
        return eqn.primitive.bind(*arrays, **params) if own is None else own[0]

    given = values
    axes = symbolic_axes(shape)
    if len(axes) == 1 and _lies_flat(ctx, values):
        (axis,) = axes
        return Flat(bind(*_token_operands(ctx, values, shape, axis)), shape, axis)
    if axes:
        values = tuple(
            v if isinstance(atom, Literal) else _whole(ctx, v, shape, values)
            for v, atom in zip(values, eqn.invars, strict=True)
        )
    result = filled_as(ctx.unsized(bind, values, shape), *given)
    if eqn.primitive.name in _SAME_NUMBER and not isinstance(given[0], Flat):
        number, dtype = given[0].number, result.x.dtype
        if number is not None and _has_sizes(dtype):
            return dataclasses.replace(result, number=number)
    return result


def _has_sizes(dtype: Any) -> bool:
    """Return whether numbers of a type may be any size of an axis."""
    return dtype.kind != "b" and dtype.itemsize >= 4


def _whole(
    ctx: Context, value: Value, shape: tuple[Any, ...], values: tuple[Value, ...]
) -> Value:
    """Return `value` broadcast to the shape of the result, of all examples.

    The cotangent of padding, maybe NaN, is then dropped before it is added up.
    """
    if not jnp.issubdtype(value.x.dtype, jnp.inexact):
        return value
    full = ctx.at_max(shape)
    if all(isinstance(v, Shared) for v in values):
        return Shared(jnp.broadcast_to(value.x, full), shape)
    x = ctx.to_padded(ctx.of_nonempty(value, [shape])).x
    x = x.reshape(ctx.batch, *[1] * (len(full) - x.ndim + 1), *x.shape[1:])
    return Padded(jnp.broadcast_to(x, (ctx.batch, *full)), shape)


def _lies_flat(ctx: Context, values: tuple[Value, ...]) -> bool:
    """Return whether flat is the better layout: not if all are padded, or shared."""
    if any(isinstance(v, Flat) for v in values):
        return True
    padded = [v for v in values if isinstance(v, Padded)]
    own = bool(padded) and not any(ragged_axes(v) for v in padded)
    return own and ctx.options.prefers_flat


def _token_operands(
    ctx: Context, values: tuple[Value, ...], shape: tuple[Any, ...], axis: int
) -> list[Array]:
    """Return arrays that broadcast to the flat result; sizes of 1 and scalars stay."""
    arrays = []
    for value in values:
        if len(value.shape) == len(shape) and is_symbolic(value.shape[axis]):
            x = ctx.to_flat(value).x
        elif isinstance(value, Shared):
            x = value.x
        elif value.shape == ():
            x = along(ctx.per_token(value, shape[axis]), axis, len(shape))
        else:
            tokens = ctx.per_token(value, shape[axis])
            x = jnp.moveaxis(jnp.squeeze(tokens, axis + 1), 0, axis)
        arrays.append(x)
    return arrays


@register("bitcast_convert_type", cheap=True)
def _bitcast(ctx: Context, eqn: JaxprEqn, x: Value, *, new_dtype: Any) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    if isinstance(x, Flat):
        return Flat(lax.bitcast_convert_type(x.x, new_dtype), shape, x.axis)
    return ctx.unsized(lambda x: lax.bitcast_convert_type(x, new_dtype), [x], shape)


@register("dim_as_value", cheap=True)
def _dim_as_value(ctx: Context, eqn: JaxprEqn, *, dim: Any) -> Value:
    aval: Any = eqn.outvars[0].aval
    size = evaluate(dim, ctx.symbols.values)
    size = jnp.broadcast_to(jnp.asarray(size, aval.dtype), (ctx.batch,))
    return Padded(size, (), number=dim)


@register("sharding_constraint", cheap=True)
def _constrain(ctx: Context, eqn: JaxprEqn, x: Value, **params: Any) -> Value:
    """Constrain the tokens as the ragged axis is to be."""
    (shape,) = ctx.out_shapes(eqn)
    if isinstance(x, Flat):
        return Flat(eqn.primitive.bind(x.x, **params), shape, x.axis)
    constrained = ctx.unsized(lambda a: eqn.primitive.bind(a, **params), [x], shape)
    return filled_as(constrained, x)


@register("device_put", "optimization_barrier", cheap=True)
def _unchanged(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    params = eqn.primitive.get_bind_params(eqn.params)
    arrays = eqn.primitive.bind(*(v.x for v in values), **params)
    return list(map(with_array, values, arrays))
