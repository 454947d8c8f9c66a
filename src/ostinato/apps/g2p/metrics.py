"""Edit distance and error rates of pronunciations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class ErrorRates(NamedTuple):
    """Phoneme and word error rates in percent, over `words` words."""

    per: float
    wer: float
    words: int

    @classmethod
    def of(cls, counts: np.ndarray) -> "ErrorRates":
        """Return the rates of the sums that `error_counts` returns."""
        distances, lengths, wrong, words = counts.tolist()
        return cls(
            100 * distances / max(lengths, 1), 100 * wrong / max(words, 1), int(words)
        )


def edit_distance(a: Sequence, b: Sequence) -> int:
    """Return the fewest insertions, deletions and substitutions from `a` to `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = (
                row[j],
                min(diagonal + (x != y), row[j] + 1, row[j - 1] + 1),
            )
    return row[-1]


def error_counts(
    guesses: Mapping[str, Sequence], references: Mapping[str, Sequence[Sequence]]
) -> np.ndarray:
    """Compare the guess for each word with the nearest of its references.

    The phoneme error rate is the sum of the distances divided by the sum of the lengths
    of these references. A word is correct if its guess equals one of its references.

    Args:
        guesses: pronunciations of words.
        references: all correct pronunciations of these words, and perhaps others.

    Returns:
        Sums over the guesses, `[4]`: distances, lengths, wrong words, words.
    """
    distances = lengths = wrong = 0
    for word, guess in guesses.items():
        distance, length = min(
            (edit_distance(guess, p), len(p)) for p in references[word]
        )
        distances, lengths, wrong = (
            distances + distance,
            lengths + length,
            wrong + (distance > 0),
        )
    return np.array([distances, lengths, wrong, len(guesses)], np.float64)
