"""What primitives that index with computed numbers are in a step program.

One row is read or written. Where several axes are indexed, and for the gradient of a
table, the numbers along an axis are compared with the index: the work is that of the
whole array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .registry import refuse_integers, result_shape, rule_table
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()
_MOST = 2**14
"""Elements that are compared for every sequence at most."""


@rule("dynamic_slice")
def _dynamic_slice(
    b: Builder, eqn: JaxprEqn, x: Value, *starts: Value, **_: Any
) -> Value:
    sizes, shape = result_shape(eqn), type_of(eqn.invars[0]).shape
    for axis in _indexed(shape, sizes):
        x = _taken(b, x, _clamped(b, starts[axis], shape[axis]), axis)
        x = shapes.insert_axes(x, [axis], len(shape))
    return x


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    b: Builder, eqn: JaxprEqn, x: Value, update: Value, *starts: Value, **_: Any
) -> Value:
    shape, sizes = (type_of(v).shape for v in eqn.invars[:2])
    indexed = _indexed(shape, sizes)
    indices = [_clamped(b, starts[axis], shape[axis]) for axis in indexed]
    if len(indexed) == 1:
        return _written(b, "set_row", x, indices[0], update, indexed[0])
    mask = b.constant(1.0)
    for axis, index in zip(indexed, indices, strict=True):
        _check_rows(x, axis)
        mask = b.elementwise("multiply", mask, _mask(b, index, axis, shape))
    return _selected(b, mask, update, x)


@rule("gather")
def _gather(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, *,
    dimension_numbers: Any, mode: Any, fill_value: Any, slice_sizes: Any, **_: Any,
) -> Value:  # fmt: skip
    d, shape = dimension_numbers, type_of(eqn.invars[0]).shape
    drops = mode == GatherScatterMode.FILL_OR_DROP
    index = _by_sequence(b, index, d.start_indices_batching_dims)
    own, more = _axes_of_index(eqn, index, d.offset_dims, len(result_shape(eqn)))
    of_batch = d.operand_batching_dims
    axis, at = _one_index(index, d.start_index_map, of_batch, shape, slice_sizes, drops)
    if of_batch:
        x = _of_sequences(b, x, of_batch, own)
    elif own and (x.axis is not None or x.summed):
        raise Unsupported("it indexes an array of each sequence as one of all")
    clamped = _clamped(b, at, shape[axis])
    result = _taken(b, x, at if drops else clamped, axis)
    if drops and fill_value != 0:
        refuse_integers(eqn)
        inside = b.elementwise("equal", at, clamped)
        if inside.axis is not None:
            inside = inside._replace(axis=result.axis)
        if fill_value is None:
            fill_value = 1.0 if type_of(eqn.outvars[0]).dtype == bool else math.nan
        result = _selected(b, inside, result, b.constant(float(fill_value)))
    result = result._replace(axis=0) if own else result
    if axis not in d.collapsed_slice_dims:
        place = axis + (own and not of_batch)  # after the axis of sequences
        rank = len(result.shape) + 1 + (result.axis is not None)
        result = shapes.insert_axes(result, [place], rank)
    result = _with_unit_axes(result, more)
    return result._replace(axis=index.axis) if own else result


@rule("scatter", "scatter-add")
def _scatter(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, update: Value, *,
    dimension_numbers: Any, mode: Any, **_: Any,
) -> Value:  # fmt: skip
    d, sizes = dimension_numbers, list(type_of(eqn.invars[0]).shape)
    shape, given = tuple(sizes), type_of(eqn.invars[2]).shape
    index = _by_sequence(b, index, d.scatter_indices_batching_dims)
    own, more = _axes_of_index(eqn, index, d.update_window_dims, len(given))
    dropped = (*d.inserted_window_dims, *d.operand_batching_dims)
    window = iter(given[more + own :])
    for i in range(len(shape)):
        sizes[i] = 1 if i in dropped else next(window)
    drops = mode == GatherScatterMode.FILL_OR_DROP
    of_batch, axes = d.operand_batching_dims, d.scatter_dims_to_operand_dims
    axis, at = _one_index(index, axes, of_batch, shape, sizes, drops)
    if mode == GatherScatterMode.CLIP:  # else JAX drops what lies outside
        at = _clamped(b, at, shape[axis])
    adds = eqn.primitive.name == "scatter-add"
    inserted = axis in d.inserted_window_dims
    update = _without_unit_axes(b, update, index.axis, more)
    if of_batch:
        x = _of_sequences(b, x, of_batch, own)
        update = update._replace(axis=0)
    elif own:
        whole = inserted and not more and index.axis == 0
        if not whole or not adds or x.buffer.numbers != (0.0,) or update.axis != 0:
            raise Unsupported("it combines different sequences")
        return _added_up(b, at, axis, update, shape)
    if inserted:
        update = shapes.insert_axes(update, [axis], len(shape))
    return _written(b, "add_row" if adds else "set_row", x, at, update, axis)


def _added_up(
    b: Builder, index: Value, axis: int, update: Value, shape: tuple[int, ...]
) -> Value:
    """Return the gradient of a table, a sum over sequences."""
    if math.prod(shape) > _MOST:
        raise Unsupported("the gradient of a table that it indexes is large")
    mask = _mask(b, index, axis + 1, (1, *shape))
    update = shapes.insert_axes(update, [axis + 1], len(shape) + 1)
    added = _selected(b, mask, update, b.constant(0.0))
    return added._replace(axis=None, summed=True)


def _by_sequence(b: Builder, value: Value, axes: Sequence[int]) -> Value:
    """Return a value of which each sequence has a part, with these at an axis."""
    if len(axes) != 1 or value.axis is not None or value.summed:
        return value
    return b.as_rows(value, axes[0])._replace(axis=axes[0])


def _axes_of_index(
    eqn: JaxprEqn, index: Value, window: Any, rank: int
) -> tuple[bool, int]:
    """Return whether each sequence has an index, and how many axes it has besides."""
    own = index.axis is not None
    more = len(type_of(eqn.invars[1]).shape) - 1 - own
    if tuple(window) != tuple(range(more + own, rank)):
        raise Unsupported("it indexes in an unusual order")
    return own, more


def _one_index(
    index: Value,
    axes: Sequence[int],
    of_batch: Sequence[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    drops: bool,
) -> tuple[int, Value]:
    """Return the only axis of which one element is taken, and its index.

    Args:
        index: of all axes that are indexed.
        axes: these.
        of_batch: those of which each index has an element of its own.
        shape: of what is indexed.
        sizes: of what is taken from it, or written to it.
        drops: whether an index that is out of bounds leaves out all.
    """
    if index.size != len(axes) or index.summed:
        raise Unsupported("it has several indices")
    part = [k for k, axis in enumerate(axes) if sizes[axis] != shape[axis]]
    part = part or [k for k, axis in enumerate(axes) if sizes[axis] == 1][:1]
    others = [i for i in range(len(shape)) if i not in (*axes, *of_batch)]
    if any(sizes[i] != shape[i] for i in others):
        raise Unsupported("it takes a part from the beginning on")
    if len(part) != 1 or (len(axes) > 1 and drops):
        raise Unsupported("it indexes several axes")
    axis = int(axes[part[0]])
    if sizes[axis] != 1:
        raise Unsupported("it takes several elements from a computed place on")
    step = index.strides[-1] if len(axes) > 1 else 0
    own = None if index.axis is None else 0
    at = index._replace(
        offset=index.offset + part[0] * step, shape=(), strides=(), axis=own
    )
    return axis, at


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


def _without_unit_axes(
    b: Builder, update: Value, of_index: int | None, count: int
) -> Value:
    """Return what is written at one index, without the other axes of the index.

    Args:
        b: the builder.
        update: what is written.
        of_index: where each sequence has an index, and something to write.
        count: the number of axes that are left out.
    """
    if of_index is not None:
        update = _by_sequence(b, update, [of_index])
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


def _indexed(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the axes along which one element is taken."""
    axes = [i for i, (n, k) in enumerate(zip(shape, sizes, strict=True)) if n != k]
    if any(sizes[i] != 1 for i in axes):
        raise Unsupported("it takes several elements from a computed place on")
    return axes


