"""Ragged words in batches of a few static shapes, with little padding."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .data import ALPHABET, Dictionary, Pronunciation

LETTER_IDS = {letter: i for i, letter in enumerate(ALPHABET, 1)}  # 0 is padding


class Batch(NamedTuple):
    """Padded int32 arrays; rows of length 0 fill the last batch of a bucket."""

    letters: np.ndarray  # [B, T]
    seq_lengths: np.ndarray  # [B]
    phonemes: np.ndarray  # [B, U]
    phoneme_lengths: np.ndarray  # [B]


def pad(rows: Sequence[Sequence[int]], length: int, count: int) -> tuple:
    """Stack rows of ids as ``[count, length]`` with their lengths ``[count]``."""
    padded = np.zeros((count, length), np.int32)
    lengths = np.zeros(count, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        lengths[i] = len(row)
    return padded, lengths


def letter_ids(words: Sequence[str]) -> list[list[int]]:
    """Turn clean words into letter numbers from 1."""
    return [[LETTER_IDS[letter] for letter in word] for word in words]


def bucket_bounds(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """Choose `count` padded lengths so that the fewest padded steps are left.

    Args:
        lengths: the length of every sequence.
        count: how many different lengths may be compiled.

    Returns:
        Rising bounds; a sequence goes to the first bound that is not below its length.
    """
    sizes, rows = np.unique(np.asarray(lengths), return_counts=True)
    total = np.concatenate([[0], np.cumsum(rows)])
    # best[k][j]: fewest padded steps for the j shortest sizes in at most k buckets
    best = [(0, ())] + [(np.inf, ())] * len(sizes)
    for _ in range(count):
        best = [best[0]] + [
            min(
                (best[i][0] + (total[j] - total[i]) * sizes[j - 1], (*best[i][1], j))
                for i in range(j)
            )
            for j in range(1, len(sizes) + 1)
        ]
    return tuple(int(sizes[j - 1]) for j in best[-1][1])


class TrainingSet:
    """Pairs of a word and one of its pronunciations, in buckets by word length."""

    def __init__(
        self,
        dictionary: Dictionary,
        phonemes: Sequence[str],
        *,
        batch_size: int,
        num_buckets: int,
        frames: int,
    ) -> None:
        ids = {phoneme: i for i, phoneme in enumerate(phonemes, 1)}  # 0 is the blank
        pairs = [
            (word, [ids[p] for p in pronunciation])
            for word, pronunciations in dictionary.items()
            for pronunciation in pronunciations
            if fits(word, pronunciation, frames)
        ]
        self.batch_size = batch_size
        self.targets = [target for _, target in pairs]
        lengths = [len(word) for word, _ in pairs]
        self.bounds = bucket_bounds(lengths, num_buckets)
        bucket_of = np.searchsorted(self.bounds, lengths)
        self._buckets = []
        for b, bound in enumerate(self.bounds):
            rows = [pairs[i] for i in np.flatnonzero(bucket_of == b)]
            words, targets = zip(*rows, strict=True)
            letters = pad(letter_ids(words), bound, len(words))
            longest = max(map(len, targets))
            self._buckets.append(Batch(*letters, *pad(targets, longest, len(words))))

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return sum(-(-len(b.letters) // self.batch_size) for b in self._buckets)

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield every pair once, in an order that `seed` and `epoch` alone decide."""
        rng = np.random.default_rng([seed, epoch])
        chunks = []
        for bucket in self._buckets:
            order = rng.permutation(len(bucket.letters))
            starts = range(0, len(order), self.batch_size)
            chunks += [(bucket, order[s : s + self.batch_size]) for s in starts]
        for i in rng.permutation(len(chunks)):
            bucket, rows = chunks[i]
            yield Batch(*(self._take(array, rows) for array in bucket))

    def _take(self, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        taken = array[rows]
        missing = self.batch_size - len(rows)
        return np.pad(taken, [(0, missing)] + [(0, 0)] * (array.ndim - 1))


def fits(word: str, pronunciation: Pronunciation, frames: int) -> bool:
    """Whether CTC can spell the pronunciation in `frames` scores a letter."""
    repeats = sum(a == b for a, b in pairwise(pronunciation))
    return len(pronunciation) + repeats <= frames * len(word)
