"""Comparison of two results: `python -m benchmarks.compare before.json after.json`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ostinato.apps.bench.peers import OURS

from . import results, tables
from .results import Row

NOISE = 0.02  # two processes that run the same code may differ by this much


def main(
    before: Annotated[Path, typer.Argument(help="Written by benchmarks.run.")],
    after: Annotated[Path, typer.Argument(help="The same rows, measured again.")],
) -> None:
    """Print which of our rows became faster or slower by more than the spread."""
    loaded = [results.load(path) for path in (before, after)]
    old, new = (result.rows for result in loaded)
    common = [id for id in old if id in new]
    if not common:
        raise typer.BadParameter("the two files have no row in common")
    cpus = [results.cpu_of(result.machine) for result in loaded]
    on = " and ".join(dict.fromkeys(cpus))
    what = "milliseconds of ours; torch is its time over ours, each run"
    table = Table(title=f"{on}\n{what}")
    heads = ("row", "before", "after", "ratio", "torch before", "torch after", "")
    for head in heads:
        text = head in ("row", "")
        table.add_column(head, justify="left" if text else "right", no_wrap=text)
    for id in common:
        a, b = old[id], new[id]
        table.add_row(
            id,
            tables.duration(a.median()),
            tables.duration(b.median()),
            f"{change(a, b):.2f}",
            tables.ratio(a.ratio("torch")),
            tables.ratio(b.ratio("torch")),
            verdict(a, b),
        )
    tables.console().print(table)


def change(before: Row, after: Row) -> float:
    """Return our time after over our time before."""
    medians = [results.spread(row.seconds[OURS]).median for row in (before, after)]
    return medians[1] / medians[0]


def verdict(before: Row, after: Row) -> str:
    """Return `faster`, `slower`, or `same` if the quartile ranges overlap."""
    if abs(change(before, after) - 1) < NOISE:
        return "same"
    old, new = (results.spread(row.seconds[OURS]) for row in (before, after))
    if new.high < old.low:
        return "faster"
    return "slower" if new.low > old.high else "same"


if __name__ == "__main__":
    typer.run(main)
