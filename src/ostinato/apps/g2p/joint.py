"""A joint n-gram model: the probability of a word together with its pronunciation.

It counts which units of a letter and its phonemes follow each other. Alone it is the
older way to find pronunciations; beside a network it errs elsewhere, and so helps to
rank the candidates of a beam search.

References:
    Bisani & Ney, Joint-Sequence Models for Grapheme-to-Phoneme Conversion (2008),
    doi:10.1016/j.specom.2008.01.002.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import alignment
from .ngram import EDGE, NGram

ORDER = 8


class Aligned(NamedTuple):
    """Words and their pronunciations, letter by letter.

    The probabilities of units are kept beside the units: a new pair must be aligned as
    these were, or it looks less likely than it is.
    """

    units: np.ndarray  # int32 [N], in a row as `NGram` wants it
    probs: np.ndarray  # float32, of every unit


def align(
    words: Sequence[str], pronunciations: Sequence[Sequence[int]], base: int
) -> Aligned:
    """Align the pairs of a word and its pronunciation; leave out those without units.

    Args:
        words: clean words.
        pronunciations: the labels of each, from 1 to `base` - 1.
        base: one more than the largest label.
    """
    probs = alignment.learn(words, pronunciations, base)
    found = alignment.align(probs, words, pronunciations, base)
    units = _row([units for units in found if units is not None])
    return Aligned(units if len(units) else np.array([EDGE], np.int32), probs)


class JointNGram:
    """A joint n-gram model of letters and phonemes.

    Args:
        aligned: the pairs to learn from.
        base: one more than the largest label.
    """

    def __init__(self, aligned: Aligned, base: int) -> None:
        self._probs, self._base = aligned.probs, base
        self._ngram = NGram(aligned.units, ORDER)

    def log_prob(
        self, words: Sequence[str], pronunciations: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Return the natural log of the probability of every pair.

        It is that of the most likely units of the pair; for a pair without units, that
        of letters and phonemes which are all equally likely.
        """
        found = alignment.align(self._probs, words, pronunciations, self._base)
        sizes = [len(w) + len(p) for w, p in zip(words, pronunciations, strict=True)]
        log_probs = -math.log(self._base) * np.array(sizes, np.float64)
        known = [i for i, units in enumerate(found) if units is not None]
        row = _row([units for units in found if units is not None])
        log_probs[known] = self._ngram.log_prob(row)
        return log_probs


def _row(units: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the units of pairs, with an `EDGE` behind each."""
    parts = [part for each in units for part in (each, [EDGE])]
    return np.concatenate(parts or [[]]).astype(np.int32)
