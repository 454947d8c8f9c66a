"""A run of `ostinato bench`: every problem is checked, timed, shown and saved."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from .. import files
from ..devices import all_devices
from ..wording import counted
from . import machine, page, picture, timing
from .equality import tolerance
from .peers import OURS
from .problem import Problem, make_data
from .results import Row
from .settings import Settings
from .view import View

JSON_FILE, PICTURE_FILE, PAGE_FILE = "bench.json", "bench.png", "bench.html"
LEAST_ROUNDS = 3

Guard = Callable[[Callable[[], object]], AbstractContextManager[None]]


def run(
    settings: Settings,
    out: Path,
    *,
    console: Console | None = None,
    guard: Guard = lambda keep: nullcontext(),
) -> list[Row]:
    """Measure all problems on the CPU, and save what was measured after each.

    Args:
        settings: problems, contenders and time.
        out: folder for the files.
        console: where to show progress; by default the terminal.
        guard: context manager of a function that saves, from another thread, what an
            interrupt leaves.

    Raises:
        UserError: the folder cannot be written, or JAX has no CPU backend here.
        OtherResults: our own results are wrong.
    """
    device = all_devices("cpu")[0]
    files.check_folder(out)
    files.make_folder(out, (JSON_FILE, PICTURE_FILE, PAGE_FILE))
    rows: list[Row] = []
    here = machine.describe()
    view = View(console, settings, here)
    lock = threading.Lock()

    def keep() -> None:
        with lock:
            save(out, here, [row for row in rows if row.measured])

    def interrupted() -> None:
        view.close()
        keep()
        done = sum(row.measured for row in rows)
        kept = f"; {out} has {counted(done, 'row')}" if done else ""
        view.say(f"interrupted{kept}")

    with guard(interrupted), view, jax.default_device(device):
        for problem in settings.problems:
            view.draw(rows, f"checking {problem.mode}/{problem.name}")
            _measure(problem, settings, here["threads"], rows, view)
            keep()
            view.done(rows)
        view.finish(rows)
    return rows


def _measure(
    problem: Problem, settings: Settings, threads: int, rows: list[Row], view: View
) -> None:
    """Check all contenders for one problem, then time them in a new row of `rows`."""
    found = timing.checked(problem, make_data(problem), settings.contenders, threads)
    row = Row(
        problem=problem,
        backend=found.good[OURS].detail,
        seconds={name: [] for name in found.good},
        differences=found.differences,
        allowed=tolerance(problem),
        skipped=found.skipped,
    )
    rows.append(row)
    calls = {name: contender.call for name, contender in found.good.items()}
    end = time.monotonic() + settings.seconds
    for taken in timing.turns(calls):
        for name, seconds in taken.items():
            row.seconds[name].append(seconds)
        view.draw(rows, f"timing {problem.mode}/{problem.name}")
        if row.rounds >= LEAST_ROUNDS and time.monotonic() >= end:
            return


def save(folder: Path, here: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the numbers, the picture and the page; each replaces an older one at once.

    Raises:
        UserError: a file cannot be written.
    """
    if not rows:
        return
    stored = {"machine": here, "rows": [dataclasses.asdict(row) for row in rows]}
    files.write(folder / JSON_FILE, json.dumps(stored, indent=1).encode() + b"\n")
    drawn = picture.draw(rows, here)
    files.write(folder / PICTURE_FILE, drawn)
    files.write(folder / PAGE_FILE, page.text(rows, here, drawn).encode())
