"""What primitives that change shapes are in a step program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .registry import ANY, result_shape, rule_table
from .values import Unsupported, Value

RULES, rule = rule_table()


@rule("broadcast_in_dim", kinds=ANY)
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
        if math.prod(shape) != x.size:
            raise Unsupported("it combines different sequences")
        return _reshape_to(b, x, tuple(shape))
    return shapes.broadcast(x, shape, broadcast_dimensions, b.batch)


@rule("reshape", kinds=ANY)
def _reshape(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any = None, **_: Any):
    if dimensions is not None:
        x = turned(b, x, dimensions)
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
        if axis is None and x.axis is not None:  # an axis of the only sequence
            x = x._replace(summed=True)
    return x._replace(shape=features, strides=shapes.row_major(features), axis=axis)


@rule("squeeze", kinds=ANY)
def _squeeze(
    b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any
) -> Value:
    if x.axis in dimensions and b.batch == 1:
        return _reshape_to(b, x, result_shape(eqn))
    return shapes.drop_axes(x, dimensions)


@rule("expand_dims", kinds=ANY)
def _expand(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any) -> Value:
    return shapes.insert_axes(x, dimensions, len(result_shape(eqn)))


@rule("transpose", kinds=ANY)
def _transpose(
    b: Builder, eqn: JaxprEqn, x: Value, *, permutation: Any, **_: Any
) -> Value:
    return turned(b, x, permutation)


def turned(b: Builder, x: Value, permutation: Sequence[int]) -> Value:
    """Return `lax.transpose` of a value, which may be a sum over sequences."""
    if x.summed:
        one = x._replace(summed=False)
        return shapes.transpose(one, permutation, b.batch)._replace(summed=True)
    return shapes.transpose(x, permutation, b.batch)


@rule("slice", kinds=ANY)
def _slice(
    b: Builder, eqn: JaxprEqn, x: Value, *, start_indices: Any, strides: Any, **_: Any
) -> Value:
    return shapes.take(x, start_indices, result_shape(eqn), b.batch, strides)


@rule("rev", kinds=ANY)
def _rev(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any) -> Value:
    shape = shapes.full_shape(x, b.batch)
    turned = [i in dimensions for i in range(len(shape))]
    start = [n - 1 if t else 0 for n, t in zip(shape, turned, strict=True)]
    steps = [-1 if t else 1 for t in turned]
    return shapes.take(x, start, shape, b.batch, steps)


@rule("split", kinds=ANY)
def _split(
    b: Builder, eqn: JaxprEqn, x: Value, *, sizes: Any, axis: int, **_: Any
) -> list[Value]:
    start = [0] * len(type_of(eqn.invars[0]).shape)
    parts = []
    for size, out in zip(sizes, eqn.outvars, strict=True):
        parts.append(shapes.take(x, start, type_of(out).shape, b.batch))
        start[axis] += size
    return parts


@rule("concatenate", kinds=ANY)
def _concatenate(
    b: Builder, eqn: JaxprEqn, *given: Value, dimension: int, **_: Any
) -> Value:
    return join(b, given, dimension, result_shape(eqn))


@rule("stack", kinds=ANY)
def _stack(b: Builder, eqn: JaxprEqn, *given: Value, axis: int, **_: Any) -> Value:
    shape = result_shape(eqn)
    wide = [shapes.insert_axes(v, [axis], len(shape)) for v in given]
    return join(b, wide, axis, shape)


@rule("tile", kinds=ANY)
def _tile(b: Builder, eqn: JaxprEqn, x: Value, *, reps: Any, **_: Any) -> Value:
    shape = list(shapes.full_shape(x, b.batch))
    for axis, count in enumerate(reps):
        shape[axis] *= count
        if count != 1:
            x = join(b, [x] * count, axis, tuple(shape))
    return x


@rule("unstack", kinds=ANY)
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


def join(
    b: Builder, given: Sequence[Value], dimension: int, shape: tuple[int, ...]
) -> Value:
    """Return values joined along an axis of the whole array, which has this shape."""
    given = b.of_one_axis(given, but=[dimension])
    if any(v.summed for v in given):
        return _join_sums(b, given, dimension, shape)
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


def _join_sums(
    b: Builder, given: Sequence[Value], dimension: int, shape: tuple[int, ...]
) -> Value:
    """Join sums over sequences and zeros, as a sum of what is joined."""
    rows = []
    for value in given:
        if not value.summed and value.buffer.numbers != (0.0,):
            raise Unsupported("it combines different sequences")
        wide = (1, *value.shape), (0, *value.strides)
        rows.append(
            value._replace(axis=0, summed=False)
            if value.summed
            else value._replace(shape=wide[0], strides=wide[1])
        )
    joined = join(b, rows, dimension + 1, (b.batch, *shape))
    return joined._replace(axis=None, summed=True)


@rule("pad", kinds=ANY)
def _pad(
    b: Builder, eqn: JaxprEqn, x: Value, value: Value, *, padding_config: Any, **_: Any
):
    low, high, inside = zip(*padding_config, strict=True)
    if any(inside):
        x = _spread(b, x, value, inside)
    start = [max(0, -n) for n in low]
    shape = [
        n + min(0, before) + min(0, after)
        for n, before, after in zip(
            shapes.full_shape(x, b.batch), low, high, strict=True
        )
    ]
    if min(shape, default=0) < 0:
        raise Unsupported("it cuts more than there is")
    x = shapes.take(x, start, shape, b.batch)
    for axis, sides in enumerate(zip(low, high, strict=True)):
        for size, first in zip(sides, (True, False), strict=True):
            if size > 0:
                new = [*shape[:axis], size, *shape[axis + 1 :]]
                side = shapes.broadcast(value, new, (), b.batch)
                shape[axis] += size
                parts = [side, x] if first else [x, side]
                x = join(b, parts, axis, tuple(shape))
    return x


def _spread(b: Builder, x: Value, value: Value, inside: Sequence[int]) -> Value:
    """Return a value with so many others between the elements of each axis."""
    if x.summed:
        if value.buffer.numbers != (0.0,):  # it would be added for each sequence
            raise Unsupported("it combines different sequences")
        rows = x._replace(axis=0, summed=False)
        return _spread(b, rows, value, [0, *inside])._replace(axis=None, summed=True)
    inside = list(inside)
    if x.axis is not None and inside.pop(x.axis):
        raise Unsupported("it pads the axis of sequences")
    shape = [max(0, n + (n - 1) * k) for n, k in zip(x.shape, inside, strict=True)]
    result = b.local(shape, x.axis)
    filled = value._replace(shape=tuple(shape), strides=(0,) * len(shape))
    b.write("copy", result, filled)
    strides = [s * (k + 1) for s, k in zip(result.strides, inside, strict=True)]
    b.write("copy", result._replace(shape=x.shape, strides=tuple(strides)), x)
    return result


_CUMULATIVE = {"cumsum": "add", "cumprod": "multiply", "cummax": "max", "cummin": "min"}


@rule("cummax", "cummin", kinds="fi")
@rule("cumsum", "cumprod")
def _cumulate(
    b: Builder, eqn: JaxprEqn, x: Value, *, axis: int, reverse: bool, **_: Any
) -> Value:
    """Combine each element with the one that is 1, 2, 4, ... places before it."""
    if axis == x.axis or x.summed:
        raise Unsupported("it combines different sequences")
    operation = _CUMULATIVE[eqn.primitive.name]
    shape = list(shapes.full_shape(x, b.batch))
    count, shift = shape[axis], 1

    def part(value: Value, first: int, size: int) -> Value:
        start = [0] * len(shape)
        start[axis] = first
        return shapes.take(
            value, start, [*shape[:axis], size, *shape[axis + 1 :]], b.batch
        )

    while shift < count:
        rest = count - shift
        near, far = part(x, shift, rest), part(x, 0, rest)
        ends = part(x, rest, shift) if reverse else part(x, 0, shift)
        sums = b.elementwise(operation, near, far)
        parts = [sums, ends] if reverse else [ends, sums]
        x = join(b, parts, axis, tuple(shape))
        shift *= 2
    return x


@rule("iota", kinds="fi")
def _iota(b: Builder, eqn: JaxprEqn, *, dimension: int, shape: Any, **_: Any) -> Value:
    if shape[dimension] > 2**16:
        raise Unsupported("it counts beyond 2^16")
    numbers = b.constant(*map(float, range(shape[dimension])))
    if not numbers.shape:
        numbers = numbers._replace(shape=(1,), strides=(1,))
    wide = shapes.broadcast(numbers, shape, (dimension,), b.batch)
    if not jnp.issubdtype(type_of(eqn.outvars[0]).dtype, jnp.integer):
        return wide
    return wide._replace(most=shape[dimension])
