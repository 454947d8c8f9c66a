"""Where the examples lie among the rows of a flat array."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._typing import Array


class Tail(NamedTuple):
    """Which rows of a flat array are none.

    Attributes:
        valid: bool `[capacity]`, False in the tail.
        last: int32 scalar, the last valid row, 0 where there is none.
        any_row: bool scalar, whether there is one.
    """

    valid: Array
    last: Array
    any_row: Array

    @classmethod
    def of(cls, lengths: Array, capacity: int) -> Tail:
        """From the lengths, int32 `[batch]`."""
        total = jnp.sum(lengths, dtype=jnp.int32)
        return cls(positions(capacity) < total, jnp.maximum(total - 1, 0), total > 0)


class Segments(NamedTuple):
    """Which example and which position each row of a flat array has.

    Tail rows, past those of all examples, repeat the last valid row.

    Attributes:
        ids: int32 `[capacity]`, the example of each row, ascending.
        drop_ids: the same, but `batch` in the tail, for sums that drop it.
        position: int32 `[capacity]`, the place of each row within its example.
        offsets: int32 `[batch]`, the first row of each example.
        valid: bool `[capacity]`, False in the tail.
        last: int32 scalar, the last valid row, 0 where there is none.
    """

    ids: Array
    drop_ids: Array
    position: Array
    offsets: Array
    valid: Array
    last: Array

    @classmethod
    def of(cls, lengths: Array, capacity: int, tail: Tail) -> Segments:
        """From the lengths, int32 `[batch]`."""
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        offsets = ends - lengths
        row = positions(capacity)
        drop_ids = _count_up_to(ends, row)
        last_id = jnp.minimum(drop_ids[tail.last], lengths.shape[0] - 1)
        ids = jnp.minimum(drop_ids, last_id)
        position = jnp.minimum(row, tail.last) - offsets[ids]
        return cls(ids, drop_ids, position, offsets, tail.valid, tail.last)


def sum_of_rows(x: Array, ids: Array, batch: int) -> Array:
    """The sum of the rows of each example, from `Segments.drop_ids`."""
    wide = x.astype(exact(x.dtype))
    sums = jax.ops.segment_sum(wide, ids, batch, indices_are_sorted=True)
    return sums.astype(x.dtype)


def repeated(x: Array, index: Array, axis: int = 0, **options: Any) -> Array:
    """`jnp.take` of what is taken many times: its derivative is a sum of as many."""
    if exact(x.dtype) == x.dtype:
        return jnp.take(x, index, axis, mode="clip", **options)
    return repeated(x.astype(exact(x.dtype)), index, axis, **options).astype(x.dtype)


def exact(dtype: Any) -> Any:
    """What to add up numbers of `dtype` in: they are added one by one."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if half else dtype


def descending(lengths: Array) -> tuple[Array, Array]:
    """The examples, the longest first, and the place of each in that order."""
    order = jnp.argsort(-lengths).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(positions(order.size))
    return order, place


def _count_up_to(ascending: Array, values: Array) -> Array:
    """How many elements of `ascending`, int32, are at most each of `values`.

    First among every k-th element, k about the square root of how many there are, then
    among the k - 1 before the first larger one: two comparisons that compile to little.
    """
    step = math.isqrt(ascending.shape[0] - 1) + 1
    missing = -ascending.shape[0] % step
    blocks = jnp.pad(ascending, (0, missing), constant_values=2**31 - 1)
    blocks = blocks.reshape(-1, step)
    whole = jnp.sum(blocks[None, :, -1] <= values[:, None], 1, dtype=jnp.int32)
    block = blocks[jnp.minimum(whole, blocks.shape[0] - 1)]
    rest = jnp.sum(block <= values[:, None], 1, dtype=jnp.int32)
    return jnp.where(whole < blocks.shape[0], whole * step + rest, ascending.shape[0])


def positions(size: int) -> Array:
    """0, 1, .. size - 1, int32 `[size]`."""
    return jnp.arange(size, dtype=jnp.int32)


def along(vector: Array, axis: int, ndim: int) -> Array:
    """`vector` in a shape of `ndim` axes that has it along `axis`."""
    return vector.reshape([-1 if a == axis else 1 for a in range(ndim)])
