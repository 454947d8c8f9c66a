"""What primitives that index with computed numbers are in a step program.

One row is read or written. Where several axes are indexed, and for the gradient of a
table, the numbers along an axis are compared with the index: the work is that of the
whole array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .registry import result_shape, rule_table
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
    axis = _one_axis(d.start_index_map, d.collapsed_slice_dims)
    of_batch = d.operand_batching_dims
    drops = mode == GatherScatterMode.FILL_OR_DROP
    whole = [n == k or i in (axis, *of_batch) for i, (n, k) in enumerate(
        zip(shape, slice_sizes, strict=True))]  # fmt: skip
    if (drops and fill_value != 0) or slice_sizes[axis] != 1 or not all(whole):
        raise Unsupported("it gathers in another way than by one index")
    own = _of_sequences(index, d.offset_dims, len(result_shape(eqn)))
    index = index if drops else _clamped(b, index, shape[axis])
    if of_batch:
        x = _of_batch(b, x, of_batch, own)
    elif own and (x.axis is not None or x.summed):
        raise Unsupported("it indexes an array of each sequence as one of all")
    taken = _taken(b, x, index, axis)
    return taken._replace(axis=0) if own else taken


@rule("scatter", "scatter-add")
def _scatter(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, update: Value, *,
    dimension_numbers: Any, mode: Any, **_: Any,
) -> Value:  # fmt: skip
    d, shape = dimension_numbers, type_of(eqn.invars[0]).shape
    of_batch = d.operand_batching_dims
    axis = _one_axis(d.scatter_dims_to_operand_dims, d.inserted_window_dims)
    rank = len(type_of(eqn.invars[2]).shape)
    own = _of_sequences(index, d.update_window_dims, rank)
    if mode == GatherScatterMode.CLIP:  # else JAX drops what lies outside
        index = _clamped(b, index, shape[axis])
    adds = eqn.primitive.name == "scatter-add"
    operation = "add_row" if adds else "set_row"
    if of_batch:
        x = _of_batch(b, x, of_batch, own)
        if update.axis != 0:
            update = b.as_rows(update, 0)
        along = axis - (axis > of_batch[0])
        update = shapes.insert_axes(update, [along + 1], len(shape))
        return _written(b, operation, x, index, update._replace(axis=x.axis), axis)
    if not own:
        update = shapes.insert_axes(update, [axis], len(shape))
        return _written(b, operation, x, index, update, axis)
    if not adds or x.buffer.numbers != (0.0,) or update.axis != 0:
        raise Unsupported("it combines different sequences")
    if math.prod(shape) > _MOST:
        raise Unsupported("the gradient of a table that it indexes is large")
    mask = _mask(b, index._replace(axis=0), axis + 1, (1, *shape))
    update = shapes.insert_axes(update, [axis + 1], len(shape) + 1)
    added = _selected(b, mask, update, b.constant(0.0))
    return added._replace(axis=None, summed=True)


def _indexed(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the axes along which one element is taken."""
    axes = [i for i, (n, k) in enumerate(zip(shape, sizes, strict=True)) if n != k]
    if any(sizes[i] != 1 for i in axes):
        raise Unsupported("it takes several elements from a computed place on")
    return axes


def _one_axis(indexed: Any, dropped: Any) -> int:
    """Return the only axis that is indexed."""
    if len(indexed) != 1 or tuple(indexed) != tuple(dropped):
        raise Unsupported("it indexes several axes")
    return int(indexed[0])


def _of_batch(b: Builder, x: Value, of_batch: Sequence[int], own: bool) -> Value:
    """Return an array of which each sequence has a part, at an index of its own."""
    if len(of_batch) != 1 or not own or x.summed:
        raise Unsupported("it indexes several axes")
    x = x if x.axis is not None else b.as_rows(x, of_batch[0])
    if x.axis is None:  # a number for all
        x = x._replace(axis=of_batch[0])
    if x.axis != of_batch[0]:
        raise Unsupported("it combines different sequences")
    return x


def _of_sequences(index: Value, window: Any, rank: int) -> bool:
    """Return whether each sequence has its index; else all share one."""
    if index.size != 1:
        raise Unsupported("it has several indices")
    own = index.axis is not None
    if tuple(window) != tuple(range(int(own), rank)):
        raise Unsupported("it indexes in an unusual order")
    return own


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
    result = b.elementwise("select", mask, x, other)
    known = [v.most for v in (x, other) if v.most is not None]
    return result._replace(most=max(map(most_of, (x, other))) if known else None)


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
    known = [v.most for v in (x, update) if v.most is not None]
    return result._replace(most=max(map(most_of, (x, update))) if known else None)
