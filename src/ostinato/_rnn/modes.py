"""The table of modes, which holds everything that depends on the mode."""

from __future__ import annotations

from typing import NamedTuple

from .cell import ModeCell
from .mode_cells import LSTM, SLSTM, GRUResetAfter, GRUResetBefore, PlainRNN


class Mode(NamedTuple):
    """A mode of the operator.

    Attributes:
        gates: names of the blocks of H rows of `w_ih`, `w_hh` and the biases, first to
            last.
        states: names of the states, which a step passes to the next one. The first is
            its output, of size `output_size`; all others have size H.
        cell: its equations on XLA, which also name the blocks that a step saves.
        cell_reset_before: the equations with `reset_after=False`; None if the mode does
            not have this variant.
        options: the fields of `RNNSpec` that need a mode which lists them here, if they
            do not have their default.
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
    "slstm": Mode(
        ("i", "f", "z", "o"), ("h", "c", "n", "m"), SLSTM, options=("proj_size",)
    ),
    "gru": Mode(
        ("r", "z", "n"),
        ("h",),
        GRUResetAfter,
        cell_reset_before=GRUResetBefore,
        options=("reset_after",),
    ),
}
"""All modes. A new one that only XLA runs takes a row here, a cell in mode_cells.py."""


def modes_with(option: str) -> list[str]:
    """Return the names of the modes that honour the field `option` of `RNNSpec`."""
    return [name for name, mode in MODES.items() if option in mode.options]
