"""Values of a step as views of buffers, and how operations on shapes change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .program import Buffer


class Unsupported(Exception):
    """Raised where the native loop lacks what a step does; the message says what."""


class UnusualOrder(Unsupported):
    """Raised where an instruction cannot step through elements; a copy helps."""


class Value(NamedTuple):
    """A value of a step: an array with an axis of sequences, or without one.

    Attributes:
        buffer: where it is.
        offset: of its first element there.
        shape: without the axis of sequences.
        strides: of these axes.
        axis: which axis of the whole array is that of sequences; None if all sequences
            share the value.
        summed: whether the sum of the value over all sequences is meant.
        most: for integers, the largest absolute value that is possible.
    """

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    axis: int | None
    summed: bool = False
    most: int | None = None

    @property
    def size(self) -> int:
        """The number of elements for one sequence."""
        return math.prod(self.shape)

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Return whether this is all of what was written as an array of this shape."""
        same = self.size == math.prod(shape)
        return same and self.offset == 0 and self.is_contiguous()

    def is_contiguous(self) -> bool:
        """Return whether elements of a sequence follow one another in memory."""
        merged = merge_axes(self.shape, [self.strides])
        return merged.shape in ((), (self.size,)) and (
            not merged.shape or merged.strides[0] == (1,)
        )


def most_of(value: Value) -> int:
    """Return the largest absolute value of an integer, or of a truth value."""
    if value.buffer.numbers:
        return int(max(map(abs, value.buffer.numbers)))
    return 1 if value.most is None else value.most


class Merged(NamedTuple):
    """Axes, merged where they can be; `strides` has a tuple for each array."""

    shape: tuple[int, ...]
    strides: list[tuple[int, ...]]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def merge_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Merged:
    """Merge adjacent axes that all arrays step through evenly; drop axes of size 1."""
    sizes: list[int] = []
    steps: list[list[int]] = []
    for axis, size in enumerate(shape):
        here = [s[axis] for s in strides]
        if size == 1:
            continue
        if sizes and all(a == size * b for a, b in zip(steps[-1], here, strict=True)):
            sizes[-1] *= size
            steps[-1] = here
        else:
            sizes.append(size)
            steps.append(here)
    by_array = [tuple(step[i] for step in steps) for i in range(len(strides))]
    return Merged(tuple(sizes), by_array)


def full_shape(value: Value, batch: int) -> tuple[int, ...]:
    """Return the shape with the axis of sequences."""
    if value.axis is None:
        return value.shape
    return (*value.shape[: value.axis], batch, *value.shape[value.axis :])


def insert_axes(value: Value, axes: Sequence[int], rank: int) -> Value:
    """Return `value` with axes of size 1 at positions of an array of `rank` axes."""
    shape, strides, axis = [], [], None
    old = iter(range(rank - len(axes)))
    features = iter(zip(value.shape, value.strides, strict=True))
    for position in range(rank):
        if position in axes:
            shape.append(1)
            strides.append(0)
        elif next(old) == value.axis:
            axis = position
        else:
            size, stride = next(features)
            shape.append(size)
            strides.append(stride)
    return value._replace(shape=tuple(shape), strides=tuple(strides), axis=axis)


def broadcast(
    value: Value, shape: Sequence[int], dimensions: Sequence[int], batch: int
) -> Value:
    """Return `lax.broadcast_in_dim` of a value."""
    wide = insert_axes(
        value, [i for i in range(len(shape)) if i not in dimensions], len(shape)
    )
    if wide.axis is not None and shape[wide.axis] != batch:
        raise Unsupported("it broadcasts the axis of sequences")
    sizes = [n for i, n in enumerate(shape) if i != wide.axis]
    strides = [
        0 if old == 1 and size != 1 else stride
        for old, size, stride in zip(wide.shape, sizes, wide.strides, strict=True)
    ]
    return wide._replace(shape=tuple(sizes), strides=tuple(strides))


def transpose(value: Value, permutation: Sequence[int], batch: int) -> Value:
    """Return `lax.transpose` of a value."""
    shape = full_shape(value, batch)
    at = [i for i in range(len(shape)) if i != value.axis]
    stride = dict(zip(at, value.strides, strict=True))
    axis = None if value.axis is None else list(permutation).index(value.axis)
    kept = [p for p in permutation if p != value.axis]
    return value._replace(
        shape=tuple(shape[p] for p in kept),
        strides=tuple(stride[p] for p in kept),
        axis=axis,
    )


def has_rows(value: Value) -> bool:
    """Return whether the elements of the last axis follow one another, or are one."""
    steps = [s for n, s in zip(value.shape, value.strides, strict=True) if n != 1]
    return not steps or steps[-1] in (0, 1)


def permuted(value: Value, order: Sequence[int]) -> Value:
    """Return a value with the axes of `shape` in another order."""
    return value._replace(
        shape=tuple(value.shape[i] for i in order),
        strides=tuple(value.strides[i] for i in order),
    )


