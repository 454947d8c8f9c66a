"""A training run, from files of music to a folder with a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import session
from ..session import Summary
from . import read
from .job import Job
from .settings import Settings


def train(paths: Sequence[Path], out: Path, **options: Any) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    Args:
        paths: files of music, and folders of them; see `read.read`.
        out: the folder to write; files of an older run are moved to `previous/` in it.
        options: those of `session.train`, and fields of `Settings`.

    Returns:
        The best evaluation, and the likelihood of the pieces to test on; None for a
        run that was interrupted.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """

    def make(settings: Settings) -> Job:
        notes: list[str] = []
        pieces = read.read(paths, settings.per_beat, settings.seed, notes.append)
        return Job(settings, pieces, notes)

    return session.train(Job, make, out, **options)
