"""What primitives that reduce over axes are in a step program; see also `rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .registry import ANY, is_integer, refuse_integers, rule_table
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()


@rule("reduce_sum", "reduce_max", "reduce_min", kinds=ANY)
@rule("reduce_and", "reduce_or", kinds="b")
def _reduce(b: Builder, eqn: JaxprEqn, x: Value, *, axes: Any, **_: Any) -> Value:
    name = eqn.primitive.name
    (x,) = b.of_one_axis([x])
    if x.summed:
        if name != "reduce_sum":
            raise Unsupported("it combines different sequences")
        rows = x._replace(summed=False, axis=0)
        inner = reduce_features(b, name, rows, list(axes))
        return inner._replace(summed=True, axis=None)
    features = [a - (x.axis is not None and a > x.axis) for a in axes if a != x.axis]
    if x.axis in axes:
        refuse_integers(eqn)
        if name != "reduce_sum" and b.batch > 1:
            raise Unsupported("it combines different sequences")
        x = reduce_features(b, name, x, features)
        return x._replace(axis=None, summed=True)
    result = reduce_features(b, name, x, features)
    if not is_integer(eqn):
        return result
    count = x.size // max(result.size, 1) if name == "reduce_sum" else 1
    return result._replace(most=most_of(x) * count)


def reduce_features(b: Builder, name: str, x: Value, axes: Sequence[int]) -> Value:
    if not axes:
        return x
    if name in ("reduce_min", "reduce_and"):
        negated = b.elementwise("negate", x)
        return b.elementwise("negate", reduce_features(b, "reduce_max", negated, axes))
    axis = x.axis
    result = b.reduce("sum" if name == "reduce_sum" else "max", x, axes)
    if axis is None:
        return result
    return result._replace(axis=axis - sum(a < axis for a in axes))


@rule("reduce_prod")
def _reduce_product(
    b: Builder, eqn: JaxprEqn, x: Value, *, axes: Any, **_: Any
) -> Value:
    if x.axis in axes or x.summed:
        raise Unsupported("it combines different sequences")
    for axis in sorted(axes, reverse=True):
        x = _multiply_along(b, x, axis)
    return x


def _multiply_along(b: Builder, x: Value, axis: int) -> Value:
    """Multiply the halves of an axis until it has one element."""
    shape = list(shapes.full_shape(x, b.batch))

    def part(value: Value, first: int, size: int) -> Value:
        start = [0] * len(shape)
        start[axis] = first
        sizes = [*shape[:axis], size, *shape[axis + 1 :]]
        return shapes.take(value, start, sizes, b.batch)

    count = shape[axis]
    if count == 0:
        raise Unsupported("it multiplies nothing")
    odd = []
    while count > 1:
        half = count // 2
        if count % 2:
            odd.append(part(x, count - 1, 1))
        x = b.elementwise("multiply", part(x, 0, half), part(x, half, half))
        count = half
    for one in odd:
        x = b.elementwise("multiply", x, one)
    return shapes.drop_axes(x, [axis])


@rule("argmax", "argmin", kinds=ANY)
def _arg_extreme(b: Builder, eqn: JaxprEqn, x: Value, *, axes: Any, **_: Any) -> Value:
    """Return the least index of an element that is the largest one, or NaN."""
    (axis,) = axes
    if axis == x.axis or x.summed:
        raise Unsupported("it combines different sequences")
    along = axis - (x.axis is not None and axis > x.axis)
    count = x.shape[along]
    if count > 2**16:
        raise Unsupported("it counts beyond 2^16")
    if eqn.primitive.name == "argmin":
        x = b.elementwise("negate", x)
    most = b.reduce("max", x, [along])
    axis_of_most = None if x.axis is None else x.axis - (axis < x.axis)
    most = most._replace(axis=axis_of_most)
    rank = len(type_of(eqn.invars[0]).shape)
    wide = shapes.insert_axes(most, [axis], rank)
    a_nan = b.elementwise("subtract", b.constant(1.0), b.elementwise("equal", x, x))
    found = b.elementwise("max", b.elementwise("equal", x, wide), a_nan)
    # Counted from the last one, so that the first one is the largest.
    numbers = b.constant(*map(float, range(count, 0, -1)))
    shape = [1] * len(x.shape)
    shape[along] = count
    strides = [0] * len(x.shape)
    strides[along] = 1
    numbers = numbers._replace(shape=tuple(shape), strides=tuple(strides))
    if x.axis is not None:
        numbers = shapes.insert_axes(numbers, [x.axis], rank)
    left = b.reduce("max", b.elementwise("multiply", found, numbers), [along])
    left = left._replace(axis=axis_of_most)
    index = b.elementwise("subtract", b.constant(float(count)), left)
    return index._replace(most=count)
