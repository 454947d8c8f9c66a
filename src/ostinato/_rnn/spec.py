"""RNNSpec: what kind of network, as one frozen, hashable value."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from .. import _checks
from .._typing import BiasMode, InputMode, Mode


@dataclasses.dataclass(frozen=True)
class RNNSpec:
    """A stacked, possibly bidirectional recurrent network; the one static argument.

    Hashable, so it can be a static argument of `jax.jit` or a field of a module.

    Args:
        mode: `"rnn_relu"`, `"rnn_tanh"`, `"lstm"` or `"gru"`.
        input_size: features of one input step, I.
        hidden_size: units per layer and direction, H.
        num_layers: stacked layers, L.
        bidirectional: run a second, reversed direction in every layer and join
            both outputs; D = 2 instead of 1.
        proj_size: LSTM only; size P < H of a projection `h = w_hr @ (o tanh(c))`
            that replaces the hidden state, 0 for none.
        bias: which bias vectors exist: `"double"` (`b_ih` and `b_hh`), `"input"`,
            `"recurrent"` or `"none"`. Input and recurrent differ only in a GRU with
            `reset_after=True`, where `r` scales the recurrent bias.
        dropout: probability in [0, 1] with which an output of a layer but the last
            is zeroed when a key is given; kept values are scaled by 1 / (1 - p).
        cell_clip: LSTM only; every `c_t` is clipped to [-cell_clip, cell_clip]. No
            gradient passes where it is clipped.
        clip_nan: with `cell_clip`, a NaN in `c_t` becomes `+cell_clip`.
        reset_after: GRU only; True applies `r` to the recurrent product (cuDNN,
            PyTorch), False to the state before the product (haiku, ONNX).
        input_mode: `"linear"`, or `"skip"` to add x itself to every gate of the
            first layer, which then has no `w_ih` (needs input_size == hidden_size).
        batch_invariant: True promises that a sequence has the same bits alone and in
            any batch, in values and in gradients of inputs and initial states. Only
            the cpu backend can keep that promise; elsewhere a call raises
            `BackendError`. It costs time in calls of at most 4 sequences times steps.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field's value, or a combination, cannot be.
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

    def __post_init__(self) -> None:
        _checks.check_choice("mode", self.mode, get_args(Mode))
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
        object.__setattr__(self, name, value)  # frozen: normalised once, here

    def _check_combination(self) -> None:
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"`dropout` must lie in [0, 1], got {self.dropout}")
        if self.proj_size and self.mode != "lstm":
            raise ValueError(
                f"`proj_size` needs mode 'lstm', got proj_size={self.proj_size} "
                f"with mode {self.mode!r}"
            )
        if self.proj_size >= self.hidden_size:
            raise ValueError(
                f"`proj_size` must be less than hidden_size={self.hidden_size}, "
                f"got {self.proj_size}; 0 means no projection"
            )
        if self.cell_clip is not None and self.mode != "lstm":
            raise ValueError(
                f"`cell_clip` needs mode 'lstm', got cell_clip={self.cell_clip} "
                f"with mode {self.mode!r}"
            )
        if self.cell_clip is not None and not self.cell_clip > 0:
            raise ValueError(f"`cell_clip` must be above 0, got {self.cell_clip}")
        if self.clip_nan and self.cell_clip is None:
            raise ValueError("`clip_nan=True` needs `cell_clip`, got cell_clip=None")
        if not self.reset_after and self.mode != "gru":
            raise ValueError(
                f"`reset_after=False` needs mode 'gru', got mode {self.mode!r}"
            )
        if self.input_mode == "skip" and self.input_size != self.hidden_size:
            raise ValueError(
                "`input_mode='skip'` needs input_size == hidden_size, got "
                f"input_size={self.input_size}, hidden_size={self.hidden_size}"
            )

    @property
    def num_directions(self) -> int:
        """D: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def num_gates(self) -> int:
        """G: row blocks of `w_ih` and `w_hh`: LSTM 4, GRU 3, plain RNN 1."""
        from . import layout

        return len(layout.GATES[self.mode])

    @property
    def output_size(self) -> int:
        """Features of one direction's output: proj_size if set, else hidden_size."""
        return self.proj_size or self.hidden_size

    @property
    def num_params(self) -> int:
        """Length of the flat weight vector."""
        from . import layout

        return layout.num_params(self)

    def state_shape(self, batch: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """Shape of the state for `batch` rows: of `h`, or of `(h, c)` for an LSTM."""
        pseudo_layers = self.num_layers * self.num_directions
        h = (pseudo_layers, batch, self.output_size)
        if self.mode != "lstm":
            return h
        return h, (pseudo_layers, batch, self.hidden_size)


def check_spec(spec: Any) -> None:
    """TypeError unless `spec` is an `RNNSpec`."""
    if not isinstance(spec, RNNSpec):
        raise TypeError(f"`spec` must be an RNNSpec, got {_checks.describe(spec)}")


_SIZES = {"input_size": 1, "hidden_size": 1, "num_layers": 1, "proj_size": 0}
