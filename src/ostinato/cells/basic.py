"""The standard cells, which run on the fused operator if it computes the same.

Their parameters are `ostinato.LayerWeights`, so `pack_weights` and `unpack_weights`
convert between a cell's parameters and the flat vector of `ostinato.rnn`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import RecurrentOutput, SequenceOptions, overrides_step
from .._rnn import pointwise
from .._rnn.accumulation import widen
from .._rnn.cell import LayerWeights
from .._rnn.layout import param_shapes
from .._rnn.spec import RNNSpec
from .._typing import Array
from . import fused
from .base import (
    GatedCell,
    LSTMCell,
    add,
    check_inputs,
    lstm_gates,
    lstm_unit,
    product,
    set_field,
    tag_gate,
)


class _FusedCell(GatedCell[LayerWeights]):
    """A cell that the fused operator can run, described by `spec`."""

    @property
    def spec(self) -> RNNSpec:
        """The same network as one layer of `ostinato.rnn`."""
        raise NotImplementedError

    def param_shapes(self) -> LayerWeights:
        """Return the shapes of `w_ih w_hh b_ih b_hh w_hr`."""
        return param_shapes(self.spec)[0]

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run all steps in one call of `ostinato.rnn`, if it can; see `explain`."""
        if overrides_step(self) or not fused.supports(options):
            return None
        params = self.prepare(params)
        check_inputs(inputs, self.input_size, params=params.w_ih)
        self.unpack(initial_states, options.batch, params)
        return fused.run(self, params, inputs, initial_states, options)


@dataclasses.dataclass(frozen=True)
class RNN(_FusedCell):
    """Elman's network: `h_t = act(w_ih x_t + b_ih + w_hh h_{t-1} + b_hh)`.

    Args:
        input_size: I.
        hidden_size: H.
        activation: `"tanh"` or `"relu"`.

    Parameters: `LayerWeights(w_ih [H, I], w_hh [H, H], b_ih [H], b_hh [H], None)`.
    State and output: `h [B, H]`. Recompute names: `gates` (the preactivation).

    Raises:
        TypeError, ValueError: a size or the activation is wrong, or in use the dtype or
            shape of an argument; the message names it.

    Holds under every JAX transformation.

    References:
        Elman, Finding Structure in Time (1990), doi:10.1207/s15516709cog1402_1
    """

    activation: Literal["tanh", "relu"] = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.check_choice("activation", self.activation, ("tanh", "relu"))

    @property
    def spec(self) -> RNNSpec:
        """The same network as one layer of `ostinato.rnn`."""
        mode = "rnn_tanh" if self.activation == "tanh" else "rnn_relu"
        return RNNSpec(mode, self.input_size, self.hidden_size)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        (h,) = self.unpack(states, inputs_t.shape[0], params)
        pre = tag_gate(inputs_t + add(product(h, params.w_hh), params.b_hh))
        out = jnp.tanh(pre) if self.activation == "tanh" else jax.nn.relu(pre)
        out = out.astype(h.dtype)
        return out, out


@dataclasses.dataclass(frozen=True)
class LSTM(LSTMCell[LayerWeights], _FusedCell):
    """Long short-term memory.

        i, f, g, o = split(w_ih x_t + b_ih + w_hh h_{t-1} + b_hh)
        c_t = sigmoid(f + forget_bias) * c_{t-1} + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(c_t)

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: a constant, added to the forget gate in every step.

    Parameters: `LayerWeights(w_ih [4H, I], w_hh [4H, H], b_ih [4H], b_hh [4H], None)`.
    States: `(h [B, H], c [B, H])`; output: `h`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: as for `RNN`.

    Holds under every JAX transformation.

    References:
        Hochreiter and Schmidhuber (1997), doi:10.1162/neco.1997.9.8.1735; forget gate:
        Gers et al. (2000), doi:10.1162/089976600300015015; `forget_bias`: Caffe2.
    """

    @property
    def spec(self) -> RNNSpec:
        """The same network as one layer of `ostinato.rnn`."""
        return RNNSpec("lstm", self.input_size, self.hidden_size)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        h, c = self.unpack(states, inputs_t[0].shape[0], params)
        h, c = lstm_unit(lstm_gates(params, inputs_t, h), c, self.forget_bias)
        return (h, c), h


