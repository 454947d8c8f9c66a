"""A trained model at work."""

from collections.abc import Sequence
from pathlib import Path

from . import data, decode
from .checkpoint import load_model
from .errors import G2PError
from .model import Scorer
from .ngram import NGram


class Pronouncer:
    """Says words with the model in a folder.

    Raises:
        G2PError: the folder has no model, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        model = load_model(folder)
        self._params, self._config = model.params, model.config
        self._scorer = Scorer(model.config)
        self._ngram = NGram(model.pronunciations, model.config.num_labels)
        self._weight = model.ngram_weight

    def __call__(self, words: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the phonemes of every word.

        Raises:
            G2PError: a word has letters that the model does not know.
        """
        plain = [check(word) for word in words]
        found = [decode.beam(word) for word in self._scorer(self._params, plain)]
        best = decode.rank(found, self._ngram, self._weight)
        return [self._config.spell(labels) for labels in best]


def check(word: str) -> str:
    """Return the word in lower case.

    Raises:
        G2PError: it has letters that the model does not know, or none at all.
    """
    plain = word.strip().lower()
    if data.is_clean(plain):
        return plain
    known = "a to z, ' and -"
    if unknown := "".join(sorted(set(plain) - set(data.ALPHABET))):
        raise G2PError(f"cannot pronounce {word!r}: unknown {unknown!r}; use {known}")
    raise G2PError(f"cannot pronounce {word!r}: it has no letter; use {known}")
