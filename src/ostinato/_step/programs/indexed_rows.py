"""Instructions that read or write one row of a matrix, which an index names."""

from __future__ import annotations

from collections.abc import Sequence

from . import values as shapes
from .builder import Builder, Window
from .values import Merged, Unsupported, Value, merge_axes, row_major

_MOST_COMPARED = 2**14
"""Elements of a sum of windows at most that are compared with an index."""
_MOST_ADDED, _MOST_AT_A_STEP = 2**22, 2**17
"""Elements of a sum of windows at most, and for each step, both times sequences.

Some sequences have one of their own, which takes time before and after the steps, and
memory. Gradients of a decoder of 128 units that reads a row of a table in each step,
in ms by `lax.scan` and by the native loop:

| sequences, steps | table | scan | native |
|---|---|---|---|
| 16, 50 | 2000 x 128 | 1.14 | 0.66 |
| 16, 5 | 2000 x 128 | 0.14 | 0.24 |
| 64, 50 | 512 x 128 | 3.2 | 2.2 |
| 1, 50 | 10000 x 256 | 0.74 | 0.42 |
| 1, 5 | 10000 x 256 | 0.15 | 0.17 |
"""


def take_row(
    b: Builder, value: Value, index: Value, along: int, axis: int | None
) -> Value:
    """Return the elements of a value at an index, or 0 where it has none.

    Args:
        b: the builder.
        value: the value.
        index: a number.
        along: which axis of `value.shape` the index counts; the result lacks it.
        axis: where the result has sequences.
    """
    key = ("take_row", value, index, along)
    result = b.local(value.shape[:along] + value.shape[along + 1 :], axis)
    if key not in b.known:
        b.known[key] = result.buffer
        if value.buffer in b.narrowed:
            b.narrowed.add(result.buffer)
        strides = list(result.strides)
        wide = result._replace(
            shape=value.shape, strides=(*strides[:along], 0, *strides[along:])
        )
        _at_row(b, "take_row", wide, value, index, along)
    return result._replace(buffer=b.known[key])


def with_row(
    b: Builder, operation: str, value: Value, index: Value, row: Value, along: int
) -> Value:
    """Return a value with another window at an index, or as it is if there is none.

    Args:
        b: the builder.
        operation: `"set_row"`, or `"add_row"` to add to what is there.
        value: the windows of the value.
        index: a number.
        row: the window, of the shape and the sequences of `value`.
        along: which axis of `value.shape` the index counts.
    """
    key = (operation, value, index, row, along)
    whole = shapes.of_windows(value, along)
    result = b.local(whole.shape, whole.axis)
    if key not in b.known:
        b.known[key] = result.buffer
        if row.buffer in b.narrowed:
            b.narrowed.add(result.buffer)
        b.write("copy", result, whole)
        windows = shapes.windows(result, along, value.shape[along + 1])
        _at_row(b, operation, windows, row, index, along)
        earlier = b.placed.get(value.buffer, ())
        if earlier and not whole.is_all_of(earlier[0].shape):
            earlier = ()
        if value.buffer.numbers == (0.0,) or (earlier and operation == "add_row"):
            window = Window(whole.shape, index, row, along)
            b.placed[result.buffer] = (*earlier, window)
    return result._replace(buffer=b.known[key])


def numbers_equal(b: Builder, index: Value, axis: int, shape: Sequence[int]) -> Value:
    """Return where the numbers along an axis are an index, in axes of size 1 else."""
    rank = len(shape)
    wide = b.constants_along(range(shape[axis]), axis, rank)
    kept = rank - (index.axis is not None)
    index = index._replace(shape=(1,) * kept, strides=(0,) * kept)
    return b.elementwise("equal", wide, index)


