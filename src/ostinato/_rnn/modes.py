"""The table of modes: everything that depends on the mode is looked up here."""

from __future__ import annotations

from typing import NamedTuple

from .cell import ModeCell
from .mode_cells import LSTM, GRUResetAfter, GRUResetBefore, PlainRNN


class Mode(NamedTuple):
    """One mode of the operator.

    Attributes:
        gates: blocks of H rows of `w_ih`, `w_hh` and the biases, first to last.
        states: what a step hands to the next one. The first is its output, of size
            `output_size`; all others have size H.
        cell: its equations on XLA, which also say what is saved of a step.
        cell_reset_before: the same with `reset_after=False`; None: there is no such
            variant.
        options: fields of `RNNSpec` that only modes with them listed here honour.
    """

    gates: tuple[str, ...]
    states: tuple[str, ...]
    cell: type[ModeCell]
    cell_reset_before: type[ModeCell] | None = None
    options: tuple[str, ...] = ()


MODES = {
    "rnn_relu": Mode(("h",), ("h",), PlainRNN),
    "rnn_tanh": Mode(("h",), ("h",), PlainRNN),
    "lstm": Mode(
        ("i", "f", "g", "o"), ("h", "c"), LSTM, options=("proj_size", "cell_clip")
    ),
    "gru": Mode(
        ("r", "z", "n"),
        ("h",),
        GRUResetAfter,
        cell_reset_before=GRUResetBefore,
        options=("reset_after",),
    ),
}
"""Adding a mode that only XLA runs takes a row here, and a cell in mode_cells.py."""


def modes_with(option: str) -> list[str]:
    """Return the names of the modes that honour a field of `RNNSpec`."""
    return [name for name, mode in MODES.items() if option in mode.options]
