"""What primitives that index with computed numbers are in a step program.

A row is read or written for each index: an element along an axis, or along several, or
several elements from a place on. The gradient of a table is a sum over sequences of
what each has read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder, Window
from .indexed_rows import added_windows, sum_of_window, take_row, with_row
from .places import Part, clamped, indexed_axes, part_at, parts_at
from .registry import ANY, refuse_integers, result_shape, rule_table
from .shape_rules import join, turned
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()
_MOST_INDICES = 16
"""Each is an instruction of its own."""


@rule("dynamic_slice", kinds=ANY)
def _dynamic_slice(
    b: Builder, eqn: JaxprEqn, x: Value, *starts: Value, **_: Any
) -> Value:
    sizes, shape = result_shape(eqn), type_of(eqn.invars[0]).shape
    indexed = indexed_axes(shape, sizes)
    if not indexed:
        return x
    (x,) = b.of_one_axis([x], but=indexed)
    for part in parts_at(b, [starts[i] for i in indexed], indexed, shape, sizes):
        x = _taken(b, x, part)
    return x


@rule("dynamic_update_slice", kinds=ANY)
def _dynamic_update_slice(
    b: Builder, eqn: JaxprEqn, x: Value, update: Value, *starts: Value, **_: Any
) -> Value:
    shape, sizes = (type_of(v).shape for v in eqn.invars[:2])
    indexed = indexed_axes(shape, sizes)
    if not indexed:
        return update
    part, *others = parts_at(b, [starts[i] for i in indexed], indexed, shape, sizes)
    if not others:
        return _written(b, "set_row", x, part, update, shape)
    raise Unsupported("it writes a part along axes that are apart")


@rule("gather", kinds=ANY)
def _gather(b: Builder, eqn: JaxprEqn, x: Value, index: Value, **params: Any) -> Value:
    d = params["dimension_numbers"]
    index = _by_sequence(b, index, d.start_indices_batching_dims)
    _, more = _axes_of_index(eqn, index)
    read = [_read(b, eqn, x, one, **params) for one in _one_by_one(index, more)]
    result = _joined(b, read, index.shape[:more])
    order = _index_first(d.offset_dims, len(result_shape(eqn)))
    return turned(b, result, [order.index(i) for i in range(len(order))])


def _read(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, *,
    dimension_numbers: Any, mode: Any, fill_value: Any, slice_sizes: Any, **_: Any,
) -> Value:  # fmt: skip
    """Return what is at one index, whose axes but that of sequences have size 1.

    These axes are before those of the window.
    """
    d, shape = dimension_numbers, type_of(eqn.invars[0]).shape
    drops = mode == GatherScatterMode.FILL_OR_DROP
    own, more = _axes_of_index(eqn, index)
    of_batch = d.operand_batching_dims
    index_of = d.start_index_map
    part = part_at(b, index, index_of, of_batch, shape, slice_sizes, not drops)
    if of_batch:
        x = _of_sequences(b, x, of_batch, own)
    elif own and (x.axis is not None or x.summed):
        raise Unsupported(
            "it indexes an array of each sequence as one of all, or by numbers of "
            "sequences that are not `jnp.arange` in the step"
        )
    (x,) = b.of_one_axis([x], but=(*part.axes, *d.collapsed_slice_dims))
    result = _taken(b, x, part)
    more_rows = own and not of_batch  # then, sequences are before the axes of `x`
    dropped = [axis + more_rows for axis in d.collapsed_slice_dims]
    result = shapes.drop_axes(result, dropped)
    if drops and fill_value != 0:
        refuse_integers(eqn)
        inside = b.elementwise("equal", part.at, clamped(b, part.at, part.places))
        if inside.axis is not None:
            inside = inside._replace(axis=result.axis)
        if fill_value is None:
            fill_value = 1.0 if type_of(eqn.outvars[0]).dtype == bool else math.nan
        result = _selected(b, inside, result, b.constant(float(fill_value)))
    result = result._replace(axis=0) if own else result
    if index.summed and x.axis is None:  # of the only sequence
        result = result._replace(axis=None, summed=True)
    result = _with_unit_axes(result, more)
    return result._replace(axis=index.axis) if own else result


@rule("scatter", kinds=ANY)
@rule("scatter-add", kinds="fi")
def _scatter(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, update: Value, **params: Any
) -> Value:
    d = params["dimension_numbers"]
    index = _by_sequence(b, index, d.scatter_indices_batching_dims)
    _, more = _axes_of_index(eqn, index)
    rank = len(type_of(eqn.invars[2]).shape)
    update = turned(b, update, _index_first(d.update_window_dims, rank))
    if index.axis is not None:
        update = _by_sequence(b, update, [index.axis])
    result = x
    for one, part in zip(
        _one_by_one(index, more), _one_by_one(update, more), strict=True
    ):
        if result.summed:
            others = _write(b, eqn, x, one, part, **params)
            added = added_windows(b, result, others)
            if added is None:
                raise Unsupported("it combines different sequences")
            result = added
        else:
            result = _write(b, eqn, result, one, part, **params)
    return result


def _write(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, update: Value, *,
    dimension_numbers: Any, mode: Any, **_: Any,
) -> Value:  # fmt: skip
    """Return an array that is written to, or added to, at one index; see `_read`."""
    d, sizes = dimension_numbers, list(type_of(eqn.invars[0]).shape)
    shape, given = tuple(sizes), type_of(eqn.invars[2]).shape
    own, more = _axes_of_index(eqn, index)
    dropped = (*d.inserted_window_dims, *d.operand_batching_dims)
    window = iter([given[i] for i in d.update_window_dims])
    for i in range(len(shape)):
        sizes[i] = 1 if i in dropped else next(window)
    clamps = mode == GatherScatterMode.CLIP  # else JAX drops what lies outside
    of_batch, axes = d.operand_batching_dims, d.scatter_dims_to_operand_dims
    part = part_at(b, index, axes, of_batch, shape, sizes, clamps)
    adds = eqn.primitive.name == "scatter-add"
    inserted = d.inserted_window_dims
    update = _without_unit_axes(update, index.axis, more)
    if of_batch:
        x = _of_sequences(b, x, of_batch, own)
        update = update._replace(axis=0)
    elif own:
        rows = index.axis == update.axis == 0
        if not rows or not adds or x.buffer.numbers != (0.0,):
            raise Unsupported("it combines different sequences")
        axes = [i + 1 for i in inserted]
        update = shapes.insert_axes(update, axes, len(shape) + 1)
        return _added_up(b, part, update, shape)
    update = shapes.insert_axes(update, inserted, len(shape))
    return _written(b, "add_row" if adds else "set_row", x, part, update, shape)


def _added_up(b: Builder, part: Part, update: Value, shape: tuple[int, ...]) -> Value:
    """Return the gradient of a table of this shape, a sum over sequences.

    `update` has the axis of sequences before those of the table.
    """
    first, end = part.axes[0], part.axes[-1] + 1
    sizes = (*shape[:first], math.prod(shape[first:end]), *shape[end:])
    update = _merged(b, update, [axis + 1 for axis in part.axes])
    row = shapes.insert_axes(update, [first + 1], len(sizes) + 2)
    row = row._replace(shape=(*shape[:first], part.places, part.size, *shape[end:]))
    added = sum_of_window(b, Window(sizes, part.at, row, first), update)
    added = _bounded(added, (update,), max)
    return shapes.split_axis(added, first, shape[first:end])


def _along(x: Value, axis: int) -> int:
    """Return which axis of `x.shape` an axis of the whole array is."""
    return axis - (x.axis is not None and axis > x.axis)


def _merged(b: Builder, x: Value, axes: Sequence[int]) -> Value:
    """Return an array with one axis in place of several next to each other."""
    if len(axes) == 1:
        return x
    first, end = _along(x, axes[0]), _along(x, axes[-1]) + 1
    merged = shapes.merge_axes(x.shape[first:end], [x.strides[first:end]])
    if len(merged.shape) > 1:
        x = b.in_order(x, x.axis)
        merged = shapes.merge_axes(x.shape[first:end], [x.strides[first:end]])
    step = merged.strides[0][0] if merged.shape else 0
    axis = x.axis
    return x._replace(
        shape=(*x.shape[:first], math.prod(merged.shape), *x.shape[end:]),
        strides=(*x.strides[:first], step, *x.strides[end:]),
        axis=axis if axis is None or axis < axes[0] else axis - len(axes) + 1,
    )


def _by_sequence(b: Builder, value: Value, axes: Sequence[int]) -> Value:
    """Return a value of which each sequence has a part, with these at an axis."""
    if len(axes) != 1 or value.axis is not None or value.summed:
        return value
    return b.as_rows(value, axes[0])._replace(axis=axes[0])


def _axes_of_index(eqn: JaxprEqn, index: Value) -> tuple[bool, int]:
    """Return whether each sequence has an index, and how many axes it has besides."""
    own = index.axis is not None
    return own, len(type_of(eqn.invars[1]).shape) - 1 - own


def _index_first(window: Sequence[int], rank: int) -> list[int]:
    """Return the order of axes in which those of the index come before the window's."""
    return [*(i for i in range(rank) if i not in window), *window]


