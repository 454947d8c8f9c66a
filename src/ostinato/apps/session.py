"""A run from its settings to its figures: new or resumed, interrupted or finished."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from . import files, header
from .devices import Devices, ProcessLostError
from .display import Display, clock
from .job import Job
from .report import Row
from .run import Run
from .settings import resumed

Guard = Callable[[Callable[[], object]], AbstractContextManager[None]]


class Summary(NamedTuple):
    """The result of a run: the best evaluation, and the figures on held-out data.

    `figures` is what `Job.final` returns, and None for a run that was interrupted.
    """

    best: Row | None
    figures: Any


def train(
    job: type[Job],
    make: Callable[[Any], Job],
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
        job: the class of the job.
        make: makes the job from its settings.
        out: the folder to write; files of an older run are moved to `previous/` in it.
        minutes: duration, including compilation and evaluations, but not the last
            measuring of the best weights; without either limit, that of the job's
            settings.
        epochs: passes over the data; the run ends at the earlier limit.
        resume: continue the run in `out`, with its settings.
        console: where to report.
        guard: see `conduct`.
        devices: see `Devices`.
        given: other fields of the job's settings; None or missing ones have defaults.

    Raises:
        UserError: a problem that the user can fix; the files in `out` are kept.
    """
    started = time.monotonic()
    if resume:
        _, old = header.read(out, job.files, job.settings_class, job.row_class)
        settings = resumed(old, minutes, epochs, given)
    else:
        settings = job.settings_class.choose(minutes, epochs, **given)
    return conduct(
        lambda: make(settings),
        out,
        resume=resume,
        started=started,
        console=console,
        guard=guard,
        devices=devices,
    )


def conduct(
    make: Callable[[], Job],
    out: Path,
    *,
    resume: bool,
    started: float | None = None,
    console: Console | None = None,
    guard: Guard = nullcontext,
    devices: int | None = None,
) -> Summary:
    """Train until the time or the epochs are over, then measure the best weights.

    KeyboardInterrupt ends a run early: the best weights and everything that `resume`
    needs are saved.

    Args:
        make: makes the job.
        out: the folder to write; files of an older run are moved to `previous/` in it.
        resume: continue the run in `out`.
        started: the start of the run's clock, from `time.monotonic`; None is now.
        console: where to report.
        guard: called with a function that stops the run and saves it, from any thread;
            returns the context in which the run takes place.
        devices: see `Devices`; `connect` must have been called before.

    Raises:
        ProcessLostError: another process has ended; what was learned is saved.
        UserError: a problem that the user can fix; the files in `out` are kept.
    """
    started = time.monotonic() if started is None else started
    places, run = Devices(devices), None
    display = Display(console if places.first else Console(quiet=True))

    def keep() -> None:
        # A terminal that nobody reads any more may block whoever writes to it.
        halted = run is not None and run.halt()
        display.close()
        if run is None or not halted:
            new = "new " if resume else ""
            display.say(f"interrupted before anything {new}was learned")
        else:
            _interrupted(run)

    if places.first:
        files.check_folder(out)
    with guard(keep), display, ExitStack() as ours:
        run = Run(make(), out, display, started, places)
        if places.first:
            files.make_folder(out)
            ours.enter_context(files.reserved(out))
            files.make_folder(out, run.file_names)
            if not resume and any((out / name).exists() for name in run.file_names):
                files.make_folder(out / files.PREVIOUS)  # an error comes now, not later
                files.check_folder(out / files.PREVIOUS)
        if resume:
            run.restore()
        for line in run.job.introduce():
            display.say(line)
        if resume:
            spent = clock(run.elapsed)
            display.say(f"resuming at epoch {run.epoch:.1f}, after {spent}")
            for name in run.used_up:
                used = run.settings.limit(name)
                display.say(
                    f"this run has used its {used}, counted from its first start; to "
                    f"learn more, give a larger --{name}"
                )
        try:
            run.check_same()
            run.train()
            display.say("learning is over; measuring the kept weights on held-out data")
            display.tick(1.0, "measuring")
            figures = run.job.final(run.best_params, places)
            if places.first:
                run.job.report(run, run.best_params, figures)
            return Summary(run.best, figures)
        except jax.errors.JaxRuntimeError as error:
            if places.processes == 1:
                raise
            raise _lost(run, error) from None
        except KeyboardInterrupt:
            keep()
            return Summary(run.best, None)


def _lost(run: Run, error: Exception) -> ProcessLostError:
    """Save a run whose other processes cannot be reached; return the error to raise."""
    run.display.close()
    reason = " ".join(str(error).split())[:120]
    if not run.halt():
        saved = "nothing was learned yet"
    elif run.devices.first:
        saved = f"what was learned until epoch {run.epoch:.1f} is in {run.out}"
    else:
        saved = f"process 0 saves what was learned, if it is there, in {run.out}"
    if "Gloo context initialization" in reason:  # no connection was made
        saved += "; the name of each host must have an address that the others reach"
    return ProcessLostError(
        f"another process of this run has ended or cannot be reached ({reason}); "
        f"{saved}; go on with --resume, on any number of processes"
    )


def _interrupted(run: Run) -> None:
    """Report what an interrupted run has saved."""
    if run.best is None:
        what = f"the weights so far, of epoch {run.epoch:.1f}, not measured yet"
    else:
        what = (
            f"the weights kept so far, of epoch {run.best.epoch:.1f} "
            f"({run.job.describe(run.best)})"
        )
    run.display.say(f"interrupted: {what}, are in {run.out}; go on with --resume")
    if run.best is not None:
        run.draw()
