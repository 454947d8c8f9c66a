"""The use of a trained model: pronunciations and alignments of words."""

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from . import attention, data
from .batches import letter_ids
from .checkpoint import load_model
from .ranking import Labels, rank


class Alignment(NamedTuple):
    """The attention weights of a model over the letters of one word.

    `weights` are ``[phonemes + 1, letters]``, the last row for the end; each row sums
    to 1.
    """

    word: str
    phonemes: tuple[str, ...]
    weights: np.ndarray


class Pronouncer:
    """A function from words to phonemes, by the model in a folder.

    Raises:
        UserError: the folder has no model, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._model = folder, load_model(folder)
        self._reader = self._model.config.reader(self._model.aligned)

    def __call__(self, words: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the phonemes of every word.

        Raises:
            UserError: a word cannot be pronounced; see `check`.
        """
        return [self._model.config.spell(labels) for labels in self._labels(words)]

    def align(self, words: Sequence[str]) -> list[Alignment]:
        """Return the attention weights for every phoneme of every word.

        Raises:
            UserError: the model has no attention, or a word cannot be pronounced.
        """
        config, params = self._model.config, self._model.params
        if not isinstance(config, attention.Config):
            raise UserError(
                f"the model in {self._folder} has no attention to draw, it is of kind "
                f"{config.name}; train one with: ostinato train g2p --model attention"
            )
        plain = [check(word) for word in words]
        return [
            Alignment(
                word,
                config.spell(labels),
                attention.alignment(params, config, letters, labels),
            )
            for word, letters, labels in zip(
                plain, letter_ids(plain), self._labels(plain), strict=True
            )
        ]

    def _labels(self, words: Sequence[str]) -> list[Labels]:
        found = self._reader.beam(self._model.params, [check(word) for word in words])
        return rank(found, self._model.rank_weights)


def check(word: str) -> str:
    """Return the word in lower case, without accents.

    Raises:
        UserError: the word has letters that the model does not know, no letter, or too
            many.
    """
    plain = data.plain(word)
    if len(plain) > data.MOST_LETTERS:
        raise UserError(
            f"cannot pronounce {short(word)}: it has {len(plain):,} letters, "
            f"{data.MOST_LETTERS} are allowed"
        )
    if data.is_clean(plain):
        return plain
    known = "a to z, ' and -"
    if len(plain.split()) > 1:
        raise UserError(
            f"cannot pronounce {short(word)}: it is several words; give each by itself"
        )
    if unknown := "".join(sorted(set(plain) - set(data.ALPHABET))):
        raise UserError(
            f"cannot pronounce {short(word)}: unknown {unknown!r}; use {known}"
        )
    raise UserError(f"cannot pronounce {short(word)}: it has no letter; use {known}")
