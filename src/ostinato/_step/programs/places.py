"""The parts of arrays that computed numbers name, each as one number."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Sequence
from typing import NamedTuple

from .builder import Builder
from .values import Unsupported, Value

_MOST_PLACES = 2**24
"""Up to it, float32 has all integers."""


class Part(NamedTuple):
    """A part of an array from a computed place on.

    Attributes:
        axes: of the array, next to each other, all elements of which are counted.
        at: the number of the element where it begins.
        size: how many elements it has; of several axes, 1.
        places: how many there are.
    """

    axes: tuple[int, ...]
    at: Value
    size: int
    places: int


def indexed_axes(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the axes along which a part is taken."""
    return [i for i, (n, k) in enumerate(zip(shape, sizes, strict=True)) if n != k]


def parts_at(
    b: Builder,
    starts: Sequence[Value],
    axes: Sequence[int],
    shape: Sequence[int],
    sizes: Sequence[int],
) -> list[Part]:
    """Return a part along all axes, or one along each, in which numbers are clamped."""
    if _are_one(axes, sizes):
        return [_counted(b, starts, axes, shape, sizes, True)]
    pairs = zip(starts, axes, strict=True)
    return [_counted(b, [start], [i], shape, sizes, True) for start, i in pairs]


def part_at(
    b: Builder,
    index: Value,
    axes: Sequence[int],
    of_batch: Sequence[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    clamps: bool,
) -> Part:
    """Return the part that an index begins.

    Args:
        b: the builder.
        index: a number for each of some axes.
        axes: these.
        of_batch: those of which each index has an element of its own.
        shape: of what is indexed.
        sizes: of what is taken from it, or written to it.
        clamps: whether an index that is out of bounds counts as the nearest one; else
            it leaves out all.
    """
    if index.size != len(axes) or not axes:
        raise Unsupported("it has several indices")
    if index.summed and b.batch > 1:
        raise Unsupported("it combines different sequences")
    others = [i for i in range(len(shape)) if i not in (*axes, *of_batch)]
    if any(sizes[i] != shape[i] for i in others):
        raise Unsupported("it takes a part from the beginning on")
    moves = [i for i in axes if sizes[i] != shape[i]] or [axes[0]]
    moves = sorted(moves if clamps else axes)
    if len(moves) > 1 and not _are_one(moves, sizes):
        raise Unsupported("it indexes axes that are apart")
    step = index.strides[-1] if len(axes) > 1 else 0
    own = None if index.axis is None and not index.summed else 0
    one = index._replace(shape=(), strides=(), axis=own, summed=False)
    at = [one._replace(offset=one.offset + list(axes).index(i) * step) for i in moves]
    return _counted(b, at, moves, shape, sizes, clamps)


def _are_one(axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether single elements are taken along axes next to each other."""
    first, last = axes[0], axes[-1]
    return last - first + 1 == len(axes) and all(sizes[i] == 1 for i in axes)


def _counted(
    b: Builder,
    starts: Sequence[Value],
    axes: Sequence[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    clamps: bool,
) -> Part:
    """Return the part that begins at a number along each of several axes.

    If one is out of bounds, it counts as the nearest one, or all as -1.
    """
    size = sizes[axes[0]]
    counts = [shape[i] - sizes[i] + 1 for i in axes]
    count = math.prod(counts)
    if size == 0 or count > _MOST_PLACES:
        raise Unsupported("it indexes nothing, or too many places")
    if len(axes) == 1 and not clamps:
        return Part(tuple(axes), starts[0], size, count)
    numbers = list(map(ft.partial(clamped, b), starts, counts))
    at = numbers[0]
    for number, places in zip(numbers[1:], counts[1:], strict=True):
        at = b.elementwise("multiply", at, b.constant(float(places)))
        at = b.elementwise("add", at, number)
    if not clamps:
        inside = map(ft.partial(b.elementwise, "equal"), starts, numbers)
        everywhere = ft.reduce(ft.partial(b.elementwise, "multiply"), inside)
        at = b.elementwise("select", everywhere, at, b.constant(-1.0))
    return Part(tuple(axes), at, size, count)


def clamped(b: Builder, index: Value, count: int) -> Value:
    low = b.elementwise("max", index, b.constant(0.0))
    return b.elementwise("min", low, b.constant(float(count - 1)))
