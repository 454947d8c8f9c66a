"""Cells whose recurrent matrices are diagonal: ParaGRU and ParaLSTM."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._rnn.accumulation import widen
from .._typing import Array
from .base import GatedCell, Params, broadcast, tag_gate


class _DiagonalCell(GatedCell[Params]):
    """A cell with three gates, whose units do not read each other."""

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """Return the product as for every cell, split into three gates `[..., H]`."""
        return jnp.split(super().input_product(params, inputs, first), 3, axis=-1)


class ParaGRUParams(NamedTuple):
    """Parameters `w_ih [3H, I]`, `w_hh [3, H]` and `b_ih [3H]`, in the order r z n."""

    w_ih: Any
    w_hh: Any
    b_ih: Any


@dataclasses.dataclass(frozen=True)
class ParaGRU(_DiagonalCell[ParaGRUParams]):
    """A GRU of independent units: its recurrent matrices are diagonal.

        r = sigmoid(w_ir x_t + b_ir + w_hr * h_{t-1})
        z = sigmoid(w_iz x_t + b_iz + w_hz * h_{t-1})
        n = tanh(w_in x_t + b_in + w_hn * (r * h_{t-1}))
        h_t = (1 - z) * h_{t-1} + z * n

    Args:
        input_size: I.
        hidden_size: H.

    Parameters: `ParaGRUParams`. State and output: `h [B, H]`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Danieli et al., ParaRNN (2025), arXiv:2510.21450. It is run step by step here,
        which is exact for all weights.
    """

    def param_shapes(self) -> ParaGRUParams:
        """Return the shapes of the parameters."""
        rows, size = 3 * self.hidden_size, self.hidden_size
        return ParaGRUParams((rows, self.input_size), (3, size), (rows,))

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        return self.step_seeing(params, states, states, inputs_t, t)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in products; `z` keeps `h` itself."""
        (h,) = self.unpack(states, inputs_t[0].shape[0], params)
        read = widen(seen)
        w_r, w_z, w_n = (broadcast(w, h) for w in params.w_hh)
        x_r, x_z, x_n = inputs_t
        r = tag_gate(jax.nn.sigmoid(x_r + w_r * read))
        z = tag_gate(jax.nn.sigmoid(x_z + w_z * read))
        n = tag_gate(jnp.tanh(x_n + w_n * (r * read)))
        out = ((1 - z) * widen(h) + z * n).astype(h.dtype)
        return out, out


class ParaLSTMParams(NamedTuple):
    """Parameters `w_ih [3H, I] w_hh [3, H] b_ih [3H]`, rows f g o; `p_f p_o [H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    p_f: Any
    p_o: Any


@dataclasses.dataclass(frozen=True)
class ParaLSTM(_DiagonalCell[ParaLSTMParams]):
    """An LSTM of independent units, with peepholes, whose input gate is 1 - f.

        f = sigmoid(w_if x_t + b_if + w_hf * h_{t-1} + p_f * c_{t-1})
        g = tanh(w_ig x_t + b_ig + w_hg * h_{t-1})
        c_t = f * c_{t-1} + (1 - f) * g
        o = sigmoid(w_io x_t + b_io + w_ho * h_{t-1} + p_o * c_t)
        h_t = o * tanh(c_t)

    Args:
        input_size: I.
        hidden_size: H.

    Parameters: `ParaLSTMParams`. States: `(h [B, H], c [B, H])`; output: `h`. Recompute
    names: `gates`.

    Raises:
        TypeError, ValueError: as for `ParaGRU`.

    Holds under every JAX transformation.

    References:
        Danieli et al., ParaRNN (2025), arXiv:2510.21450.
    """

    def param_shapes(self) -> ParaLSTMParams:
        """Return the shapes of the parameters."""
        rows, size = 3 * self.hidden_size, self.hidden_size
        return ParaLSTMParams(
            (rows, self.input_size), (3, size), (rows,), (size,), (size,)
        )

    @property
    def state_sizes(self) -> dict[str, int]:
        """Features of each state, by name."""
        return {"h": self.hidden_size, "c": self.hidden_size}

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        h, c = self.unpack(states, inputs_t[0].shape[0], params)
        before, cell = widen(h), widen(c)
        w_f, w_g, w_o = (broadcast(w, h) for w in params.w_hh)
        x_f, x_g, x_o = inputs_t
        f = x_f + w_f * before + broadcast(params.p_f, c) * cell
        f = tag_gate(jax.nn.sigmoid(f))
        g = tag_gate(jnp.tanh(x_g + w_g * before))
        cell = f * cell + (1 - f) * g
        o = x_o + w_o * before + broadcast(params.p_o, c) * cell
        out = tag_gate(jax.nn.sigmoid(o)) * tag_gate(jnp.tanh(cell))
        out = out.astype(h.dtype)
        return (out, cell.astype(c.dtype)), out