def _one_by_one(value: Value, count: int) -> list[Value]:
    """Return the parts of a value along its first axes, which they have with size 1."""
    sizes = value.shape[:count]
    if math.prod(sizes) > _MOST_INDICES:
        raise Unsupported("it has many indices")
    return [
        value._replace(
            offset=value.offset
            + sum(i * s for i, s in zip(at, value.strides, strict=False)),
            shape=(1,) * count + value.shape[count:],
        )
        for at in itertools.product(*map(range, sizes))
    ]


def _joined(b: Builder, parts: Sequence[Value], sizes: Sequence[int]) -> Value:
    """Return a value of which `_one_by_one` has made such parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    axis, unit = None if first.axis is None else 0, len(sizes) - 1
    parts = [
        v._replace(shape=v.shape[unit:], strides=v.strides[unit:], axis=axis)
        for v in parts
    ]
    shape = len(parts), *parts[0].shape[1:]
    rows = () if axis is None else (b.batch,)
    whole = shapes.split_axis(join(b, parts, len(rows), (*rows, *shape)), 0, sizes)
    return whole._replace(axis=first.axis, most=first.most)


def _of_sequences(b: Builder, x: Value, axes: Sequence[int], own: bool) -> Value:
    """Return an array of which each sequence has a part, at an index of its own."""
    if tuple(axes) != (0,) or not own or x.summed:
        raise Unsupported("it indexes several axes")
    x = _by_sequence(b, x, axes)
    if x.axis != 0:
        raise Unsupported("it combines different sequences")
    return x


def _with_unit_axes(value: Value, count: int) -> Value:
    """Return a value with axes of size 1 before all others."""
    return value._replace(
        shape=(1,) * count + value.shape,
        strides=(0,) * count + value.strides,
        axis=None if value.axis is None else value.axis + count,
    )


def _without_unit_axes(update: Value, of_index: int | None, count: int) -> Value:
    """Return what is written at one index, without the other axes of the index.

    Args:
        update: what is written.
        of_index: where each sequence has an index, and something to write.
        count: the number of axes that are left out.
    """
    axis = update.axis
    if of_index is not None and axis not in (None, of_index):
        raise Unsupported("it combines different sequences")
    if of_index is None and axis is not None:
        axis -= count
        if axis < 0:
            raise Unsupported("it indexes in an unusual order")
    return update._replace(
        shape=update.shape[count:], strides=update.strides[count:], axis=axis
    )


def _check_rows(x: Value, axes: Sequence[int]) -> None:
    if x.axis in axes or x.summed:
        raise Unsupported("it combines different sequences")


def _selected(b: Builder, mask: Value, x: Value, other: Value) -> Value:
    if x.summed or other.summed:
        raise Unsupported("it combines different sequences")
    return _bounded(b.elementwise("select", mask, x, other), (x, other), max)


def _taken(b: Builder, x: Value, part: Part) -> Value:
    """Return a part of an array, with as many axes as that."""
    _check_rows(x, part.axes)
    x, along = _merged(b, x, part.axes), _along(x, part.axes[0])
    rows = 0 if x.axis is None and part.at.axis is not None else x.axis
    if part.size > 1 and not x.is_contiguous():
        x = b.in_order(x, x.axis)
    windows = shapes.windows(x, along, part.size)
    result = take_row(b, windows, part.at, along, rows)._replace(most=x.most)
    sizes = [part.size] if len(part.axes) == 1 else [1] * len(part.axes)
    return shapes.split_axis(result, along, sizes)


def _written(
    b: Builder, operation: str, x: Value, part: Part, update: Value, shape: Any
) -> Value:
    """Return an array of this shape, with `update` for a part of it."""
    if x.summed or update.summed:
        raise Unsupported("it combines different sequences")
    values = b.of_one_axis([x, update], but=part.axes)
    for value in values:
        _check_rows(value, part.axes)
    x, update = (_merged(b, v, part.axes) for v in values)
    first = part.axes[0]
    update = shapes.insert_axes(update, [first], len(shape) - len(part.axes) + 2)
    windows = shapes.windows(x, _along(x, first), part.size)
    (windows, update), rows = b.align([windows, update])
    windows = windows._replace(axis=rows)
    along = _along(windows, first)
    result = with_row(b, operation, windows, part.at, update, along)
    result = shapes.split_axis(result, along, shape[first : part.axes[-1] + 1])
    return _bounded(result, (x, update), sum if operation == "add_row" else max)


def _bounded(result: Value, values: Sequence[Value], by: Callable) -> Value:
    """Return a result that knows how large it may be, if it has integers."""
    known = any(v.most is not None for v in values)
    return result._replace(most=by(map(most_of, values)) if known else None)
