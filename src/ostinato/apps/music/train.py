"""A training run, from files of music to a folder with a model."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import session
from ..session import Guard, Summary
from . import read
from .job import Job
from .settings import choose


def train(
    paths: Sequence[Path],
    out: Path,
    *,
    minutes: float | None = None,
    epochs: int | None = None,
    resume: bool = False,
    console: Console | None = None,
    guard: Guard = nullcontext,
    devices: int | None = None,
    **given: Any,
) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    Args:
        paths: files of music, and folders of them; see `read.read`.
        out: the folder to write; files of an older run are moved to `previous/` in it.
        minutes: duration, including compilation; 5 without either limit.
        epochs: passes over the pieces; the run ends at the earlier limit.
        resume: continue the run in `out`, with its settings.
        console: where to report.
        guard: see `session.conduct`.
        devices: see `Devices`.
        given: other fields of `Settings`; None or missing ones have defaults.

    Returns:
        The best evaluation, and the likelihood of the pieces to test on; None for a
        run that was interrupted.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """
    started = time.monotonic()
    settings = session.settings_of(
        Job, out, choose, resume=resume, minutes=minutes, epochs=epochs, given=given
    )

    def make() -> Job:
        return Job(settings, read.read(paths, settings.per_beat, settings.seed))

    return session.conduct(
        make,
        out,
        resume=resume,
        started=started,
        console=console,
        guard=guard,
        devices=devices,
    )
