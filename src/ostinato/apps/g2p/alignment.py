"""Alignments: which phonemes each letter of a word stands for.

A unit is a letter with the phonemes that it stands for: none, one or two. As a number
it has three digits in base `base`: the letter, and two phonemes, 0 where there is none.
The letters of a word and its phonemes are those of a row of units, one for each letter.
Which row it is nobody says; expectation maximisation finds how likely each unit is.

References:
    Ristad & Yianilos, Learning String-Edit Distance (1998), doi:10.1109/34.682181.
    For letters and phonemes: Jiampojamarn et al. (2007), aclanthology.org/N07-1047.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from .batches import LETTER_IDS, letter_ids

MOST = 2  # phonemes of a unit
ROUNDS = 5
LEARN_FROM = 20_000  # pairs; more make no difference
RARE = 1e-8  # probability of a unit that was not seen
FIRST = 0.1, 1.0, 0.1  # weight of a unit with none, one or two phonemes at the start
LEAST = 1e-290  # a total probability below this has lost its digits


def num_codes(base: int) -> int:
    """Return one more than the largest number of a unit."""
    return (len(LETTER_IDS) + 1) * base**MOST


def learn(
    words: Sequence[str], pronunciations: Sequence[Sequence[int]], base: int
) -> np.ndarray:
    """Return the probability of every unit.

    Args:
        words: clean words.
        pronunciations: the labels of each, from 1 to `base` - 1.
        base: one more than the largest label.

    Returns:
        float32 ``[num_codes(base)]``, by the number of the unit.
    """
    step = -(-len(words) // LEARN_FROM) or 1
    groups = list(_groups(words[::step], pronunciations[::step], base))
    codes = np.arange(num_codes(base))
    sizes = np.where(codes % base, 2, np.where(codes % base**2, 1, 0))
    probs = np.array(FIRST)[sizes]
    for _ in range(ROUNDS):
        counts = sum((group.expected(probs) for group in groups), np.zeros(len(codes)))
        probs = np.maximum(counts / max(counts.sum(), 1.0), RARE)
    return probs.astype(np.float32)


def align(
    probs: np.ndarray,
    words: Sequence[str],
    pronunciations: Sequence[Sequence[int]],
    base: int,
) -> list[np.ndarray | None]:
    """Return the most likely row of units of every pair.

    Args:
        probs: of every unit.
        words: clean words.
        pronunciations: the labels of each, from 1 to `base` - 1.
        base: one more than the largest label.

    Returns:
        A unit for each letter of a word; None for a word with more than two phonemes
        for each letter.
    """
    found: list[np.ndarray | None] = [None] * len(words)
    scores = np.log(probs.astype(np.float64))
    for group in _groups(words, pronunciations, base):
        for place, units in zip(group.places, group.best(scores), strict=True):
            found[place] = units
    return found


@dataclasses.dataclass(frozen=True)
class _Group:
    """Pairs with equally many letters and equally many phonemes."""

    places: list[int]
    letters: np.ndarray  # [R, n]
    phonemes: np.ndarray  # [R, m]
    base: int

    def starts(self, count: int) -> int:
        """Return at how many places `count` phonemes can start."""
        return max(self.phonemes.shape[1] + 1 - count, 0)

    @cached_property
    def codes(self) -> list[list[np.ndarray]]:
        """The units by letter and number of phonemes, each ``[R, starts(number)]``.

        They are in the order of their first phoneme.
        """
        letters = range(self.letters.shape[1])
        return [[self._codes(i, k) for k in range(MOST + 1)] for i in letters]

    def _codes(self, letter: int, count: int) -> np.ndarray:
        ends = self.starts(count)
        codes = np.repeat(self.letters[:, letter, None], ends, axis=1)
        for i in range(MOST):
            codes = codes * self.base
            if i < count:
                codes += self.phonemes[:, i : i + ends]
        return codes

    def expected(self, probs: np.ndarray) -> np.ndarray:
        """Return how often each unit is expected in these pairs."""
        (rows, n), m = self.letters.shape, self.phonemes.shape[1]
        codes = self.codes
        before = np.zeros((n + 1, rows, m + 1))  # of letters and phonemes so far
        before[0, :, 0] = 1
        after = np.zeros((n + 1, rows, m + 1))  # of those that are left
        after[n, :, m] = 1
        for i in range(n):
            for k in range(MOST + 1):
                before[i + 1, :, k:] += (
                    before[i, :, : self.starts(k)] * probs[codes[i][k]]
                )
        for i in reversed(range(n)):
            for k in range(MOST + 1):
                after[i, :, : self.starts(k)] += (
                    after[i + 1, :, k:] * probs[codes[i][k]]
                )
        total = before[n, :, m, None]
        share = np.divide(1, total, out=np.zeros_like(total), where=total > LEAST)
        counts = np.zeros(len(probs))
        for i in range(n):
            for k in range(MOST + 1):
                through = before[i, :, : self.starts(k)] * after[i + 1, :, k:] * share
                through *= probs[codes[i][k]]
                counts += np.bincount(
                    codes[i][k].ravel(), through.ravel(), minlength=len(probs)
                )
        return counts

    def best(self, scores: np.ndarray) -> np.ndarray:
        """Return the units of every pair with the largest sum of scores, ``[R, n]``."""
        (rows, n), m = self.letters.shape, self.phonemes.shape[1]
        so_far = np.full((rows, m + 1), -np.inf)
        so_far[:, 0] = 0
        chosen = []
        for i in range(n):
            options = np.full((MOST + 1, rows, m + 1), -np.inf)
            for k in range(MOST + 1):
                added = scores[self.codes[i][k]]
                options[k, :, k:] = so_far[:, : self.starts(k)] + added
            chosen.append(options.argmax(0))
            so_far = options.max(0)
        units = np.zeros((rows, n), np.int64)
        row, end = np.arange(rows), np.full(rows, m)
        for i in reversed(range(n)):
            count = chosen[i][row, end]
            end = end - count
            for k in range(MOST + 1):
                here = count == k
                units[here, i] = self.codes[i][k][here, end[here]]
        return units


def _groups(
    words: Sequence[str], pronunciations: Sequence[Sequence[int]], base: int
) -> Iterator[_Group]:
    """Yield the pairs that have a row of units."""
    places: dict[tuple[int, int], list[int]] = {}
    for i, (word, labels) in enumerate(zip(words, pronunciations, strict=True)):
        if len(labels) <= MOST * len(word):
            places.setdefault((len(word), len(labels)), []).append(i)
    for (n, m), rows in places.items():
        letters = np.array(letter_ids([words[i] for i in rows]), np.int64)
        phonemes = np.array([pronunciations[i] for i in rows], np.int64)
        yield _Group(
            rows, letters.reshape(len(rows), n), phonemes.reshape(len(rows), m), base
        )
