"""The class `RNNSpec`: the kind of network as one frozen, hashable value."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from .. import _checks
from .._typing import BiasMode, InputMode, Mode
from .cell import ModeCell
from .modes import MODES, modes_with


@dataclasses.dataclass(frozen=True)
class RNNSpec:
    """A stacked, possibly bidirectional network, a static argument of `rnn`.

    It is hashable, so that it can be a static argument of `jax.jit` or a field of a
    module.

    Args:
        mode: `"rnn_relu"`, `"rnn_tanh"`, `"lstm"`, `"gru"` or `"slstm"`.
        input_size: features of one input step, I.
        hidden_size: units per layer and direction, H.
        num_layers: stacked layers, L.
        bidirectional: run a second, reversed direction in every layer and join
            both outputs; D = 2 instead of 1.
        proj_size: LSTM and sLSTM only; size P < H of a projection `h = w_hr @ u`, such
            as u = o tanh(c), that replaces the hidden state; 0 means no projection.
        bias: which bias vectors exist: `"double"` (`b_ih` and `b_hh`), `"input"`,
            `"recurrent"` or `"none"`. Input and recurrent differ only in a GRU with
            `reset_after=True`, where `r` scales the recurrent bias.
        dropout: probability p in [0, 1] with which an output of any layer except the
            last is zeroed if `rnn` gets a key; kept values are scaled by 1 / (1 - p).
        cell_clip: LSTM only; every `c_t` is clipped to [-cell_clip, cell_clip]. No
            gradient passes through a clipped value.
        clip_nan: with `cell_clip`, a NaN in `c_t` becomes `+cell_clip`.
        reset_after: GRU only; True applies `r` to the recurrent product (cuDNN,
            PyTorch), False to the state before the product (haiku, ONNX).
        input_mode: `"linear"`, or `"skip"` to add x itself to every gate of the
            first layer, which then has no `w_ih` (needs input_size == hidden_size).
        batch_invariant: True promises that a sequence has the same bits alone and in
            any batch, in values and in gradients of inputs and initial states. Only
            the cpu backend can keep that promise; any other one raises `BackendError`.
            It costs time in calls where sequences times steps are at most 4.
        num_heads: heads K, which divide the units of every layer and direction: each
            has hidden_size / K of them, with recurrent weights of its own for all
            gates, and no unit reads the state of another head. `w_hh` has S/K columns
            then (S = proj_size or hidden_size), and a projection, too, is one for each
            head: `w_hr` is `[P, H/K]`. Must divide hidden_size and proj_size; 1 means
            that every unit reads every state.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has an invalid value, or fields contradict each other.
    """

    mode: Mode
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0
    bias: BiasMode = "double"
    dropout: float = 0.0
    cell_clip: float | None = None
    clip_nan: bool = False
    reset_after: bool = True
    input_mode: InputMode = "linear"
    batch_invariant: bool = False
    num_heads: int = 1

    def __post_init__(self) -> None:
        _checks.check_choice("mode", self.mode, tuple(MODES))
        _checks.check_choice("bias", self.bias, get_args(BiasMode))
        _checks.check_choice("input_mode", self.input_mode, get_args(InputMode))
        for name, least in _SIZES.items():
            self._set(name, _checks.check_size(name, getattr(self, name), least))
        for name in ("bidirectional", "clip_nan", "reset_after", "batch_invariant"):
            self._set(name, _checks.check_bool(name, getattr(self, name)))
        self._set("dropout", _checks.check_real("dropout", self.dropout))
        if self.cell_clip is not None:
            self._set("cell_clip", _checks.check_real("cell_clip", self.cell_clip))
        self._check_combination()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # in a frozen dataclass

    def _check_combination(self) -> None:
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"`dropout` must lie in [0, 1], got {self.dropout}")
        self._check_option("proj_size", 0)
        if self.proj_size >= self.hidden_size:
            raise ValueError(
                f"`proj_size` must be less than hidden_size={self.hidden_size}, "
                f"got {self.proj_size}; 0 means no projection"
            )
        for name in ("hidden_size", "proj_size"):
            if getattr(self, name) % self.num_heads != 0:
                raise ValueError(
                    f"`num_heads` must divide {name}={getattr(self, name)}, got "
                    f"num_heads={self.num_heads}"
                )
        self._check_option("cell_clip", None)
        if self.cell_clip is not None and not self.cell_clip > 0:
            raise ValueError(f"`cell_clip` must be above 0, got {self.cell_clip}")
        if self.clip_nan and self.cell_clip is None:
            raise ValueError("`clip_nan=True` needs `cell_clip`, got cell_clip=None")
        self._check_option("reset_after", True)
        if self.input_mode == "skip" and self.input_size != self.hidden_size:
            raise ValueError(
                "`input_mode='skip'` needs input_size == hidden_size, got "
                f"input_size={self.input_size}, hidden_size={self.hidden_size}"
            )

    def _check_option(self, name: str, default: object) -> None:
        """Raise unless the field `name` has its default or the mode honours it."""
        value, modes = getattr(self, name), modes_with(name)
        if value != default and self.mode not in modes:
            raise ValueError(
                f"`{name}` needs mode {' or '.join(map(repr, modes))}, got "
                f"{name}={value} with mode {self.mode!r}"
            )

    @property
    def num_directions(self) -> int:
        """Number of directions D: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def num_gates(self) -> int:
        """Number of gates G, row blocks of `w_ih`: (s)LSTM 4, GRU 3, plain RNN 1."""
        return len(MODES[self.mode].gates)

    @property
    def output_size(self) -> int:
        """Features S of one direction's output: proj_size if set, else hidden_size."""
        return self.proj_size or self.hidden_size

    @property
    def num_params(self) -> int:
        """Length of the flat weight vector."""
        from . import layout

        return layout.num_params(self)

    def state_shape(self, batch: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """Return the state's shape for a batch: of `h`, or a tuple of several shapes.

        These are `(h, c)` for an LSTM and `(h, c, n, m)` for an sLSTM.
        """
        shapes = state_shapes(self, batch)
        return shapes[0] if len(shapes) == 1 else shapes


def state_names(spec: RNNSpec) -> tuple[str, ...]:
    """Return the names of the mode's states, that of the output first."""
    return MODES[spec.mode].states


def state_shapes(spec: RNNSpec, batch: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the shapes of all states: `[L*D, B, S]`, then `[L*D, B, H]`."""
    sizes = (spec.output_size, *[spec.hidden_size] * (len(state_names(spec)) - 1))
    pseudo_layers = spec.num_layers * spec.num_directions
    return tuple((pseudo_layers, batch, size) for size in sizes)


def cell_class(spec: RNNSpec) -> type[ModeCell]:
    """Return the class with the equations of the spec's mode and variant."""
    mode = MODES[spec.mode]
    if spec.reset_after or mode.cell_reset_before is None:
        return mode.cell
    return mode.cell_reset_before


def check_spec(spec: Any, name: str = "spec") -> None:
    """Raise TypeError unless `spec` is an `RNNSpec`; `name` is for errors."""
    if not isinstance(spec, RNNSpec):
        raise TypeError(f"`{name}` must be an RNNSpec, got {_checks.describe(spec)}")


_SIZES = {
    "input_size": 1,
    "hidden_size": 1,
    "num_layers": 1,
    "proj_size": 0,
    "num_heads": 1,
}
