"""Reports of a run: evaluations as CSV, learning curves, tables of figures."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from . import files
from .display import Display

CSV_FILE, CURVE_FILE = "metrics.csv", "learning_curve.png"
COLORS = "#c1272d", "#0f6fb7", "#2e8b57"

Row = Any
"""An evaluation: a NamedTuple with the fields that `Job.row_class` explains."""


class Curves(NamedTuple):
    """What the learning curve of a job shows.

    Attributes:
        label: of the upper axis, such as "dev words, %".
        loss: of the lower axis, which shows the training loss.
        lines: labels of the upper lines by the fields of a row that they show.
        most: the largest figure on the upper axis; larger ones are above the picture.
    """

    label: str
    loss: str
    lines: dict[str, str]
    most: float = math.inf


def write_csv(folder: Path, fields: Sequence[str], rows: Sequence[Row]) -> None:
    """Write `metrics.csv`, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([f"{value:.6g}" for value in row] for row in rows)
    files.write(folder / CSV_FILE, text.getvalue().encode())


def draw_curves(
    folder: Path, curves: Curves, rows: Sequence[Row], best: Row, title: str
) -> None:
    """Draw `learning_curve.png`: figures and training loss over minutes."""
    figure = new_figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    minutes = [row.seconds / 60 for row in rows]
    lines = [
        (upper, label, color, [getattr(row, field) for row in rows])
        for (field, label), color in zip(curves.lines.items(), COLORS, strict=False)
    ]
    losses = lower, "training loss", "#555555", [row.loss for row in rows]
    for axes, label, color, values in (*lines, losses):
        axes.plot(minutes, values, "o-", color=color, lw=1.8, ms=3.5, label=label)
        axes.annotate(
            f"{values[-1]:.3g}",
            (minutes[-1], values[-1]),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    upper.axvline(best.seconds / 60, color="#999999", lw=1, ls="--", zorder=0)
    top = min(upper.get_ylim()[1], curves.most)
    upper.set(ylabel=curves.label, ylim=(0, top), title=title)
    lower.set(ylabel=curves.loss, xlabel="minutes", ylim=(0, None), xlim=(0, None))
    write_figure(folder / CURVE_FILE, figure)


def print_table(
    display: Display,
    texts: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str,
) -> None:
    """Print figures as a table: columns of texts, then columns of numbers."""
    table = Table()
    for name in texts:  # which are broken where the terminal is too narrow
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    display.show(table)
    display.say(note)


def new_figure(width: float, height: float, dpi: int = 120) -> Any:
    """Return an empty figure of matplotlib, in inches, that needs no screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def write_figure(path: Path, figure: Any) -> None:
    """Write a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    files.write(path, picture.getvalue())
