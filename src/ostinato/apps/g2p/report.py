"""What the report of a run shows: error rates, and alignments of words."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import report
from ..display import Display
from .metrics import ErrorRates

MOST_INCHES = 40.0  # of a side of a picture; letters of longer words are smaller
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


def print_table(
    display: Display, figures: dict[tuple[str, str], ErrorRates], note: str
) -> None:
    """Print error rates by (words, decoding) as a table narrower than 80 columns."""
    rows = [
        (part, decoding, f"{rates.words:,}", f"{rates.per:.2f}", f"{rates.wer:.2f}")
        for (part, decoding), rates in figures.items()
    ]
    texts, numbers = ("held-out words", "decoding"), ("words", "PER %", "WER %")
    report.print_table(display, texts, numbers, rows, note)


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
    rows, columns = weights.shape
    size = 1.6 + 0.45 * columns, 1.2 + 0.4 * rows
    small = min(1.0, MOST_INCHES / max(size))  # than in the picture of a usual word
    figure = report.new_figure(*(min(one, MOST_INCHES) for one in size), dpi=150)
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(columns), word, fontsize=13 * small)
    axes.set_yticks(range(rows), [*phonemes, "end"], fontsize=11 * small)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= LEAST_SHOWN:
            color = "white" if weight > 0.5 else "#1a3c6e"
            axes.text(
                column,
                row,
                f"{100 * weight:.0f}",
                ha="center",
                va="center",
                color=color,
                fontsize=8 * small,
            )
    axes.set_xlabel("share of attention, %", fontsize=9, color="#555555")
    report.write_figure(path, figure)
