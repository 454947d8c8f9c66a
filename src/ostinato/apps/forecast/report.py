"""What the report of a run shows: errors, and forecasts with their history."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import report
from ..display import Display

MOST_PANELS = 4


class Row(NamedTuple):
    """A row of `metrics.csv`: one evaluation on the rows to choose by."""

    epoch: float
    updates: int
    seconds: float
    windows_per_second: float
    loss: float
    learning_rate: float
    mse: float
    mae: float


class Errors(NamedTuple):
    """The mean squared and the mean absolute error of standardised values."""

    mse: float
    mae: float


def print_table(display: Display, figures: dict[str, Errors], note: str) -> None:
    """Print errors by the name of the forecast."""
    rows = [
        (name, f"{errors.mse:.3f}", f"{errors.mae:.3f}")
        for name, errors in figures.items()
    ]
    report.print_table(display, ("held-out end",), ("MSE", "MAE"), rows, note)


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
    count = min(len(names), MOST_PANELS)
    figure = report.new_figure(8, 1 + 1.6 * count)
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    before, after = np.arange(-len(past), 0), np.arange(len(truth))
    for i, axes in enumerate(panels):
        axes.plot(before, past[:, i], color="#555555", lw=1.2, label="history")
        axes.plot(after, truth[:, i], color="#999999", lw=1.2, label="what came")
        axes.plot(after, forecast[:, i], color="#c1272d", lw=1.6, label="forecast")
        axes.axvline(0, color="#bbbbbb", lw=0.8)
        axes.set_ylabel(names[i], parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    panels[-1].set_xlabel("rows after the forecast was made")
    report.write_figure(folder / report.FORECASTS_FILE, figure)
