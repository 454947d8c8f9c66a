"""The function `buckets`: sequences of similar length in batches of a few shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import _checks
from .._typing import ArrayLike, Int
from .epochs import Batches, Epochs
from .parts import Parts
from .sequences import check_lengths

MOST_SIZES = 2048  # that are compared; more are rounded up to so many


def bucket_bounds(lengths: Int[ArrayLike, " N"], count: int) -> tuple[int, ...]:
    """Choose `count` padded lengths that leave the fewest padded steps.

    Args:
        lengths: the length of every sequence, `[N]`.
        count: the number of different padded lengths, each of which is compiled.

    Returns:
        Increasing bounds of at least 1; a sequence is padded to the first bound that is
        at least its length. No other choice has fewer padded steps, as long as there
        are at most 2048 different lengths; more are first rounded up to a multiple.
        Sequences that fill the last batch of a bucket do not count here; `buckets`
        counts them.

    Raises:
        TypeError: `lengths` or `count` are not integers.
        ValueError: there is no length, a negative one, or `count` is less than 1.

    Examples:
        >>> from ostinato import data
        >>> data.bucket_bounds([3, 4, 4, 9, 50], 2)
        (9, 50)
    """
    lengths = np.maximum(check_lengths(lengths), 1)
    count = _checks.check_size("count", count)
    *_, (_, bounds) = _choices(
        lengths, count, lambda sequences, bound: sequences * float(bound)
    )
    return bounds


def _choices(
    lengths: np.ndarray, most: int, cost: Callable[[np.ndarray, int], np.ndarray]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the least cost, and its bounds, of 1 bucket, 2 buckets, and so on.

    Args:
        lengths: the lengths, at least 1.
        most: the largest number of buckets.
        cost: a function of the number of sequences in a bucket, an array of several
            such numbers, and of its bound.
    """
    sizes, sequences = _sizes(lengths)
    total = np.concatenate([[0], np.cumsum(sequences)])
    # After k rounds, steps[j] is the least cost of the sequences of the j shortest
    # sizes in k buckets; last[k][j] is where the last of these buckets begins.
    steps = np.concatenate([[0.0], np.full(len(sizes), np.inf)])
    last: list[np.ndarray] = []
    for _ in range(min(most, len(sizes))):
        begins = np.zeros(len(sizes) + 1, np.int64)
        found = np.full(len(sizes) + 1, np.inf)
        for j in range(1, len(sizes) + 1):
            each = steps[:j] + cost(total[j] - total[:j], int(sizes[j - 1]))
            begins[j] = each.argmin()
            found[j] = each[begins[j]]
        steps = found
        last.append(begins)
        bounds, j = [], len(sizes)
        for begins in reversed(last):
            bounds.append(int(sizes[j - 1]))
            j = begins[j]
        yield float(steps[-1]), tuple(reversed(bounds))


