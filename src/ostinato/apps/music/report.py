"""What the report of a run shows: likelihoods, and piano rolls."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import report
from ..display import Display
from .rolls import LOWEST


class Row(NamedTuple):
    """A row of `metrics.csv`: one evaluation on the pieces to choose by."""

    epoch: float
    updates: int
    seconds: float
    frames_per_second: float
    loss: float
    learning_rate: float
    nll: float


class Likelihood(NamedTuple):
    """The negative log-likelihood of frames, nats: a mean over those of all pieces.

    `nll` leaves out the first frame of every piece; `nll_all` has it, too.
    """

    nll: float
    nll_all: float

    @classmethod
    def of(cls, sums: np.ndarray, pieces: int, frames: int) -> "Likelihood":
        """Return the means of sums over first frames and over others, `[2]`."""
        return cls(
            float(sums[1]) / max(frames - pieces, 1), float(sums.sum()) / max(frames, 1)
        )


def print_table(display: Display, figures: Mapping[str, Likelihood], note: str) -> None:
    """Print likelihoods by the name of the model."""
    rows = [
        (name, f"{one.nll:.3f}", f"{one.nll_all:.3f}") for name, one in figures.items()
    ]
    numbers = "NLL, nats a frame", "with first frames"
    report.print_table(display, ("pieces to test on",), numbers, rows, note)


def draw(folder: Path, rolls: Mapping[str, np.ndarray]) -> None:
    """Draw `rolls.png`: piano rolls `[T, 88]` below each other, by their titles."""
    figure = report.new_figure(9, 0.6 + 1.9 * len(rolls))
    panels = figure.subplots(len(rolls), 1, sharex=True, squeeze=False)[:, 0]
    keys = np.flatnonzero(np.concatenate(list(rolls.values())).any(0))
    low, high = (keys[0], keys[-1]) if keys.size else (0, 87)
    for axes, (title, roll) in zip(panels, rolls.items(), strict=True):
        axes.imshow(
            roll[:, low : high + 1].T,
            origin="lower",
            aspect="auto",
            interpolation="none",
            cmap="Greys",
            vmin=0,
            vmax=1,
            extent=(0, len(roll), low + LOWEST - 0.5, high + LOWEST + 0.5),
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel("MIDI note")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("frames")
    report.write_figure(folder / report.ROLLS_FILE, figure)
