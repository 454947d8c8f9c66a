"""What primitives that change shapes are in a step program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from . import values as shapes
from .builder import Builder
from .jaxprs import type_of
from .registry import result_shape, rule_table
from .values import Unsupported, Value

RULES, rule = rule_table()


@rule("broadcast_in_dim")
def _broadcast(
    b: Builder,
    eqn: JaxprEqn,
    x: Value,
    *,
    shape: Any,
    broadcast_dimensions: Any,
    **_: Any,
) -> Value:
    if x.summed and b.batch > 1:
        if len(broadcast_dimensions) != len(shape) and math.prod(shape) != x.size:
            raise Unsupported("it combines different sequences")
        return _reshape_to(b, x, tuple(shape))
    return shapes.broadcast(x, shape, broadcast_dimensions, b.batch)


@rule("reshape")
def _reshape(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any = None, **_: Any):
    if dimensions is not None:
        raise Unsupported("it reshapes in another order")
    return _reshape_to(b, x, result_shape(eqn))


def _reshape_to(b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
    axis = None
    if x.axis is not None:
        try:
            axis = shapes.axis_after_reshape(x, shape, b.batch)
        except Unsupported:
            if b.batch != 1 or x.axis != 0:
                raise
            x = x._replace(axis=None, summed=True)  # of one sequence
    features = tuple(n for i, n in enumerate(shape) if i != axis)
    if not x.is_contiguous():
        x = b.elementwise("copy", x)
    return x._replace(shape=features, strides=shapes.row_major(features), axis=axis)


@rule("squeeze")
def _squeeze(
    b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any
) -> Value:
    if x.axis in dimensions and b.batch == 1:
        return _reshape_to(b, x, result_shape(eqn))
    return shapes.drop_axes(x, dimensions)


@rule("expand_dims")
def _expand(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any) -> Value:
    return shapes.insert_axes(x, dimensions, len(result_shape(eqn)))


@rule("transpose")
def _transpose(
    b: Builder, eqn: JaxprEqn, x: Value, *, permutation: Any, **_: Any
) -> Value:
    if x.summed:
        turned = x._replace(summed=False)
        return shapes.transpose(turned, permutation, b.batch)._replace(summed=True)
    return shapes.transpose(x, permutation, b.batch)


@rule("slice")
def _slice(
    b: Builder, eqn: JaxprEqn, x: Value, *, start_indices: Any, strides: Any, **_: Any
) -> Value:
    if strides is not None and any(s != 1 for s in strides):
        raise Unsupported("it slices with steps")
    return shapes.take(x, start_indices, result_shape(eqn), b.batch)


@rule("split")
def _split(
    b: Builder, eqn: JaxprEqn, x: Value, *, sizes: Any, axis: int, **_: Any
) -> list[Value]:
    start = [0] * len(type_of(eqn.invars[0]).shape)
    parts = []
    for size, out in zip(sizes, eqn.outvars, strict=True):
        parts.append(shapes.take(x, start, type_of(out).shape, b.batch))
        start[axis] += size
    return parts


@rule("concatenate")
def _concatenate(
    b: Builder, eqn: JaxprEqn, *given: Value, dimension: int, **_: Any
) -> Value:
    return _join(b, given, dimension, result_shape(eqn))


@rule("stack")
def _stack(b: Builder, eqn: JaxprEqn, *given: Value, axis: int, **_: Any) -> Value:
    shape = result_shape(eqn)
    wide = [shapes.insert_axes(v, [axis], len(shape)) for v in given]
    return _join(b, wide, axis, shape)


@rule("unstack")
def _unstack(
    b: Builder, eqn: JaxprEqn, x: Value, *, axis: int, **_: Any
) -> list[Value]:
    shape = list(shapes.full_shape(x, b.batch))
    count, shape[axis] = shape[axis], 1
    parts = []
    for i in range(count):
        start = [0] * len(shape)
        start[axis] = i
        parts.append(shapes.drop_axes(shapes.take(x, start, shape, b.batch), [axis]))
    return parts


def _join(
    b: Builder, given: Sequence[Value], dimension: int, shape: tuple[int, ...]
) -> Value:
    given = b.of_one_axis(given, but=dimension)
    if any(v.summed for v in given):
        raise Unsupported("it combines different sequences")
    axes = {v.axis for v in given if v.axis is not None}
    axis = next(iter(axes), None)
    if len(axes) > 1 or axis == dimension:
        raise Unsupported("it joins the axis of sequences")
    if axis is not None:
        given = [b.as_rows(v, axis) for v in given]
    where = dimension - (axis is not None and dimension > axis)
    key = (tuple(given), dimension, shape)
    if key in b.joined:
        return b.joined[key]
    result = b.local([n for i, n in enumerate(shape) if i != axis], axis)
    b.joined[key] = result
    at = 0
    for value in given:
        part = result._replace(
            offset=at * result.strides[where],
            shape=(
                *result.shape[:where],
                value.shape[where],
                *result.shape[where + 1 :],
            ),
        )
        b.write("copy", part, value)
        at += value.shape[where]
    return result


@rule("pad")
def _pad(
    b: Builder, eqn: JaxprEqn, x: Value, value: Value, *, padding_config: Any, **_: Any
):
    if any(inside for _, _, inside in padding_config):
        raise Unsupported("it pads between elements")
    start = [max(0, -low) for low, _, _ in padding_config]
    shape = [
        n + min(0, low) + min(0, high)
        for n, (low, high, _) in zip(
            shapes.full_shape(x, b.batch), padding_config, strict=True
        )
    ]
    if min(shape, default=0) < 0:
        raise Unsupported("it cuts more than there is")
    x = shapes.take(x, start, shape, b.batch)
    for axis, (low, high, _) in enumerate(padding_config):
        for size, first in ((low, True), (high, False)):
            if size > 0:
                sides = [*shape[:axis], size, *shape[axis + 1 :]]
                side = shapes.broadcast(value, sides, (), b.batch)
                shape[axis] += size
                parts = [side, x] if first else [x, side]
                x = _join(b, parts, axis, tuple(shape))
    return x


@rule("iota")
def _iota(b: Builder, eqn: JaxprEqn, *, dimension: int, shape: Any, **_: Any) -> Value:
    if shape[dimension] > 2**16:
        raise Unsupported("it counts beyond 2^16")
    numbers = b.constant(*map(float, range(shape[dimension])))
    if not numbers.shape:
        numbers = numbers._replace(shape=(1,), strides=(1,))
    wide = shapes.broadcast(numbers, shape, (dimension,), b.batch)
    return wide._replace(most=shape[dimension])
