"""Reports of a run: error rates as CSV, table and picture."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from .. import files
from .metrics import ErrorRates

CSV_FILE, PICTURE_FILE = "metrics.csv", "learning_curve.png"
LEAST_SHOWN = 0.05  # smallest attention weight that is printed as a number


class Row(NamedTuple):
    """A row of `metrics.csv`: one evaluation, in percent of the dev words, greedy."""

    epoch: float
    updates: int
    seconds: float
    words_per_second: float
    loss: float
    learning_rate: float
    dev_per: float
    dev_wer: float

    def line(self, left: str, mark: str) -> str:
        """Format the row for the user, with the time left and a mark if it is best."""
        return (
            f"epoch {self.epoch:4.1f} {self.words_per_second:6,.0f} words/s  "
            f"loss {self.loss:.3f}  dev PER {self.dev_per:5.2f}  "
            f"WER {self.dev_wer:5.2f}  {left} left {mark}"
        ).rstrip()


def write_csv(folder: Path, rows: Sequence[Row]) -> None:
    """Write `metrics.csv`, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([f"{value:.6g}" for value in row] for row in rows)
    files.write(folder / CSV_FILE, text.getvalue().encode())


def print_table(
    console: Console, figures: dict[tuple[str, str], ErrorRates], note: str
) -> None:
    """Print error rates by (words, decoding) as a table narrower than 80 columns."""
    table = Table(caption=note, caption_justify="left")
    for name in ("held-out words", "decoding"):
        table.add_column(name)
    for name in ("words", "PER %", "WER %"):
        table.add_column(name, justify="right")
    for (part, decoding), rates in figures.items():
        numbers = f"{rates.words:,}", f"{rates.per:.2f}", f"{rates.wer:.2f}"
        table.add_row(part, decoding, *numbers)
    console.print(table)


def draw(folder: Path, rows: Sequence[Row], best: Row) -> None:
    """Draw `learning_curve.png`: error rates and training loss over minutes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    rates, losses = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    minutes = [row.seconds / 60 for row in rows]
    for axes, label, color, values in (
        (rates, "WER: words with an error", "#c1272d", [r.dev_wer for r in rows]),
        (rates, "PER: wrong phonemes", "#0f6fb7", [r.dev_per for r in rows]),
        (losses, "training loss", "#555555", [r.loss for r in rows]),
    ):
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
    rates.axvline(best.seconds / 60, color="#999999", lw=1, ls="--", zorder=0)
    rates.set(ylabel="dev words, %", ylim=(0, None), title=_title(best))
    losses.set(ylabel="a word", xlabel="minutes", ylim=(0, None), xlim=(0, None))
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    files.write(folder / PICTURE_FILE, picture.getvalue())


def draw_alignment(
    path: Path, word: str, phonemes: Sequence[str], weights: np.ndarray
) -> None:
    """Draw attention weights, a row for each phoneme and a column for each letter.

    Args:
        path: the PNG file to write.
        word: the letters.
        phonemes: the pronunciation.
        weights: ``[phonemes + 1, letters]``, the last row for the end.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = weights.shape
    size = 1.6 + 0.45 * columns, 1.2 + 0.4 * rows
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(columns), word, fontsize=13)
    axes.set_yticks(range(rows), [*phonemes, "end"], fontsize=11)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= LEAST_SHOWN:
            color = "white" if weight > 0.5 else "#1a3c6e"
            text = f"{100 * weight:.0f}"
            axes.text(
                column, row, text, ha="center", va="center", color=color, fontsize=8
            )
    axes.set_xlabel("share of attention, %", fontsize=9, color="#555555")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    files.write(path, picture.getvalue())


def _title(best: Row) -> str:
    return (
        f"Learning to pronounce: best at epoch {best.epoch:.1f}, "
        f"PER {best.dev_per:.2f} %, WER {best.dev_wer:.2f} %"
    )
