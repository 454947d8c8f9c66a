"""How far a pronunciation is from the dictionary's."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ErrorRates(NamedTuple):
    """Phoneme and word error rates in percent, over `words` words."""

    per: float
    wer: float
    words: int


def edit_distance(a: Sequence, b: Sequence) -> int:
    """Fewest insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = (
                row[j],
                min(diagonal + (x != y), row[j] + 1, row[j - 1] + 1),
            )
    return row[-1]


def error_rates(
    guesses: Mapping[str, Sequence], references: Mapping[str, Sequence[Sequence]]
) -> ErrorRates:
    """Compare one guess a word with its nearest reference.

    The phoneme error rate is the sum of the distances over the sum of the lengths of
    those references; a word is right if any of its references is met.

    Args:
        guesses: a pronunciation for every word of `references`.
        references: every pronunciation that counts as right, by word.
    """
    distances = lengths = wrong = 0
    for word, prons in references.items():
        guess = guesses[word]
        distance, length = min((edit_distance(guess, p), len(p)) for p in prons)
        distances, lengths, wrong = (
            distances + distance,
            lengths + length,
            wrong + (distance > 0),
        )
    return ErrorRates(
        100 * distances / max(lengths, 1),
        100 * wrong / max(len(references), 1),
        len(references),
    )
