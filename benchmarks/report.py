"""Writing of the pages of results: `python -m benchmarks.report out/results.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from . import pictures, results, rows, tables
from .results import Results, Row

MARK = "benchmarks"
RESULTS = "results.md"
GOALS = "development/goals.md"
TITLES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN, tanh"}


def main(
    file: Annotated[Path, typer.Argument(help="Written by benchmarks.run.")],
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs"),
) -> None:
    """Write the tables between the marks of the pages, and draw the pictures.

    Results are for users, goals for developers. Each kind of processors has its own
    marks, so that the tables of others stay.
    """
    measured = results.load(file)
    kind = results.kind_of(measured.machine)
    drawn = pictures.draw(measured, docs / "images", kind)
    written = {
        RESULTS: text(measured, tables.RESULTS, drawn),
        GOALS: text(measured, tables.GOALS, {}),
    }
    for name, said in written.items():
        page = docs / name
        page.write_text(between_marks(page.read_text(), said, f"{MARK} {kind}"))
        typer.echo(page)
    for path in drawn.values():
        typer.echo(path)


def between_marks(page: str, text: str, mark: str) -> str:
    """Return the page with `text` between the marks of that name."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def text(measured: Results, heads: Sequence[str], drawn: dict[str, Path]) -> str:
    """Format the section of a page for one kind: tables with the columns `heads`."""
    parts = [conditions(measured, "floor" in heads)]
    for mode in rows.MODES:
        names = [problem.name for problem in rows.table(mode)]
        ids = [Row.key(mode, name, measured.threads) for name in names]
        chosen = [measured.rows[id] for id in ids if id in measured.rows]
        if chosen:
            parts.append(f"#### {TITLES[mode]}\n\n{tables.chosen(chosen, heads)}")
    if drawn:
        shown = [
            f"![{pictures.CAPTIONS[size]}](images/{path.name})"
            for size, path in drawn.items()
        ]
        parts.append("\n\n".join(["#### How cost grows", *shown]))
    return "\n\n".join(parts)


def conditions(measured: Results, floor: bool) -> str:
    """Describe the machine and the versions, or the peaks behind its floor."""
    machine = measured.machine
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    said = f"Measured {machine['date']} on {results.cpu_of(machine)}, "
    if not floor:
        return said + (
            f"{machine['cpus']} CPUs, {measured.threads} threads each, "
            f"Python {machine['python']}, {packages}."
        )
    peaks = machine["peaks"][str(measured.threads)]
    said += (
        f"{measured.threads} threads: {peaks['float32'] / 1e9:.0f} GFLOP/s in float32, "
        f"{peaks['bfloat16'] / 1e9:.0f} in bfloat16, "
        f"{peaks['dispatch'] * 1e6:.0f} µs for a jitted call that does nothing."
    )
    if shares := machine.get("kernel_shares"):
        said += " Shares of that peak that the products of the kernels reach: "
        said += ", ".join(f"{dtype} {100 * s:.0f} %" for dtype, s in shares.items())
        said += "."
    return said


if __name__ == "__main__":
    typer.run(main)
