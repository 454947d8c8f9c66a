"""The rule of matrix products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._rnn.accumulation import accumulation_dtype
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import register
from ..core.sizes import is_symbolic
from ..core.values import (
    Flat,
    Padded,
    Shared,
    Value,
    filled_as,
    is_dense,
    is_filled,
    ragged_axes,
    with_array,
)
from ..types.segments import along, positions, sum_per_example
from .reduce import reduced_size


@register("dot_general")
def _dot_general(
    ctx: Context,
    eqn: JaxprEqn,
    a: Value,
    b: Value,
    *,
    dimension_numbers: Any,
    **params: Any,
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers

    def bind(a: Array, b: Array) -> Array:
        return eqn.primitive.bind(a, b, dimension_numbers=dimension_numbers, **params)

    if isinstance(a, Flat) and a.axis not in contract_a and is_dense(b):
        free = _free(a, contract_a, batch_a)
        return Flat(bind(a.x, b.x), shape, len(batch_a) + free.index(a.axis))
    if isinstance(b, Flat) and b.axis not in contract_b and is_dense(a):
        free = _free(b, contract_b, batch_b)
        before = len(a.shape) - len(contract_a)
        return Flat(bind(a.x, b.x), shape, before + free.index(b.axis))

    axes = ragged_axes(a), ragged_axes(b)
    if [len(x) for x in axes] == [1, 1] and (
        isinstance(a, Flat) or isinstance(b, Flat)
    ):
        (axis_a,), (axis_b,) = axes
        if (axis_a, axis_b) in zip(batch_a, batch_b, strict=True):
            tokens = bind(ctx.to_flat(a).x, ctx.to_flat(b).x)
            return Flat(tokens, shape, batch_a.index(axis_a))
        if (axis_a, axis_b) in zip(contract_a, contract_b, strict=True) and not batch_a:
            vectors = len(a.shape) == len(contract_a), len(b.shape) == len(contract_b)
            if any(vectors):
                aval: Any = eqn.outvars[0].aval
                x = _weighted_sum(
                    ctx, a, b, contract_a, contract_b, vectors, aval.dtype
                )
                return Padded(x, shape)

    adds_up = any(is_symbolic(a.shape[i]) for i in contract_a)
    if not adds_up and isinstance(a, Shared) and isinstance(b, Shared):
        operands = [_cleared_for_all(ctx, v) for v in (a, b)]
        return ctx.unsized(bind, operands, shape)

    def cleared(
        sizes: Sizes, x: Array, value: Value, contract: tuple[int, ...]
    ) -> Array:
        if not is_filled(value):
            # Axes that stay, too: the derivative adds up over them, and a cotangent of
            # zero times NaN is NaN.
            return sizes.cleared(x, value.shape)
        for axis in contract:
            if is_symbolic(value.shape[axis]):
                size = reduced_size(sizes, value.shape[axis], shape)
                inside = along(positions(x.shape[axis]) < size, axis, x.ndim)
                x = jnp.where(inside, x, jnp.zeros((), x.dtype))
        return x

    def product(sizes: Sizes, x: Array, y: Array) -> list[Array]:
        x, y = cleared(sizes, x, a, contract_a), cleared(sizes, y, b, contract_b)
        return [bind(x, y)]

    (result,) = ctx.batched(product, [a, b], [shape])
    result = filled_as(result, a, b)
    one = isinstance(result, Padded) and len(ragged_axes(result)) == 1
    if one and ctx.options.prefers_flat:
        return ctx.to_flat(result)  # operations after it then need not run on padding
    return result


def _cleared_for_all(ctx: Context, value: Shared) -> Value:
    """Return a value with zeros where no example has an element."""
    if not ragged_axes(value):
        return value
    zero = jnp.zeros((), value.x.dtype)
    return with_array(value, jnp.where(ctx.inside(value), value.x, zero))


def _free(x: Value, contract: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    return [i for i in range(len(x.shape)) if i not in contract and i not in batch]


def _weighted_sum(
    ctx: Context,
    a: Value,
    b: Value,
    contract_a: tuple[int, ...],
    contract_b: tuple[int, ...],
    vectors: tuple[bool, bool],
    dtype: Any,
) -> Array:
    """Return a product that contracts all axes of one operand: a sum over tokens."""
    x, y = (a, b) if vectors[0] else (b, a)
    axes_x, axes_y = (
        (contract_a, contract_b) if vectors[0] else (contract_b, contract_a)
    )
    x, y = ctx.to_flat(x), ctx.to_flat(y)
    place = axes_x.index(x.axis)
    weights = jnp.transpose(x.x, axes_x).astype(accumulation_dtype(dtype))
    rest = _free(y, axes_y, ())
    terms = jnp.transpose(y.x, (*axes_y, *rest)).astype(accumulation_dtype(dtype))
    weights = weights.reshape(*weights.shape, *[1] * len(rest))
    others = tuple(i for i in range(len(axes_x)) if i != place)
    tokens = jnp.sum(
        jnp.moveaxis(weights * terms, place, 0), [1 + i for i in range(len(others))]
    )
    return sum_per_example(tokens, ctx.segments(x.dim), ctx.batch).astype(dtype)