def permutation(whole: Value, value: Value) -> list[int] | None:
    """Return the order in which `value` has the axes of `whole`; None if it has not."""
    axes = list(zip(whole.shape, whole.strides, strict=True))
    at = dict(zip(axes, range(len(axes)), strict=True))
    order = [at.get(a, -1) for a in zip(value.shape, value.strides, strict=True)]
    return order if sorted(order) == [*range(len(axes))] else None


def order_of_rows(values: Sequence[Value]) -> list[int]:
    """Return the order of axes in which an operation steps through rows of values.

    It is that in which they are, unless all have rows in another order alone.
    """
    given = [*range(len(values[0].shape))]
    for value in values:
        if not has_rows(value):
            order = sorted(given, key=lambda i, s=value.strides: -abs(s[i]))
            if all(has_rows(permuted(v, order)) for v in values):
                return order
    return given


def crossing(result: Value, value: Value) -> Merged | None:
    """Return the axes of a transpose that copies a value; None if it takes another.

    Rows of the result are columns of the value. Of the last two axes of the value, the
    strides are in the order in which a transpose reads them.
    """
    shape, (to, given) = merge_axes(result.shape, [result.strides, value.strides])
    if not shape or to[-1] != 1 or given[-1] in (0, 1) or 1 not in given:
        return None
    column, last = given.index(1), len(shape) - 1
    outer = [i for i in range(last) if i != column]
    axes = [*outer, column, last]
    read = [*outer, last, column]
    return Merged(
        tuple(shape[i] for i in axes),
        [tuple(to[i] for i in axes), tuple(given[i] for i in read)],
    )


def take(
    value: Value,
    start: Sequence[int],
    shape: Sequence[int],
    batch: int,
    steps: Sequence[int] | None = None,
) -> Value:
    """Return a slice of a value.

    Args:
        value: the value.
        start: the first element along each axis of the whole array.
        shape: of the slice of the whole array.
        batch: the number of sequences.
        steps: from element to element, may be negative; None: 1.
    """
    start, shape, steps = list(start), list(shape), list(steps or [1] * len(shape))
    if value.axis is not None:
        axis = value.axis
        whole = start.pop(axis) == 0 and shape.pop(axis) == batch
        if not (whole and (steps.pop(axis) == 1 or batch == 1)):
            raise Unsupported("it slices the axis of sequences")
    offset = sum(a * s for a, s in zip(start, value.strides, strict=True))
    return value._replace(
        offset=value.offset + offset,
        shape=tuple(shape),
        strides=tuple(s * k for s, k in zip(value.strides, steps, strict=True)),
    )


def drop_axes(value: Value, axes: Sequence[int]) -> Value:
    """Return a value without axes of size 1 of the whole array."""
    if value.axis in axes:
        raise Unsupported("it removes the axis of sequences")
    shift = lambda a: a - (value.axis is not None and a > value.axis)  # noqa: E731
    gone = {shift(a) for a in axes}
    kept = [i for i in range(len(value.shape)) if i not in gone]
    axis = value.axis
    if axis is not None:
        axis -= sum(a < axis for a in axes)
    return value._replace(
        shape=tuple(value.shape[i] for i in kept),
        strides=tuple(value.strides[i] for i in kept),
        axis=axis,
    )


def windows(value: Value, along: int, size: int) -> Value:
    """Return all windows of a value along an axis, which overlap.

    Args:
        value: the value.
        along: which axis of `value.shape`; it counts the windows.
        size: of a window; the axis after `along` is in it.
    """
    shape, strides, axis = value.shape, value.strides, value.axis
    return value._replace(
        shape=(*shape[:along], shape[along] - size + 1, size, *shape[along + 1 :]),
        strides=(*strides[: along + 1], *strides[along:]),
        axis=axis if axis is None or axis <= along else axis + 1,
    )


def of_windows(value: Value, along: int) -> Value:
    """Return the value that `windows` was given."""
    shape, strides, axis = value.shape, value.strides, value.axis
    count, size = shape[along : along + 2]
    step = strides[along if count > 1 else along + 1]
    return value._replace(
        shape=(*shape[:along], count + size - 1, *shape[along + 2 :]),
        strides=(*strides[:along], step, *strides[along + 2 :]),
        axis=axis if axis is None or axis <= along else axis - 1,
    )


def split_axis(value: Value, along: int, sizes: Sequence[int]) -> Value:
    """Return a value with several axes in place of one.

    Args:
        value: the value.
        along: which axis of `value.shape`.
        sizes: of the new axes.
    """
    shape, strides, axis = value.shape, value.strides, value.axis
    steps = [strides[along] * step for step in row_major(sizes)]
    more = len(sizes) - 1
    return value._replace(
        shape=(*shape[:along], *sizes, *shape[along + 1 :]),
        strides=(*strides[:along], *steps, *strides[along + 1 :]),
        axis=axis if axis is None or axis <= along else axis + more,
    )


def axis_after_reshape(value: Value, shape: Sequence[int], batch: int) -> int | None:
    """Return where the axis of sequences is in the shape that a value is brought to."""
    if value.axis is None:
        return None
    before = math.prod(value.shape[: value.axis])
    passed = 1
    for i, size in enumerate(shape):
        if passed == before and size == batch:
            return i
        passed *= size
    raise Unsupported("it reshapes the axis of sequences")
