"""What primitives that index with computed numbers are in a step program.

An element is picked by a comparison of the numbers along an axis with its index: the
work is that of the whole array, which is small within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .reduction_rules import reduce_features
from .registry import result_shape, rule_table
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()
_MOST = 2**14
"""Elements of a table that are compared for every sequence."""


@rule("dynamic_slice")
def _dynamic_slice(
    b: Builder, eqn: JaxprEqn, x: Value, *starts: Value, **_: Any
) -> Value:
    sizes, shape = result_shape(eqn), type_of(eqn.invars[0]).shape
    for axis in _indexed(shape, sizes):
        _check_rows(x, axis)
        index = _clamped(b, starts[axis], shape[axis])
        x = _picked(b, x, _mask(b, index, axis, shape), axis)
        x = shapes.insert_axes(x, [axis], len(shape))
        shape = (*shape[:axis], 1, *shape[axis + 1 :])
    return x


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    b: Builder, eqn: JaxprEqn, x: Value, update: Value, *starts: Value, **_: Any
) -> Value:
    shape, sizes = (type_of(v).shape for v in eqn.invars[:2])
    mask = b.constant(1.0)
    for axis in _indexed(shape, sizes):
        _check_rows(x, axis)
        here = _mask(b, _clamped(b, starts[axis], shape[axis]), axis, shape)
        mask = b.elementwise("multiply", mask, here)
    return _selected(b, mask, update, x)


@rule("gather")
def _gather(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, *,
    dimension_numbers: Any, mode: Any, fill_value: Any, slice_sizes: Any, **_: Any,
) -> Value:  # fmt: skip
    d, shape = dimension_numbers, type_of(eqn.invars[0]).shape
    axis = _one_axis(d.start_index_map, d.collapsed_slice_dims, d.operand_batching_dims)
    drops = mode == GatherScatterMode.FILL_OR_DROP
    if (drops and fill_value != 0) or len(_indexed(shape, slice_sizes)) > 1:
        raise Unsupported("it gathers in another way than by one index")
    own = _of_sequences(index, d.offset_dims, len(result_shape(eqn)))
    index = index if drops else _clamped(b, index, shape[axis])
    if not own:
        _check_rows(x, axis)
        return _picked(b, x, _mask(b, index, axis, shape), axis)
    _check_table(x)
    wide = shapes.insert_axes(x, [0], len(shape) + 1)
    mask = _mask(b, index._replace(axis=0), axis + 1, (1, *shape))
    return _picked(b, wide, mask, axis + 1)


@rule("scatter", "scatter-add")
def _scatter(
    b: Builder, eqn: JaxprEqn, x: Value, index: Value, update: Value, *,
    dimension_numbers: Any, mode: Any, **_: Any,
) -> Value:  # fmt: skip
    d, shape = dimension_numbers, type_of(eqn.invars[0]).shape
    of_batch = d.operand_batching_dims
    axis = _one_axis(d.scatter_dims_to_operand_dims, d.inserted_window_dims, of_batch)
    rank = len(type_of(eqn.invars[2]).shape)
    own = _of_sequences(index, d.update_window_dims, rank)
    if mode == GatherScatterMode.CLIP:  # else JAX drops what lies outside
        index = _clamped(b, index, shape[axis])
    adds = eqn.primitive.name == "scatter-add"
    zero = b.constant(0.0)
    if not own:
        _check_rows(x, axis)
        mask = _mask(b, index, axis, shape)
        update = shapes.insert_axes(update, [axis], len(shape))
        if not adds:
            return _selected(b, mask, update, x)
        return b.elementwise("add", x, _selected(b, mask, update, zero))
    if not adds or x.buffer.numbers != (0.0,) or update.axis != 0:
        raise Unsupported("it combines different sequences")
    mask = _mask(b, index._replace(axis=0), axis + 1, (1, *shape))
    update = shapes.insert_axes(update, [axis + 1], len(shape) + 1)
    added = _selected(b, mask, update, zero)
    return added._replace(axis=None, summed=True)


def _indexed(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the axes along which one element is taken."""
    axes = [i for i, (n, k) in enumerate(zip(shape, sizes, strict=True)) if n != k]
    if any(sizes[i] != 1 for i in axes):
        raise Unsupported("it takes several elements from a computed place on")
    return axes


def _one_axis(indexed: Any, dropped: Any, batched: Any) -> int:
    """Return the only axis that is indexed."""
    if len(indexed) != 1 or tuple(indexed) != tuple(dropped) or batched:
        raise Unsupported("it indexes several axes")
    return int(indexed[0])


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


def _check_table(x: Value) -> None:
    if x.axis is not None or x.summed or x.size > _MOST:
        raise Unsupported("it indexes a large table, or one of each sequence")


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


def _picked(b: Builder, x: Value, mask: Value, axis: int) -> Value:
    """Return the element along an axis of the whole array where there is one."""
    most = x.most
    x = _selected(b, mask, x, b.constant(0.0))
    along = axis - (x.axis is not None and axis > x.axis)
    return reduce_features(b, "reduce_sum", x, [along])._replace(most=most)
