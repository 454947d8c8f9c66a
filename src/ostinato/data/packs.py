"""The function `pack`: ragged batches, which have no padding, of one capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _checks
from .._typing import ArrayLike, Int
from .epochs import Batches, Epochs
from .parts import Parts
from .sequences import check_lengths

OPEN = 16  # batches that are being filled at a time


class Packs(Epochs[np.ndarray]):
    """The result of `pack`: batches of indices, of no more tokens than the capacity.

    Attributes:
        capacity: the number of tokens for which every batch has space.
        max_examples: the number of examples in every batch, empty ones included.
        max_length: the length of the longest example.
    """

    capacity: int
    max_examples: int
    max_length: int

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        max_examples: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(seed, shuffle)
        self.capacity, self.max_examples = capacity, max_examples
        self.max_length = max(int(lengths.max()), 1)
        self._lengths = lengths

    @property
    def waste(self) -> float:
        """The unused part of the capacity of an epoch, 0 to 1."""
        used = sum(self._lengths.tolist())  # int64 may not hold it
        return 1 - used / (len(self) * self.capacity)

    def __repr__(self) -> str:
        return (
            f"Packs({len(self._lengths)} examples, capacity={self.capacity}, "
            f"max_examples={self.max_examples}, max_length={self.max_length})"
        )

    @property
    def _facts(self) -> tuple[np.ndarray, Any]:
        return self._lengths, (self.capacity, self.max_examples)

    def _order(self, number: int) -> Batches:
        """Put every example into the fullest open batch that has space for it."""
        rng = self._generator(number)
        count = len(self._lengths)
        order = range(count) if rng is None else rng.permutation(count).tolist()
        lengths = self._lengths.tolist()
        open_batches: list[tuple[int, list[int]]] = []  # space left, examples
        closed: list[list[int]] = []
        for i in order:
            fitting = [
                (space, k)
                for k, (space, _) in enumerate(open_batches)
                if space >= lengths[i]
            ]
            if fitting:
                space, k = min(fitting)
                open_batches[k][1].append(i)
                open_batches[k] = space - lengths[i], open_batches[k][1]
            else:
                if len(open_batches) == OPEN:
                    fullest = min(range(OPEN), key=lambda k: open_batches[k][0])
                    closed.append(open_batches.pop(fullest)[1])
                k = len(open_batches)
                open_batches.append((self.capacity - lengths[i], [i]))
            if len(open_batches[k][1]) == self.max_examples:
                closed.append(open_batches.pop(k)[1])
        closed += [examples for _, examples in open_batches]
        # Batches that were closed last are the least full; they may come anywhere.
        if rng is not None:
            closed = [closed[k] for k in rng.permutation(len(closed))]
        return Batches([np.array(examples, np.int64) for examples in closed])

    def collate(
        self, examples: Sequence[Any]
    ) -> tuple[Any, Int[np.ndarray, " max_examples"]]:
        """Concatenate the examples of one batch, for `ragged.RaggedArray`.

        Args:
            examples: the examples of a batch in its order, each an array `[n, ...]`; or
                a tuple or dict of such arrays of equal n, such as inputs and targets,
                and of numbers, such as a label.

        Returns:
            Their tokens `[capacity, ...]`, zeros where the capacity is unused, and
            int32 lengths `[max_examples]`, 0 for the missing ones: empty examples,
            which `ragged.vmap` takes with `min_length=0`. Tuples and dicts stay what
            they are; their numbers become `[max_examples]`, 0 for the missing ones.

        Raises:
            TypeError: an example is neither an array nor such a tuple or dict, or the
                dtypes differ.
            ValueError: the examples are not those of one batch, their shapes differ in
                more than the first size, or arrays of one example in their lengths.
        """
        parts = Parts("examples", examples)
        count, used = len(parts.lengths), sum(parts.lengths)
        if used > self.capacity or count > self.max_examples:
            raise ValueError(
                f"`examples` must be those of one batch, at most {self.max_examples} "
                f"of {self.capacity} tokens, got {count} of {used}"
            )
        longest = max(parts.lengths)
        if longest > self.max_length:
            raise ValueError(
                f"`examples` must be those of one batch, of at most {self.max_length} "
                f"tokens each, got one of {longest}"
            )

        def join(arrays: list[np.ndarray]) -> np.ndarray:
            tokens = np.zeros((self.capacity, *arrays[0].shape[1:]), arrays[0].dtype)
            np.concatenate(arrays, out=tokens[:used])
            return tokens

        return parts.batch(self.max_examples, join)


def pack(
    lengths: Int[ArrayLike, " N"],
    capacity: int,
    *,
    max_examples: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
) -> Packs:
    """Pack examples of any length into ragged batches of one capacity.

    All batches have one shape, so that a program is compiled once. An example goes to
    the fullest of 16 batches in progress that has space for it (best fit). A batch of
    fewer than `max_examples` is filled up with empty examples: map them with
    `ragged.vmap(..., min_length=0)`, and leave them out of a loss by `lengths > 0`.

    Args:
        lengths: the number of tokens of every example, `[N]`.
        capacity: the number of tokens for which a batch has space.
        max_examples: the number of examples for which it has space, for
            `ragged.shard` a multiple of the devices; None means a quarter more than
            examples of the mean length need.
        seed: decides the order of every epoch, with its number.
        shuffle: False takes the examples in their order.

    Returns:
        `Packs`: each batch is an int64 array of indices into `lengths`, and every index
        comes once in an epoch. The number of batches may differ between epochs. Its
        `collate` concatenates examples.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no length, or one is negative or larger than `capacity`.

    Examples:
        >>> import numpy as np
        >>> from ostinato import data, ragged
        >>> words = [np.ones(n, np.float32) for n in (3, 4, 4, 9, 10)]
        >>> batches = data.pack([len(w) for w in words], 20, max_examples=4)
        >>> for batch in batches:
        ...     tokens, lengths = batches.collate([words[i] for i in batch])
        ...     max_length = batches.max_length
        ...     print(ragged.RaggedArray(tokens, lengths, max_length=max_length))
        RaggedArray(float32[20], n=[4, 10, 3, 0], axis=0, max_length=10)
        RaggedArray(float32[20], n=[9, 4, 0, 0], axis=0, max_length=10)
    """
    values = check_lengths(lengths)
    capacity = _checks.check_size("capacity", capacity)
    if values.max() > capacity:
        at = int(values.argmax())
        raise ValueError(
            f"`lengths` must be at most `capacity` = {capacity}, got {values[at]} at "
            f"{at}; leave longer examples out, or cut them"
        )
    if max_examples is None:
        mean = max(float(values.mean()), 1.0)
        max_examples = min(int(np.ceil(1.25 * capacity / mean)), len(values))
    else:
        max_examples = _checks.check_size("max_examples", max_examples)
    return Packs(values, capacity, max_examples, seed, shuffle)
