"""Formatting of rows, for the terminal and for the pages."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ostinato.apps.bench.peers import OURS

from . import rows
from .results import CONTENDERS, Row, cpu_of, spread

OTHERS = tuple(name for name in CONTENDERS if name not in (OURS, "torch"))


HEADS = ("row", "ours", "floor", "ours/floor", "torch", "must", "aim", *OTHERS, "")
"""The columns: times in milliseconds; for each peer, its time over ours."""

RESULTS = ("row", "ours", "torch", *OTHERS)
GOALS = ("row", "floor", "ours/floor", "torch", "must", "aim", "")
"""The columns of the page of results, and of the developers' page of goals."""

LOG_WIDTH = 160


def console() -> Console:
    """Make a console as wide as the terminal, or as the tables if there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def duration(seconds: float | None) -> str:
    """Format a duration as milliseconds with three digits."""
    if seconds is None:
        return ""
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a table, the first column aligned to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *lines))


def chosen(rows: Iterable[Row], heads: Sequence[str]) -> str:
    """Format some columns as Markdown, without those that are empty in all rows."""
    lines = [HEADS, *(cells(row) for row in rows)]
    columns = {head: list(column) for head, *column in zip(*lines, strict=True)}
    shown = [head for head in heads if any(columns[head])]
    return markdown(shown, zip(*(columns[head] for head in shown), strict=True))


def verdict(row: Row) -> str:
    """Return the goals that a row missed, or `ok`, or nothing if it has no goals."""
    goal, torch = rows.goal(row.mode, row.name), row.ratio("torch")
    missed = []
    asked = goal is not None or row.name.endswith("-compile")
    if goal is not None and torch is not None and torch < goal.must:
        missed.append("torch")
    for name in ("onnxruntime", "scan"):
        other = row.ratio(name)
        if asked and other is not None and other <= 1:
            missed.append(name)
    large = row.sizes["N"] >= rows.FLOOR_BATCH
    if asked and large and (row.over_floor or 0) > rows.FLOOR_RATIO:
        missed.append("floor")
    if row.name.endswith("-compile") and (row.median() or 0) > rows.COMPILE_SECONDS:
        missed.append("60 ms")
    return ("missed: " + ", ".join(missed)) if missed else "ok" if asked else ""


def cells(row: Row) -> tuple[str, ...]:
    """Format a row as one cell for each of HEADS."""
    goal = rows.goal(row.mode, row.name)
    low, median, high = spread(row.seconds[OURS])
    backend = row.detail[OURS]
    elsewhere = "" if backend == "cpu" else f" ({backend})"
    return (
        row.name,
        f"{duration(median)} ± {50 * (high - low) / median:.0f} %{elsewhere}",
        duration(row.floor),
        ratio(row.over_floor),
        ratio(row.ratio("torch")),
        f"{goal.must:g}" if goal else "",
        f"{goal.aim:g}" if goal and goal.aim else "",
        *(ratio(row.ratio(name)) for name in OTHERS),
        verdict(row),
    )


def line(row: Row) -> str:
    """Format a row in one line, to print as soon as it is measured."""
    text = f"{row.id} ({row.detail.get(OURS, '')}): {cells(row)[1]} ms"
    for name in CONTENDERS:
        if name != OURS and name in row.seconds:
            text += f", {name} {ratio(row.ratio(name))}x"
    if row.over_floor is not None:
        text += f", floor {1 / row.over_floor:.2f}x"
    return text


def rich_table(measured: Iterable[Row], machine: dict[str, Any]) -> Table:
    """Make a table of the rows of a run on a machine."""
    what = "milliseconds; under a peer's name, its time over ours"
    table = Table(title=f"{cpu_of(machine)}\n{what}")
    for head in HEADS:
        text = head in ("row", "")
        table.add_column(head, justify="left" if text else "right", no_wrap=text)
    for row in measured:
        table.add_row(f"{row.mode}/{row.name}", *cells(row)[1:])
    return table
