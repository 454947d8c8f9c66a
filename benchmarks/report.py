"""Writing of docs/results.md: `python -m benchmarks.report out/bench/results.json`."""

from pathlib import Path
from typing import Annotated

import typer

from . import pictures, results, rows, tables
from .results import Results, Row

MARK = "benchmarks"
TITLES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN, tanh"}


def main(
    file: Annotated[Path, typer.Argument(help="Written by benchmarks.run.")],
    docs: Annotated[Path, typer.Option(help="Folder of results.md.")] = Path("docs"),
) -> None:
    """Write the tables between the marks in results.md, and draw the pictures.

    Each vendor of processors has its own marks, so that the tables of others stay.
    """
    measured = results.load(file)
    vendor = results.vendor_of(measured.machine)
    drawn = pictures.draw(measured, docs / "images", vendor)
    page = docs / "results.md"
    mark = f"{MARK} {vendor}"
    page.write_text(between_marks(page.read_text(), text(measured, drawn), mark))
    for path in (page, *drawn.values()):
        typer.echo(path)


def between_marks(page: str, text: str, mark: str) -> str:
    """Return the page with `text` between the marks of that name."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def text(measured: Results, drawn: dict[str, Path]) -> str:
    """Format the section of results.md for one vendor."""
    parts = [conditions(measured)]
    for mode in rows.MODES:
        names = [problem.name for problem in rows.table(mode)]
        ids = [Row.key(mode, name, measured.threads) for name in names]
        chosen = [measured.rows[id] for id in ids if id in measured.rows]
        if chosen:
            parts.append(f"#### {TITLES[mode]}\n\n{table(chosen)}")
    if drawn:
        shown = [
            f"![{pictures.CAPTIONS[size]}](images/{path.name})"
            for size, path in drawn.items()
        ]
        parts.append("\n\n".join(["#### How cost grows", *shown]))
    return "\n\n".join(parts)


def conditions(measured: Results) -> str:
    """Describe the machine and the versions in one paragraph."""
    machine = measured.machine
    peaks = machine["peaks"][str(measured.threads)]
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    said = (
        f"Measured {machine['date']} on {results.cpu_of(machine)}, "
        f"{machine['cpus']} CPUs, "
        f"{measured.threads} threads each, Python {machine['python']}, {packages}. "
        f"Peaks behind the floor: {peaks['float32'] / 1e9:.0f} GFLOP/s in float32, "
        f"{peaks['bfloat16'] / 1e9:.0f} in bfloat16, "
        f"{peaks['dispatch'] * 1e6:.0f} µs for a jitted call that does nothing."
    )
    if shares := machine.get("kernel_shares"):
        said += " Shares of that peak that the products of the kernels reach: "
        said += ", ".join(f"{dtype} {100 * s:.0f} %" for dtype, s in shares.items())
        said += "."
    return said


def table(measured: list[Row]) -> str:
    """Format rows as a Markdown table, without columns that are empty in all rows."""
    lines = [tables.HEADS, *(tables.cells(row) for row in measured)]
    columns = [c for c in zip(*lines, strict=True) if any(c[1:])]
    heads, *shown = zip(*columns, strict=True)
    return tables.markdown(heads, shown)


if __name__ == "__main__":
    typer.run(main)
