"""What primitives that reduce over axes are in a step program; see also `rules`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .registry import ANY, is_integer, refuse_integers, rule_table
from .shape_rules import join
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()
_MOST_TAKEN = 16
"""The largest elements that `top_k` takes at most: each is found by some operations."""


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
    _check_places(x, axis)
    if eqn.primitive.name == "argmin":
        x = b.elementwise("negate", x)
    return _first_most(b, x, axis).place


@rule("top_k")
def _top_k(
    b: Builder, eqn: JaxprEqn, x: Value, *, k: int, axis: int, **_: Any
) -> list[Value]:
    """Return the largest elements, NaN before others, and their indices."""
    _check_places(x, axis)
    if k > _MOST_TAKEN:
        raise Unsupported(f"it takes more than {_MOST_TAKEN} of the largest elements")
    left = b.constant(1.0)
    shape = type_of(eqn.outvars[0]).shape
    values, places = [], []
    for _number in range(k):
        first = _first_most(b, x, axis, left if values else None)
        values.append(shapes.insert_axes(first.most, [axis], len(shape)))
        places.append(shapes.insert_axes(first.place, [axis], len(shape)))
        left = b.elementwise("select", first.here, b.constant(0.0), left)
    found = [join(b, parts, axis, shape) for parts in (values, places)]
    return [found[0], found[1]._replace(most=places[0].most)]


class _First(NamedTuple):
    """The first of the largest elements along an axis.

    Attributes:
        most: the largest element.
        place: the index of the first one.
        here: 1 at that place, 0 elsewhere.
    """

    most: Value
    place: Value
    here: Value


def _check_places(x: Value, axis: int) -> None:
    if axis == x.axis or x.summed:
        raise Unsupported("it combines different sequences")
    if x.shape[axis - (x.axis is not None and axis > x.axis)] > 2**16:
        raise Unsupported("it counts beyond 2^16")


def _first_most(b: Builder, x: Value, axis: int, left: Value | None = None) -> _First:
    """Return the first of the largest elements, or of NaN, where `left` is not 0."""
    if left is not None:
        x = b.elementwise("select", left, x, b.constant(-math.inf))
    along = axis - (x.axis is not None and axis > x.axis)
    count, rank = x.shape[along], len(x.shape) + (x.axis is not None)
    axis_of_most = None if x.axis is None else x.axis - (axis < x.axis)

    def largest(value: Value) -> tuple[Value, Value]:
        most = b.reduce("max", value, [along])._replace(axis=axis_of_most)
        return most, shapes.insert_axes(most, [axis], rank)

    most, wide = largest(x)
    a_nan = b.elementwise("subtract", b.constant(1.0), b.elementwise("equal", x, x))
    found = b.elementwise("max", b.elementwise("equal", x, wide), a_nan)
    if left is not None:
        found = b.elementwise("multiply", found, left)
    # Counted from the last one, so that the first one is the largest.
    numbers = b.constants_along(range(count, 0, -1), axis, rank)
    first, wide = largest(b.elementwise("multiply", found, numbers))
    index = b.elementwise("subtract", b.constant(float(count)), first)
    here = b.elementwise("equal", numbers, wide)
    return _First(most, index._replace(most=count), here)
