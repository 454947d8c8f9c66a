"""Reports of a run: the learning curve as CSV, a table, a picture of forecasts."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from .. import files

CSV_FILE, PICTURE_FILE = "metrics.csv", "forecasts.png"
MOST_PANELS = 4


class Row(NamedTuple):
    """A row of `metrics.csv`: one evaluation on the rows to choose by."""

    epoch: int
    updates: int
    seconds: float
    loss: float
    mse: float
    mae: float


class Errors(NamedTuple):
    """The mean squared and the mean absolute error of standardised values."""

    mse: float
    mae: float


def write_csv(folder: Path, rows: Sequence[Row]) -> None:
    """Write `metrics.csv`, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([f"{value:.6g}" for value in row] for row in rows)
    files.write(folder / CSV_FILE, text.getvalue().encode())


def print_table(console: Console, figures: dict[str, Errors], note: str) -> None:
    """Print errors by the name of the forecast."""
    table = Table(caption=note, caption_justify="left")
    table.add_column("held-out end")
    for name in ("MSE", "MAE"):
        table.add_column(name, justify="right")
    for name, errors in figures.items():
        table.add_row(name, f"{errors.mse:.3f}", f"{errors.mae:.3f}")
    console.print(table)


def draw(
    folder: Path,
    names: Sequence[str],
    past: np.ndarray,
    truth: np.ndarray,
    forecast: np.ndarray,
) -> None:
    """Draw `forecasts.png`: a forecast of each of the first columns, with its history.

    Args:
        folder: where to write it.
        names: of the columns.
        past: the look-back, `[look_back, C]`.
        truth: what came, `[horizon, C]`.
        forecast: what was forecast, `[horizon, C]`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = min(len(names), MOST_PANELS)
    figure = Figure(figsize=(8, 1 + 1.6 * count), dpi=120, layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    before, after = np.arange(-len(past), 0), np.arange(len(truth))
    for i, axes in enumerate(panels):
        axes.plot(before, past[:, i], color="#555555", lw=1.2, label="history")
        axes.plot(after, truth[:, i], color="#999999", lw=1.2, label="what came")
        axes.plot(after, forecast[:, i], color="#c1272d", lw=1.6, label="forecast")
        axes.axvline(0, color="#bbbbbb", lw=0.8)
        axes.set_ylabel(names[i])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, ncols=3, loc="upper left")
    panels[-1].set_xlabel("rows after the forecast was made")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    files.write(folder / PICTURE_FILE, picture.getvalue())
