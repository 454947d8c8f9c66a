"""Indices that depend on the thread, and how operations on shapes change them.

A thread runs one element of the states. Its place are the indices of this element, and
an index of any array that it reads or writes is a constant plus multiples of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..programs.values import Unsupported

Shape = tuple[int, ...]

_MOST_ELEMENTS = 16
"""Of an array that one thread reads, adds up or writes."""


class Index(NamedTuple):
    """A number that depends on the place of the thread.

    Attributes:
        constant: what it is at place 0.
        factors: what each index of the place is multiplied with.
    """

    constant: int
    factors: Shape

    def __add__(self, other: Index | int) -> Index:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Index):
            return Index(self.constant + int(other), self.factors)
        pairs = zip(self.factors, other.factors, strict=True)
        return Index(self.constant + other.constant, tuple(a + b for a, b in pairs))

    def times(self, factor: int) -> Index:
        """Return the product with a number."""
        factor = int(factor)
        return Index(self.constant * factor, tuple(f * factor for f in self.factors))


Indices = tuple[Index, ...]
"""One for each axis of an array."""


class Places(NamedTuple):
    """The places of all threads: those of the elements of an array of this shape."""

    shape: Shape

    def constant(self, value: int) -> Index:
        """Return an index that is the same for all threads."""
        return Index(value, (0,) * len(self.shape))

    def own(self) -> Indices:
        """Return the indices of the place."""
        axes = range(len(self.shape))
        return tuple(
            # An axis of size 1 has index 0 alone.
            Index(0, tuple(int(i == k and self.shape[k] > 1) for i in axes))
            for k in axes
        )

    def bounds(self, index: Index) -> tuple[int, int]:
        """Return the least and the largest value of an index."""
        ends = [
            f * (size - 1) for f, size in zip(index.factors, self.shape, strict=True)
        ]
        low, high = (sum(pick(0, end) for end in ends) for pick in (min, max))
        return index.constant + low, index.constant + high

    def fits(self, index: Index, size: int) -> bool:
        """Return whether an index is inside of an axis for all threads."""
        low, high = self.bounds(index)
        return low >= 0 and high < size

    def flat(self, indices: Indices, shape: Shape) -> Index:
        """Return where an element is in an array that lies row by row."""
        found = self.constant(0)
        for index, size in zip(indices, shape, strict=True):
            found = found.times(size) + index
        return found

    def unflat(self, index: Index, shape: Shape) -> Indices:
        """Return the indices of the element that `flat` gives.

        Raises:
            Unsupported: they are not multiples of the place.
        """
        found = []
        for size in reversed(shape):
            rest, constant = divmod(index.constant, size)
            inside = Index(constant, tuple(f if f % size else 0 for f in index.factors))
            if not self.fits(inside, size):
                raise Unsupported("it reshapes arrays in an unusual way")
            found.append(inside)
            index = Index(
                rest, tuple(0 if f % size else f // size for f in index.factors)
            )
        if index != self.constant(0):
            raise Unsupported("it reshapes arrays in an unusual way")
        return tuple(reversed(found))

    def layouts(self, shape: Shape) -> Iterator[list[Indices]]:
        """Yield ways to deal the elements of an array out to the threads.

        In each, every element is dealt out once: a thread has those of the list. Where
        it depends on some indices of the place alone, the threads at 0 in the others
        have it; see `owners`.
        """
        own = self.own()
        total = math.prod(self.shape)
        size = math.prod(shape)
        for count in range(len(self.shape), -1, -1):
            held = math.prod(self.shape[:count])
            # A share of the place more than the last one is a layout of its own.
            if count < len(self.shape) and held == total:
                continue
            if held and size % held == 0:
                yield from self._dealt(own[:count], self.shape[:count], shape)

    def _dealt(
        self, own: Indices, extents: Shape, shape: Shape
    ) -> Iterator[list[Indices]]:
        """Yield layouts of several elements for each of some indices of the place."""
        parts = math.prod(shape) // math.prod(extents)
        if parts > _MOST_ELEMENTS:
            return
        begins = range(len(extents) + 1) if parts > 1 else (0,)
        for begin in begins:  # the elements of a thread are an axis before this one
            sizes = (*extents[:begin], parts, *extents[begin:])
            flats = [
                self.flat((*own[:begin], self.constant(part), *own[begin:]), sizes)
                for part in range(parts)
            ]
            try:
                yield [self.unflat(flat, shape) for flat in flats]
            except Unsupported:
                continue

    def owners(self, indices: Indices) -> list[int]:
        """Return the axes of the place at whose index 0 the owner of an element is."""
        return [
            k
            for k, size in enumerate(self.shape)
            if size > 1 and not any(index.factors[k] for index in indices)
        ]


def moved(indices: Indices, axis: int, by: int) -> Indices:
    """Return indices of which one is moved."""
    return (*indices[:axis], indices[axis] + by, *indices[axis + 1 :])


def over(shape: Shape, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all indices of some axes of an array, if they are few.

    Raises:
        Unsupported: they are many.
    """
    sizes = [shape[axis] for axis in axes]
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise Unsupported("it adds up or compares the elements of a long axis")
    return list(itertools.product(*map(range, sizes)))
