"""A run in one process: every row is checked, timed, printed and saved."""

import fnmatch
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ostinato.apps.bench import timing
from ostinato.apps.bench.peers import OURS
from ostinato.apps.bench.problem import Problem, make_data

from . import floors, native, results, rows, tables
from .results import Results, Row


def select(modes: list[str], patterns: list[str], sweeps: list[str]) -> list[Problem]:
    """Return the problems that the options select.

    Raises:
        ValueError: a name is unknown, or no problem matches.
    """
    for given, known in ((modes, rows.MODES), (sweeps, rows.SWEEPS)):
        if unknown := set(given) - set(known):
            raise ValueError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    found: list[Problem] = []
    for mode in modes or rows.MODES:
        for size in sweeps:
            found += rows.sweep(mode, size)
        if not sweeps:
            found += rows.table(mode)
    if patterns:
        found = [
            problem
            for problem in found
            if any(fnmatch.fnmatchcase(problem.name, p) for p in patterns)
        ]
    if not found:
        raise ValueError(f"no row is called {' or '.join(patterns)}")
    return list(dict.fromkeys(found))


def begin(out: Path, resume: bool, guard: bool, console: Console) -> Results:
    """Load the results so far, or begin new ones.

    Raises:
        ValueError: the file has results of another machine, or the kernels reach too
            little of the peak (`guard`).
    """
    stored = Results(results.machine(), {})
    if resume and out.exists():
        before = results.load(out)
        for key in ("cpu", "family", "model", "isa", "packages"):
            if before.machine.get(key, stored.machine[key]) != stored.machine[key]:
                raise ValueError(f"{out} has results of another {key}; drop --resume")
        stored = Results(before.machine | stored.machine, before.rows)
    if guard:
        shares = native.kernel_shares()
        text = ", ".join(f"{dtype} {100 * s:.0f} %" for dtype, s in shares.items())
        console.print(f"kernels reach of the peak: {text}")
        if any(share < native.LEAST_SHARE for share in shares.values()):
            raise ValueError(
                f"that is below {100 * native.LEAST_SHARE:.0f} %: look whether the "
                "compiler keeps the sums of a tile in memory (--no-guard goes on)"
            )
        stored.machine["kernel_shares"] = shares
    return stored


def run(
    problems: list[Problem],
    names: list[str],
    rounds: int,
    threads: int,
    out: Path,
    stored: Results,
    console: Console,
) -> None:
    """Measure the problems that `stored` lacks, and save each result in `out`.

    Raises:
        OtherResults: our own results are wrong.
    """
    peaks = floors.measure(threads)
    stored.machine.setdefault("peaks", {})[str(threads)] = peaks._asdict()
    contenders = [OURS, *(names or [n for n in results.CONTENDERS if n != OURS])]
    measured = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(problems) * rounds)
        for problem in problems:
            progress.update(task, description=f"{problem.mode}/{problem.name}")
            done = stored.rows.get(Row.key(problem.mode, problem.name, threads))
            if done is None:
                done = measure(
                    problem,
                    contenders,
                    rounds,
                    peaks,
                    on_round=lambda: progress.advance(task),
                )
                stored.rows[done.id] = done
                results.save(out, stored)
                console.print(tables.line(done))
            else:
                progress.advance(task, rounds)
            measured.append(done)
    console.print(tables.rich_table(measured, stored.machine))
    console.print(f"{out}", style="dim")


def measure(
    problem: Problem,
    names: list[str],
    rounds: int,
    peaks: floors.Peaks,
    on_round: Callable[[], None] = lambda: None,
) -> Row:
    """Check the results of all contenders for one problem, then time them."""
    data = make_data(problem)
    found = timing.checked(problem, data, names, peaks.threads)
    calls = {name: contender.call for name, contender in found.good.items()}
    seconds = timing.take_turns(calls, rounds, on_round)
    return Row(
        mode=problem.mode,
        name=problem.name,
        sizes=dict(T=problem.steps, N=problem.batch, H=problem.hidden_size),
        threads=peaks.threads,
        seconds={k: [float(f"{s:.4g}") for s in v] for k, v in seconds.items()},
        skipped=found.skipped,
        detail={name: c.detail for name, c in found.good.items() if c.detail},
        floor=floors.floor(problem, data.lengths, peaks),
    )