def _check_rows(x: Value, axis: int) -> None:
    if x.axis == axis or x.summed:
        raise Unsupported("it combines different sequences")


def _clamped(b: Builder, index: Value, count: int) -> Value:
    low = b.elementwise("max", index, b.constant(0.0))
    return b.elementwise("min", low, b.constant(float(count - 1)))


def _mask(b: Builder, index: Value, axis: int, shape: Sequence[int]) -> Value:
    """Return where the numbers along an axis are an index, in axes of size 1 else."""
    count, rank = shape[axis], len(shape)
    numbers = b.constant(*map(float, range(count)))
    numbers = numbers._replace(shape=(count,), strides=(int(count > 1),))
    ones = [1] * rank
    ones[axis] = count
    wide = shapes.broadcast(numbers, ones, (axis,), b.batch)
    kept = rank - (index.axis is not None)
    index = index._replace(shape=(1,) * kept, strides=(0,) * kept)
    return b.elementwise("equal", wide, index)


def _selected(b: Builder, mask: Value, x: Value, other: Value) -> Value:
    if x.summed or other.summed:
        raise Unsupported("it combines different sequences")
    return _bounded(b.elementwise("select", mask, x, other), (x, other), max)


def _taken(b: Builder, x: Value, index: Value, axis: int) -> Value:
    """Return an array without an axis, at an index along it."""
    (x,) = b.of_one_axis([x], but=axis)
    _check_rows(x, axis)
    along = axis - (x.axis is not None and axis > x.axis)
    rows = x.axis if x.axis is None else x.axis - (axis < x.axis)
    if index.axis is not None and x.axis is None:
        rows = 0
    return b.take_row(x, index, along, rows)._replace(most=x.most)


def _written(
    b: Builder, operation: str, x: Value, index: Value, update: Value, axis: int
) -> Value:
    """Return an array with other elements at an index along an axis."""
    (x, update), rows = b.align([x, update])
    _check_rows(x._replace(axis=rows), axis)
    if x.summed or update.summed:
        raise Unsupported("it combines different sequences")
    along = axis - (rows is not None and axis > rows)
    result = b.with_row(operation, x._replace(axis=rows), index, update, along)
    return _bounded(result, (x, update), sum if operation == "add_row" else max)


def _bounded(result: Value, values: Sequence[Value], by: Callable) -> Value:
    """Return a result that knows how large it may be, if it has integers."""
    known = any(v.most is not None for v in values)
    return result._replace(most=by(map(most_of, values)) if known else None)