def _sizes(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different lengths, rounded if they are many, and their counts."""
    sizes, sequences = np.unique(lengths, return_counts=True)
    if len(sizes) <= MOST_SIZES:
        return sizes, sequences
    step = -(-int(sizes[-1]) // MOST_SIZES)
    rounded = sizes[-1] - (sizes[-1] - lengths) // step * step  # never past the largest
    return np.unique(rounded, return_counts=True)


class Buckets(Epochs[np.ndarray]):
    """The result of `buckets`: batches of indices, each of sequences of one bucket.

    Attributes:
        bounds: the padded length of every bucket, increasing.
        batch_sizes: the number of sequences in a batch of every bucket.
        waste: the part of all padded steps of an epoch that is padding, 0 to 1.
    """

    bounds: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    waste: float

    def __init__(
        self,
        lengths: np.ndarray,
        bounds: tuple[int, ...],
        batch_sizes: tuple[int, ...],
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(seed, shuffle)
        self.bounds, self.batch_sizes = bounds, batch_sizes
        self._lengths = lengths
        bucket_of = np.searchsorted(bounds, lengths)
        self._members = [np.flatnonzero(bucket_of == b) for b in range(len(bounds))]
        padded = sum(
            -(-len(members) // size) * size * bound
            for members, size, bound in zip(
                self._members, batch_sizes, bounds, strict=True
            )
        )
        self.waste = 1 - sum(lengths.tolist()) / padded  # int64 may not hold the sum

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes `(batch_size, bound)` of all batches."""
        return list(zip(self.batch_sizes, self.bounds, strict=True))

    def __repr__(self) -> str:
        return f"Buckets({len(self._lengths)} sequences, shapes={self.shapes})"

    @property
    def _facts(self) -> tuple[np.ndarray, Any]:
        return self._lengths, self.shapes

    def _order(self, number: int) -> Batches:
        rng = self._generator(number)
        batches = []
        for members, size in zip(self._members, self.batch_sizes, strict=True):
            order = members if rng is None else rng.permutation(members)
            batches += [order[i : i + size] for i in range(0, len(order), size)]
        if rng is not None:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        return Batches(batches)

    def collate(self, sequences: Sequence[Any]) -> tuple[Any, Int[np.ndarray, " B"]]:
        """Pad the sequences of one batch to one of the few shapes.

        Args:
            sequences: the sequences of a batch in its order, each an array `[n, ...]`;
                or a tuple or dict of such arrays of equal n, such as inputs and
                targets, and of numbers, such as a label.

        Returns:
            Zero-padded sequences `[B, T, ...]` and int32 lengths `[B]`, where `(B, T)`
            is one of `shapes`. Sequences of length 0 fill the last batch of a bucket.
            Tuples and dicts stay what they are; their numbers become `[B]`, 0 for the
            sequences of length 0 that fill a batch.

        Raises:
            TypeError: a sequence is neither an array nor such a tuple or dict, or the
                dtypes differ.
            ValueError: the sequences are not those of one batch, their shapes differ in
                more than the first size, or arrays of one sequence in their lengths.

        Examples:
            >>> import numpy as np
            >>> from ostinato import data
            >>> batches = data.buckets([2, 3], batch_size=4)
            >>> walks = [{"x": np.ones((n, 5)), "label": n} for n in (2, 3)]
            >>> batch, lengths = batches.collate(walks)
            >>> batch["x"].shape, batch["label"].tolist(), lengths.tolist()
            ((4, 3, 5), [2, 3, 0, 0], [2, 3, 0, 0])
        """
        parts = Parts("sequences", sequences)
        count, longest = len(parts.lengths), max(parts.lengths)
        bucket = int(np.searchsorted(self.bounds, longest))
        if bucket == len(self.bounds) or count > self.batch_sizes[bucket]:
            raise ValueError(
                "`sequences` must be those of one batch, of a shape [sequences, steps] "
                f"in {self.shapes}, got {count} sequences of up to {longest} steps"
            )
        shape = self.batch_sizes[bucket], self.bounds[bucket]

        def pad(arrays: list[np.ndarray]) -> np.ndarray:
            padded = np.zeros((*shape, *arrays[0].shape[1:]), arrays[0].dtype)
            for i, array in enumerate(arrays):
                padded[i, : len(array)] = array
            return padded

        return parts.batch(shape[0], pad)


def buckets(
    lengths: Int[ArrayLike, " N"],
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    bounds: int | Sequence[int] | Int[ArrayLike, " K"] = 8,
    seed: int = 0,
    shuffle: bool = True,
) -> Buckets:
    """Deal sequences out to batches of similar length, which have a few shapes.

    Args:
        lengths: the length of every sequence, `[N]`.
        batch_size: the number of sequences in every batch; or
        max_tokens: the number of steps in every batch, padding included. A bucket of
            short sequences then has larger batches. Give one of the two.
        bounds: the largest number of buckets, whose number and padded lengths are
            chosen for the least waste; or these lengths, increasing, such as the
            `bounds` of another set.
        seed: decides the order of every epoch, with its number.
        shuffle: False keeps sequences of a bucket in their order, and short ones first.

    Returns:
        `Buckets`: each batch is an int64 array of indices into `lengths`, and every
        index comes once in an epoch. Its `collate` pads sequences.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: both or none of `batch_size` and `max_tokens` are given; there is no
            length, or one is negative, or larger than the last of `bounds` or than
            `max_tokens`.

    Examples:
        >>> import numpy as np
        >>> from ostinato import data
        >>> words = [np.ones(n) for n in (3, 4, 4, 9, 50)]
        >>> batches = data.buckets([len(w) for w in words], batch_size=2, bounds=2)
        >>> [batches.collate([words[i] for i in batch])[0].shape for batch in batches]
        [(2, 4), (2, 50), (2, 4)]
        >>> f"{batches.waste:.0%} padding"
        '40% padding'
    """
    values = check_lengths(lengths)
    given = _check_bounds(bounds)
    longest = max(int(values.max()), 1)
    if isinstance(given, tuple) and longest > given[-1]:
        raise ValueError(
            f"`lengths` must be at most {given[-1]}, the last of `bounds`, got "
            f"{longest} at {int(values.argmax())}"
        )
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            "one of `batch_size` and `max_tokens` must be given, got "
            f"{batch_size} and {max_tokens}"
        )
    number = tokens = 0
    if batch_size is not None:
        number = _checks.check_size("batch_size", batch_size)
    else:
        tokens = _checks.check_size("max_tokens", max_tokens)
        least, of = longest, "the longest of `lengths`"
        if isinstance(given, tuple):
            least, of = given[-1], "the last of `bounds`"
        if tokens < least:
            raise ValueError(
                f"`max_tokens` must be at least {least}, {of}, got {tokens}"
            )

    def size(bound: int) -> int:
        return number or tokens // bound

    def steps(sequences: np.ndarray, bound: int) -> np.ndarray:
        return -(-sequences // size(bound)) * float(size(bound) * bound)

    if isinstance(given, int):
        choices = _choices(np.maximum(values, 1), given, steps)
        _, given = min(choices, key=operator.itemgetter(0))  # the first of equal ones
    return Buckets(values, given, tuple(map(size, given)), seed, shuffle)


def _check_bounds(bounds: Any) -> int | tuple[int, ...]:
    """Return a number of buckets, or their increasing bounds."""
    several = isinstance(bounds, Sequence) and not isinstance(bounds, str)
    if several or getattr(bounds, "ndim", 0):
        values = np.asarray(_checks.check_integers("bounds", bounds))
        _checks.check_rank("bounds", values, "K")
        given = tuple(_checks.check_size("bounds", bound) for bound in values.tolist())
        if not given or list(given) != sorted(set(given)):
            raise ValueError(f"`bounds` must be increasing, got {list(given)}")
        return given
    if isinstance(bounds, bool) or not hasattr(bounds, "__index__"):
        raise TypeError(
            "`bounds` must be an integer or increasing integers, got "
            f"{_checks.describe(bounds)}"
        )
    return _checks.check_size("bounds", bounds)
