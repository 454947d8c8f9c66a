"""Reports of a run: evaluations as CSV, learning curves, tables of figures."""

import csv
import io
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from . import files
from .display import Display

CSV_FILE, CURVE_FILE = "metrics.csv", "learning_curve.png"
FORECASTS_FILE, ROLLS_FILE = "forecasts.png", "rolls.png"
FILES = CSV_FILE, CURVE_FILE, FORECASTS_FILE, ROLLS_FILE
"""The files of every job's report: a run moves those of an older run away."""
COLORS = "#c1272d", "#0f6fb7", "#2e8b57"
MARGIN = 0.04  # of an axis, beyond the last point and the largest figure
TIME_UNITS = (3600, "hours"), (60, "minutes")
LEAST_UNITS = 3  # of time on an axis, so that its numbers have few digits
LABEL_POINTS = 12.0  # from one label to the next
LEAST_CHARACTERS = 2  # of a text in a table

Row = Any
"""An evaluation: a NamedTuple with the fields that `Job.row_class` explains."""


class Curves(NamedTuple):
    """What the learning curve of a job shows.

    Attributes:
        label: of the upper axis, such as "dev words, %".
        loss: of the lower axis, which shows the training loss.
        lines: labels of the upper lines by the fields of a row that they show.
        most: the largest figure on the upper axis, unless a line ends above it; larger
            ones are above the picture.
    """

    label: str
    loss: str
    lines: dict[str, str]
    most: float = math.inf


class _Line(NamedTuple):
    """A line of the learning curve: figures over time."""

    label: str
    color: str
    times: list[float]
    values: list[float]


def write_csv(folder: Path, fields: Sequence[str], rows: Sequence[Row]) -> None:
    """Write `metrics.csv`, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(map(_in_full, row) for row in rows)
    files.write(folder / CSV_FILE, text.getvalue().encode())


def _in_full(value: float) -> str:
    """Return a number of updates with all its digits, and any other with six."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def draw_curves(
    folder: Path, curves: Curves, rows: Sequence[Row], best: Row, title: str
) -> None:
    """Draw `learning_curve.png`: figures and training loss over time."""
    figure = new_figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    size, unit = _time_unit(rows[-1].seconds)
    times = [row.seconds / size for row in rows]
    lines = [
        _Line(label, color, times, [getattr(row, field) for row in rows])
        for (field, label), color in zip(curves.lines.items(), COLORS, strict=False)
    ]
    losses = [_Line("training loss", "#555555", times, [row.loss for row in rows])]
    _draw_lines(upper, lines, curves.most)
    _draw_lines(lower, losses)
    upper.axvline(best.seconds / size, color="#999999", lw=1, ls="--", zorder=0)
    upper.set(ylabel=curves.label, title=title)
    lower.set(ylabel=curves.loss, xlabel=unit, xlim=(0, _beyond(times[-1])))
    figure.get_layout_engine().execute(figure)  # gives the axes their sizes
    _label_ends(upper, lines)
    _label_ends(lower, losses)
    write_figure(folder / CURVE_FILE, figure)


def _time_unit(seconds: float) -> tuple[int, str]:
    """Return the seconds and the name of the unit for an axis of so many seconds."""
    good = [unit for unit in TIME_UNITS if seconds >= LEAST_UNITS * unit[0]]
    return good[0] if good else (1, "seconds")


def _draw_lines(axes: Any, lines: Sequence[_Line], most: float = math.inf) -> None:
    """Draw lines on an axis from 0 to `most` at most, unless one ends above it."""
    top = max(max(line.values) for line in lines)
    if all(line.values[-1] <= most for line in lines):
        top = min(top, most)
    for line in lines:
        axes.plot(
            line.times,
            line.values,
            "o-",
            color=line.color,
            lw=1.8,
            ms=3.5,
            label=line.label,
            clip_on=max(line.values) > top,  # else points on the edges are whole
            zorder=3,  # above the edges
        )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_ylim(0, _beyond(top))


def _beyond(most: float) -> float:
    """Return the end of an axis from 0 that shows figures up to `most`."""
    return (1 + MARGIN) * most if most > 0 else 1.0


def _label_ends(axes: Any, lines: Sequence[_Line]) -> None:
    """Write the last figure of each line beside its end; axes have their sizes."""
    lines = sorted(lines, key=lambda line: line.values[-1])
    ends = np.array([line.values[-1] for line in lines])
    height = 72 * axes.bbox.height / axes.figure.dpi  # in points
    places = ends * height / axes.get_ylim()[1]
    moves = _apart(places, LABEL_POINTS) - places
    for line, end, move in zip(lines, ends, moves, strict=True):
        axes.annotate(
            f"{end:.3g}",
            (line.times[-1], end),
            (6, move),
            textcoords="offset points",
            va="center",
            color=line.color,
        )


def _apart(places: np.ndarray, gap: float) -> np.ndarray:
    """Move ascending places `gap` apart and half as far from 0, if they are closer."""
    steps = gap * np.arange(len(places))
    up = np.maximum.accumulate(places - steps)
    down = np.minimum.accumulate((places - steps)[::-1])[::-1]
    return np.maximum((up + down) / 2, gap / 2) + steps


def print_table(
    display: Display,
    texts: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str,
) -> None:
    """Print figures as a table: columns of texts, then columns of numbers."""
    table = Table()
    rows = list(rows)
    for name in texts:  # which are broken where the terminal is too narrow
        table.add_column(name, overflow="fold", min_width=LEAST_CHARACTERS)
    for place, name in enumerate(numbers, len(texts)):  # whose names may be broken
        whole = max(len(text) for text in (*name.split(), *(r[place] for r in rows)))
        table.add_column(name, justify="right", overflow="fold", min_width=whole)
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it
        FigureCanvasAgg(figure).print_png(picture)
    files.write(path, picture.getvalue())
