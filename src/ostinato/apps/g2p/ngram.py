"""An n-gram model: the probability of a phoneme sequence, whatever the letters.

CTC scores every frame independently; this model adds which phonemes follow each other,
and so helps to rank the candidates of a beam search.

References:
    Witten & Bell, The Zero-Frequency Problem (1991), doi:10.1109/18.87000
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EDGE = 0  # the label that marks the start and the end of a sequence


class _Counts(NamedTuple):
    """Counts of one order; n-grams and contexts are numbers in base `base`."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    total: np.ndarray  # n-grams counted per context
    kinds: np.ndarray  # different n-grams per context


class NGram:
    """A back-off model of phoneme sequences, learned by counting.

    Args:
        sequences: phoneme labels, each from 1 to `base` - 1.
        base: one more than the largest label.
        order: the n of the largest n-grams.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], base: int, order: int = 6
    ) -> None:
        self.base, self.order = base, order
        windows, _ = self._windows(sequences)
        self._counts = [_count(codes, base) for codes in self._codes(windows)]

    def log_prob(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the natural log of the probability of every sequence and its end."""
        if not sequences:
            return np.empty(0)
        windows, owner = self._windows(sequences)
        prob = np.full(len(windows), 1 / self.base)
        for codes, counts in zip(self._codes(windows), self._counts, strict=True):
            seen = _look_up(counts.grams, counts.counts, codes)
            context = codes // self.base
            total = _look_up(counts.contexts, counts.total, context)
            kinds = _look_up(counts.contexts, counts.kinds, context)
            mixed = (seen + kinds * prob) / np.maximum(total + kinds, 1)
            prob = np.where(total > 0, mixed, prob)
        return np.bincount(owner, np.log(prob), minlength=len(sequences))

    def _windows(self, sequences: Sequence[Sequence[int]]) -> tuple:
        """Return the last `order` labels at every position, and its sequence."""
        start = [EDGE] * (self.order - 1)
        flat = [p for s in sequences for p in (*start, *s, EDGE)]
        width = np.array([len(s) + self.order for s in sequences], np.int64)
        owner = np.repeat(np.arange(len(sequences)), width)
        place = np.arange(len(flat)) - np.repeat(np.cumsum(width) - width, width)
        ends = np.flatnonzero(place >= self.order - 1)
        steps = np.arange(1 - self.order, 1)
        return np.array(flat, np.int64)[ends[:, None] + steps], owner[ends]

    def _codes(self, windows: np.ndarray) -> list[np.ndarray]:
        """Encode the last 1 .. `order` labels of every window as one number each."""
        powers = self.base ** np.arange(self.order)
        digits = windows[:, ::-1] * powers
        return list(np.cumsum(digits, axis=1).T)


def _count(codes: np.ndarray, base: int) -> _Counts:
    grams, counts = np.unique(codes, return_counts=True)
    contexts, first, kinds = np.unique(
        grams // base, return_index=True, return_counts=True
    )
    return _Counts(grams, counts, contexts, np.add.reduceat(counts, first), kinds)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of every wanted key, 0 if unknown; `keys` must be sorted."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
