"""A training run, from a CSV file to a folder with a model and its errors."""

from pathlib import Path
from typing import Any

from .. import session
from ..session import Summary
from . import table
from .job import Job
from .settings import Settings


def train(path: Path, out: Path, **options: Any) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    Args:
        path: the CSV file.
        out: the folder to write; files of an older run are moved to `previous/` in it.
        options: those of `session.train`, and fields of `Settings`.

    Returns:
        The best evaluation, and the errors on the rows to test on, of standardised
        values; None for a run that was interrupted.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """

    def make(settings: Settings) -> Job:
        return Job(settings, table.read(path))

    return session.train(Job, make, out, **options)
