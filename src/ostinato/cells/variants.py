"""Cells that change the standard ones in one place: peepholes, independent units."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._rnn import pointwise
from .._rnn.accumulation import widen
from .._typing import Array
from .base import GatedCell, LSTMCell, broadcast, draw, lstm_gates, tag_gate


class PeepholeLSTMParams(NamedTuple):
    """Parameters `w_ih [4H, I]`, `w_hh [4H, H]`, biases `[4H]`, `p_i p_f p_o [H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    p_i: Any
    p_f: Any
    p_o: Any


@dataclasses.dataclass(frozen=True)
class PeepholeLSTM(LSTMCell[PeepholeLSTMParams]):
    """An `LSTM` in which the gates of each unit also read its own cell state.

        i, f, g, o = split(w_ih x_t + b_ih + w_hh h_{t-1} + b_hh)
        i = sigmoid(i + p_i * c_{t-1})
        f = sigmoid(f + p_f * c_{t-1} + forget_bias)
        c_t = f * c_{t-1} + i * tanh(g)
        h_t = sigmoid(o + p_o * c_t) * tanh(c_t)

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: a constant, added to the forget gate in every step.

    Parameters: `PeepholeLSTMParams`. States: `(h [B, H], c [B, H])`; output: `h`.
    Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Gers, Schraudolph and Schmidhuber (2002), JMLR 3, 115-143; the output gate reads
        the new cell state, as in that paper and in ONNX.
    """

    def param_shapes(self) -> PeepholeLSTMParams:
        """Return the shapes of the parameters."""
        rows, size = 4 * self.hidden_size, self.hidden_size
        return PeepholeLSTMParams(
            w_ih=(rows, self.input_size),
            w_hh=(rows, size),
            b_ih=(rows,),
            b_hh=(rows,),
            p_i=(size,),
            p_f=(size,),
            p_o=(size,),
        )

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        h, c = self.unpack(states, inputs_t[0].shape[0], params)
        c_prev = widen(c)
        i, f, g, o = lstm_gates(params, inputs_t, h)
        i = i + broadcast(params.p_i, c) * c_prev
        f = f + broadcast(params.p_f, c) * c_prev + self.forget_bias
        _, c_next = pointwise.lstm_cell_state((i, f, g), c_prev, tag_gate)
        o = tag_gate(jax.nn.sigmoid(o + broadcast(params.p_o, c) * c_next))
        out = (o * tag_gate(jnp.tanh(c_next))).astype(h.dtype)
        return (out, c_next.astype(c.dtype)), out


class IndRNNParams(NamedTuple):
    """Parameters `w_ih [H, I]`, `w_hh [H]` and `b_ih [H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any


@dataclasses.dataclass(frozen=True)
class IndRNN(GatedCell[IndRNNParams]):
    """A network of independent units: `h_t = act(w_ih x_t + b_ih + w_hh * h_{t-1})`.

    Args:
        input_size: I.
        hidden_size: H.
        activation: `"relu"` or `"tanh"`.

    Parameters: `IndRNNParams`; `w_hh`, a vector, begins in U(0, 1). State and output:
    `h [B, H]`. Recompute names: `gates` (the preactivation).

    Raises:
        TypeError, ValueError: as for `PeepholeLSTM`.

    Holds under every JAX transformation.

    References:
        Li et al. (2018), arXiv:1803.04831
    """

    activation: Literal["relu", "tanh"] = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.check_choice("activation", self.activation, ("relu", "tanh"))

    def param_shapes(self) -> IndRNNParams:
        """Return the shapes of the parameters."""
        size = self.hidden_size
        return IndRNNParams((size, self.input_size), (size,), (size,))

    def init(self, key: Array, dtype: Any = jnp.float32) -> IndRNNParams:
        """Draw `w_hh` from U(0, 1), others from U(-k, k), k = hidden_size ** -0.5."""
        bound = self.hidden_size**-0.5
        params = draw(key, self.param_shapes(), dtype, bound, {})
        return params._replace(w_hh=(params.w_hh / bound + 1) / 2)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        (h,) = self.unpack(states, inputs_t.shape[0], params)
        pre = tag_gate(inputs_t + broadcast(params.w_hh, h) * widen(h))
        out = jnp.tanh(pre) if self.activation == "tanh" else jax.nn.relu(pre)
        out = out.astype(h.dtype)
        return out, out