@dataclasses.dataclass(frozen=True)
class LSTMP(LSTMCell[LayerWeights], _FusedCell):
    """An `LSTM` whose hidden state is projected: `h_t = w_hr (o * tanh(c_t))`.

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: as for `LSTM`.
        proj_size: P < H.

    Parameters: `LayerWeights(w_ih [4H, I], w_hh [4H, P], b_ih [4H], b_hh [4H],
    w_hr [P, H])`. States: `(h [B, P], c [B, H])`; output: `h`. Recompute names:
    `gates`.

    Raises:
        TypeError, ValueError: as for `RNN`; `proj_size` is not below `hidden_size`.

    Holds under every JAX transformation.

    References:
        Sak et al. (2014), arXiv:1402.1128
    """

    proj_size: int = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "proj_size", _checks.check_size("proj_size", self.proj_size))
        self.spec  # noqa: B018  (checks the sizes against each other)

    @property
    def output_size(self) -> int:
        """Features P of one step's output."""
        return self.proj_size

    @property
    def spec(self) -> RNNSpec:
        """The same network as one layer of `ostinato.rnn`."""
        return RNNSpec(
            "lstm", self.input_size, self.hidden_size, proj_size=self.proj_size
        )

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        h, c = self.unpack(states, inputs_t[0].shape[0], params)
        u, c = lstm_unit(lstm_gates(params, inputs_t, h), c, self.forget_bias)
        h = product(u, params.w_hr).astype(u.dtype)
        return (h, c), h


@dataclasses.dataclass(frozen=True)
class GRU(_FusedCell):
    """Gated recurrent unit, in either of its two variants.

        r = sigmoid(w_ir x_t + b_ir + w_hr h_{t-1} + b_hr)
        z = sigmoid(w_iz x_t + b_iz + w_hz h_{t-1} + b_hz)
        n = tanh(w_in x_t + b_in + r * (w_hn h_{t-1} + b_hn))       reset_after
        n = tanh(w_in x_t + b_in + w_hn (r * h_{t-1}) + b_hn)       otherwise
        h_t = (1 - z) * n + z * h_{t-1}

    Args:
        input_size: I.
        hidden_size: H.
        reset_after: True applies `r` after the product (cuDNN, PyTorch), False before
            it (the paper, Caffe2's and ONNX's default).

    Parameters: `LayerWeights(w_ih [3H, I], w_hh [3H, H], b_ih [3H], b_hh [3H], None)`.
    State and output: `h [B, H]`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: as for `RNN`.

    Holds under every JAX transformation.

    References:
        Cho et al. (2014), arXiv:1406.1078
    """

    reset_after: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.check_bool("reset_after", self.reset_after)

    @property
    def spec(self) -> RNNSpec:
        """The same network as one layer of `ostinato.rnn`."""
        return RNNSpec(
            "gru", self.input_size, self.hidden_size, reset_after=self.reset_after
        )

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        return self.step_seeing(params, states, states, inputs_t, t)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Array, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in products; `z` keeps `h` itself."""
        (h,) = self.unpack(states, inputs_t.shape[0], params)
        out = gru_unit(params, h, seen, inputs_t, self.reset_after).astype(h.dtype)
        return out, out


def gru_unit(
    params: Any,
    h: Array,
    seen: Array,
    gx: Array,
    reset_after: bool,
    norm_rz: Any = lambda a: a,
    norm_n: Any = lambda a: a,
) -> Array:
    """Return `h_t` in the accumulation dtype.

    Products read `seen` in place of `h`. The norms act on the preactivations of the
    gates `r z` and of the candidate `n`.
    """
    split = 2 * h.shape[-1]
    rows = params.w_hh if reset_after else params.w_hh[:split]
    gh = add(product(seen, rows), params.b_hh[: len(rows)])
    rz = tag_gate(jax.nn.sigmoid(norm_rz(gx[..., :split] + gh[..., :split])))
    r, z = jnp.split(rz, 2, axis=-1)
    if reset_after:
        h_candidate = tag_gate(gh[..., split:])
        n_pre = gx[..., split:] + r * h_candidate
    else:
        rh = (r * widen(seen)).astype(h.dtype)
        h_candidate = add(product(rh, params.w_hh[split:]), params.b_hh[split:])
        n_pre = gx[..., split:] + h_candidate
    n = tag_gate(jnp.tanh(norm_n(n_pre)))
    return pointwise.gru_output(z, n, widen(h))
