"""Words of different lengths in batches of a few static shapes."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ostinato.data import buckets
from ostinato.ragged import RaggedArray, ShardedRagged, round_capacity

from ..errors import UserError
from .data import ALPHABET, Dictionary

LENGTH_STEP = 8  # words longer than every bound are padded to a multiple of this
ROWS = 256  # most words that are read in one batch
LETTER_IDS = {letter: i for i, letter in enumerate(ALPHABET, 1)}  # 0 is padding


class Batch(NamedTuple):
    """Padded int32 arrays; words of length 0 fill the last batch of a bucket."""

    letters: np.ndarray  # [B, T]
    seq_lengths: np.ndarray  # [B]
    phonemes: np.ndarray  # [B, U]
    phoneme_lengths: np.ndarray  # [B]


class RaggedBatch(NamedTuple):
    """The words of a `Batch` one after another, without padding."""

    letters: RaggedArray | ShardedRagged
    phonemes: RaggedArray | ShardedRagged

    @classmethod
    def of(cls, batch: Batch) -> "RaggedBatch":
        """Make a ragged batch of the words of `batch`, in order, length 0 included."""
        return cls(
            _concatenate("letters", batch.letters, batch.seq_lengths),
            _concatenate("phonemes", batch.phonemes, batch.phoneme_lengths),
        )


def _concatenate(dim: str, padded: np.ndarray, lengths: np.ndarray) -> RaggedArray:
    """Concatenate padded sequences in a rounded capacity.

    Every capacity is compiled separately, so few are wanted: sequences of length 0 are
    counted at the mean length of the others, so that the last batch of an epoch, which
    has some, gets the same capacity as full batches.
    """
    rows = padded[np.arange(padded.shape[1]) < lengths[:, None]]
    share = np.count_nonzero(lengths) / len(lengths)
    capacity = round_capacity(math.ceil(len(rows) / max(share, 1e-9)), per_octave=2)
    rows = np.pad(rows, (0, capacity - len(rows)))
    return RaggedArray(rows, lengths, dim=dim, max_length=padded.shape[1])


def pad(sequences: Sequence[Sequence[int]], length: int, count: int) -> tuple:
    """Pad lists of ids to ``[count, length]`` and return their lengths ``[count]``."""
    padded = np.zeros((count, length), np.int32)
    lengths = np.zeros(count, np.int32)
    for i, ids in enumerate(sequences):
        padded[i, : len(ids)] = ids
        lengths[i] = len(ids)
    return padded, lengths


def letter_ids(words: Sequence[str]) -> list[list[int]]:
    """Turn clean words into letter ids, which start at 1."""
    return [[LETTER_IDS[letter] for letter in word] for word in words]


def word_batches(
    words: Sequence[str], bounds: Sequence[int] = ()
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield words of any length in batches of few shapes, for decoding.

    Args:
        words: clean words.
        bounds: lengths to pad to; longer words are padded to a multiple of
            `LENGTH_STEP`.

    Yields:
        Indices into `words`, letters ``[B, T]`` and lengths ``[B]``; entries beyond
        the indices have length 0.
    """
    by_length: dict[int, list[int]] = {}
    for i, word in enumerate(words):
        multiple = -(-len(word) // LENGTH_STEP) * LENGTH_STEP
        fitting = [bound for bound in bounds if len(word) <= bound]
        by_length.setdefault(min(fitting, default=multiple), []).append(i)
    count = min(len(words), ROWS)
    for length, places in sorted(by_length.items()):
        for start in range(0, len(places), ROWS):
            rows = places[start : start + ROWS]
            yield rows, *pad(letter_ids([words[i] for i in rows]), length, count)


class TrainingSet:
    """Pairs of a word and one of its pronunciations, in buckets of similar size.

    Args:
        dictionary: the words and their pronunciations.
        phonemes: the phonemes that labels 1, 2, ... stand for.
        size: a function of a word and its labels that returns the size to group by,
            or None to leave the pair out.
        batch_size: pairs in a batch.
        num_buckets: number of different batch shapes.
        seed: decides the order of every epoch, with its number.

    Attributes:
        words: the word of every pair.
        targets: the labels of every pair.
        shapes: the padded numbers of letters and phonemes of every bucket.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        phonemes: Sequence[str],
        *,
        size: Callable[[str, Sequence[int]], int | None],
        batch_size: int,
        num_buckets: int,
        seed: int,
    ) -> None:
        ids = {phoneme: i for i, phoneme in enumerate(phonemes, 1)}
        pairs, sizes = [], []
        for word, pronunciations in dictionary.items():
            for pronunciation in pronunciations:
                target = [ids[p] for p in pronunciation]
                if (pair_size := size(word, target)) is not None:
                    pairs.append((word, target))
                    sizes.append(pair_size)
        if not pairs:
            raise UserError(
                "the dictionary has no word to learn from: each pronunciation is too "
                "long for the letters of its word"
            )
        self.batch_size = batch_size
        self.words = [word for word, _ in pairs]
        self.targets = [target for _, target in pairs]
        self._batches = buckets(
            sizes, batch_size=batch_size, bounds=num_buckets, seed=seed
        )
        self._pairs = Batch(
            *pad(letter_ids(self.words), max(map(len, self.words)), len(pairs)),
            *pad(self.targets, max(map(len, self.targets)), len(pairs)),
        )
        self._bucket_of = np.searchsorted(self._batches.bounds, sizes)
        self.shapes = [
            (
                int(self._pairs.seq_lengths[of].max()),
                int(self._pairs.phoneme_lengths[of].max()),
            )
            for of in (self._bucket_of == b for b in range(len(self._batches.bounds)))
        ]

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return len(self._batches)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield every pair once, in an order drawn from the seed and `epoch` only."""
        for rows in self._batches.epoch(epoch):
            letters, phonemes = self.shapes[self._bucket_of[rows[0]]]
            pairs = Batch(*(self._take(array, rows) for array in self._pairs))
            yield pairs._replace(
                letters=pairs.letters[:, :letters],
                phonemes=pairs.phonemes[:, :phonemes],
            )

    def _take(self, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        taken = array[rows]
        missing = self.batch_size - len(rows)
        return np.pad(taken, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
