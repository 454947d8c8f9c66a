"""Where the examples lie among the tokens of a flat array.

Without an outer `jit`, each operation would be a program that is compiled by itself.
The functions here are compiled as a whole; within a trace they are inlined.
"""

from __future__ import annotations

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._padding import is_step
from ..._rnn.accumulation import widen
from ..._typing import Array

# Float sums of many tokens one after another lose digits: with a million of float32,
# 1e-4 of a sum. The blocks of an example depend on its own tokens alone, so that its
# bits are the same in any batch.
_BLOCK = 256  # tokens, a power of two
_MOST_BLOCKS = 4096  # of an example that are added up one after another


class UsedCapacity(NamedTuple):
    """The part of a flat array's capacity that the examples use.

    Attributes:
        valid: bool `[capacity]`, False in the unused capacity.
        last: int32 scalar, the last valid token, 0 where no token is valid.
        any_token: bool scalar, whether any token is valid.
    """

    valid: Array
    last: Array
    any_token: Array

    @classmethod
    @ft.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def of(cls, lengths: Array, capacity: int) -> UsedCapacity:
        """Return the used part for lengths, int32 `[batch]`."""
        total = jnp.sum(lengths, dtype=jnp.int32)
        return cls(positions(capacity) < total, jnp.maximum(total - 1, 0), total > 0)


class Segments(NamedTuple):
    """The example and the position of each token of a flat array.

    Tokens of the unused capacity repeat the last valid token.

    Attributes:
        ids: int32 `[capacity]`, the example of each token, ascending.
        drop_ids: the same, but `batch` in the unused capacity, for sums that drop it.
        position: int32 `[capacity]`, the position of each token in its example.
        offsets: int32 `[batch]`, the first token of each example.
        valid: bool `[capacity]`, False in the unused capacity.
        last: int32 scalar, the last valid token, 0 where no token is valid.
    """

    ids: Array
    drop_ids: Array
    position: Array
    offsets: Array
    valid: Array
    last: Array

    @classmethod
    @ft.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def of(cls, lengths: Array, capacity: int, used: UsedCapacity) -> Segments:
        """Return the segments for lengths, int32 `[batch]`."""
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        offsets = ends - lengths
        token = positions(capacity)
        drop_ids = _count_up_to(ends, token)
        last_id = jnp.minimum(drop_ids[used.last], lengths.shape[0] - 1)
        ids = jnp.minimum(drop_ids, last_id)
        position = jnp.minimum(token, used.last) - offsets[ids]
        return cls(ids, drop_ids, position, offsets, used.valid, used.last)


@ft.partial(jax.jit, static_argnums=2, inline=True)
def sum_per_example(x: Array, segments: Segments, batch: int) -> Array:
    """Return the sum over the tokens of each example, in its blocks first.

    Tokens of the unused capacity do not count.
    """
    sums = widen(x)
    for _ in range(_levels(segments)):
        of_token, blocks = _blocks(segments, batch)
        count = blocks.ids.shape[0]
        of_token = jnp.where(segments.valid, of_token, count)  # dropped
        sums = jax.ops.segment_sum(sums, of_token, count, indices_are_sorted=True)
        segments = blocks
    ids = segments.drop_ids
    sums = jax.ops.segment_sum(sums, ids, batch, indices_are_sorted=True)
    return sums.astype(x.dtype)


@jax.custom_jvp
def repeat_per_token(x: Array, segments: Segments) -> Array:
    """Return for each token the element of its example, of `x`, `[batch, ...]`.

    The derivative is a sum over tokens, in blocks first.
    """
    return take_repeated(x, segments.ids, ascending=True)


@repeat_per_token.defjvp
def _repeat_per_token_jvp(primals: Any, tangents: Any) -> Any:
    """Return the derivative: repeated for the blocks first, if there are several."""
    (x, segments), (dx, _) = primals, tangents
    places, within = [], segments
    for _ in range(_levels(segments)):
        of_token, within = _blocks(within, x.shape[0])
        places.append(of_token)
    for ids in (within.ids, *reversed(places)):
        dx = take_repeated(dx, ids, ascending=True)
    return repeat_per_token(x, segments), dx


def _levels(segments: Segments) -> int:
    """Return how often to add up blocks: tokens, then blocks of them, and so on."""
    capacity = segments.ids.shape[0]
    if not isinstance(capacity, int):  # a symbol
        return 1
    levels, longest = 0, capacity
    while longest > (_MOST_BLOCKS if levels else _BLOCK):
        levels, longest = levels + 1, longest // _BLOCK + 1
    return levels


def _blocks(segments: Segments, batch: int) -> tuple[Array, Segments]:
    """Return the block of each token, ascending, and where the blocks themselves lie.

    Some blocks have no tokens: examples begin at least as many blocks apart as they
    need.
    """
    capacity = segments.ids.shape[0]
    token = jnp.minimum(positions(capacity), segments.last)
    first = token - segments.position  # offsets[ids] without a gather
    of_token = _whole(first) + segments.ids + _whole(segments.position)
    begins = _whole(segments.offsets) + positions(batch)
    block = positions(capacity // _BLOCK + batch)
    example = _count_up_to(begins, block) - 1
    position, every = block - begins[example], jnp.ones(block.shape, bool)
    return of_token, Segments(example, example, position, begins, every, block[-1])


def _whole(tokens: Array) -> Array:
    """Return how many blocks fit into so many tokens."""
    return lax.shift_right_logical(tokens, jnp.int32(_BLOCK.bit_length() - 1))


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def take_repeated(
    x: Array, index: Array, axis: int = 0, ascending: bool = False
) -> Array:
    """Return `jnp.take` of elements that are taken many times.

    The derivative adds up as many cotangents, so it is computed in a wider dtype.
    """
    taken = jnp.take(widen(x), index, axis, mode="clip", indices_are_sorted=ascending)
    return taken.astype(x.dtype)


@ft.partial(jax.jit, inline=True)
def descending(lengths: Array) -> tuple[Array, Array]:
    """Return the examples, the longest first, and the rank of each in that order."""
    order = jnp.argsort(-lengths).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(positions(order.size))
    return order, rank


def _count_up_to(ascending: Array, values: Array) -> Array:
    """Return how many elements of `ascending`, int32, are at most each of `values`.

    Elements are counted first among every k-th one, k about the square root of their
    number, then among the k - 1 before the first larger one: two comparisons that
    compile to few kernels.
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
    """Return 0, 1, .. size - 1, int32 `[size]`."""
    return jnp.arange(size, dtype=jnp.int32)


@ft.partial(jax.jit, static_argnums=1, inline=True)
def is_inside(lengths: Array, longest: int) -> Array:
    """Return where padded examples are not padding, bool `[batch, longest]`."""
    return is_step(lengths, longest, 1)


@ft.partial(jax.jit, static_argnums=2, inline=True)
def safe_fill(any_valid: Array, x: Array, integer: int = 0) -> Array:
    """Return `x`, or where nothing is valid a number that most functions accept.

    That number is 0.5 for floats, since most functions are finite there.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    other = 0.5 if jnp.issubdtype(x.dtype, jnp.inexact) else integer
    return jnp.where(any_valid, x, jnp.asarray(other, x.dtype))


def along(vector: Array, axis: int, ndim: int) -> Array:
    """Return `vector` in a shape of `ndim` axes that has it along `axis`."""
    return vector.reshape([-1 if a == axis else 1 for a in range(ndim)])