def sum_of_window(b: Builder, window: Window, update: Value) -> Value:
    """Return the sum over sequences of an array that is 0 but for one window.

    A sum that is a result of the loop gets the windows alone, see `add_windows`. What
    reads it needs all of the array, which is made if it is small.

    Args:
        b: the builder.
        window: of every sequence.
        update: the same in the axes of the array; that of sequences is the first one.

    Raises:
        Unsupported: the array is large for so few steps of so many sequences.
    """
    whole = b.local(window.shape, 0)
    b.added[whole.buffer] = (window,)
    if whole.size <= _MOST_COMPARED and update.shape[window.along] == 1:
        mask = numbers_equal(b, window.at, window.along + 1, (1, *window.shape))
        (_, *values), _ = b.align([whole, mask, update, b.constant(0.0)])
        b.write("select", whole, *values)
    elif b.batch == 1 or whole.size * b.batch <= min(
        _MOST_ADDED, _MOST_AT_A_STEP * b.steps
    ):
        b.unwritten.add(whole.buffer)
    else:
        raise Unsupported("the gradient of a table that it indexes is large")
    return whole._replace(axis=None, summed=True)


def windows_of(b: Builder, value: Value) -> tuple[Window, ...]:
    """Return the windows whose sum over sequences a value is; none if it is another."""
    windows = b.added.get(value.buffer, ())
    return windows if windows and value.is_all_of(windows[0].shape) else ()


def added_windows(b: Builder, x: Value, y: Value) -> Value | None:
    """Return the sum of two sums of windows, None if they are others."""
    both = windows_of(b, x), windows_of(b, y)
    if not all(both) or both[0][0].shape != both[1][0].shape or x.shape != y.shape:
        return None
    total = b.local(x.shape, 0)
    b.added[total.buffer] = (*both[0], *both[1])
    if b.unwritten.isdisjoint({x.buffer, y.buffer}):
        rows = [v._replace(axis=0, summed=False) for v in (x, y)]
        b.write("add", total, *rows)
    else:
        b.unwritten.add(total.buffer)
    return total._replace(axis=None, summed=True)


def add_windows(b: Builder, target: Value, windows: Sequence[Window]) -> None:
    """Add windows of every sequence to a sum over sequences, in place."""
    for window in windows:
        shape, at, row, along = window
        whole = Value(target.buffer, 0, shape, row_major(shape), 0)
        each = shapes.windows(whole, along, row.shape[along + 1])
        _at_row(b, "add_row", each, row, at, along)


def added_rows(b: Builder, *given: Value) -> Value | None:
    """Return a sum of which one summand is 0 but for some rows, None if none is."""
    for one, other in (given, given[::-1]):
        placed = b.placed.get(one.buffer, ())
        if not placed or other.summed:
            continue
        alike = one.shape == other.shape and one.axis == other.axis
        if not alike or not one.is_all_of(placed[0].shape):
            continue
        if any(window.shape != one.shape for window in placed):
            # Some see several axes as one.
            if one.axis or not other.is_contiguous():
                continue
        for shape, at, row, along in placed:
            if other.shape != shape:
                other = other._replace(shape=shape, strides=row_major(shape))
            windows = shapes.windows(other, along, row.shape[along + 1])
            other = with_row(b, "add_row", windows, at, row, along)
        return one._replace(buffer=other.buffer)
    return None


def _at_row(
    b: Builder, operation: str, result: Value, given: Value, index: Value, along: int
) -> None:
    if index.axis is not None and result.axis is None:
        raise Unsupported("it combines different sequences")
    shape, strides = result.shape, (result.strides, given.strides)
    outer = merge_axes(shape[:along], [s[:along] for s in strides])
    inner = merge_axes(shape[along + 1 :], [s[along + 1 :] for s in strides])
    if len(inner.shape) > 1 or any(s and s[0] not in (0, 1) for s in inner.strides):
        size = 1 if given.strides[along] == 0 else shape[along]
        one = given._replace(shape=(*shape[:along], size, *shape[along + 1 :]))
        copy, step = b.in_order(one, result.axis), 0
        if size == shape[along]:
            step = copy.strides[along]
        strides = (*copy.strides[:along], step, *copy.strides[along + 1 :])
        given = copy._replace(shape=shape, strides=strides)
        return _at_row(b, operation, result, given, index, along)
    if not inner.shape:
        inner = Merged((1,), [(0,), (0,)])
    merged = [
        (*before, s[along], *after)
        for before, s, after in zip(outer.strides, strides, inner.strides, strict=True)
    ]
    sizes = (*outer.shape, shape[along], *inner.shape)
    merged.append((0,) * len(sizes))
    b.emit(operation, Merged(sizes, merged), result, (given, index))
