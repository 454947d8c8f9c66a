"""Networks as step functions, written for `lax.scan`, and as the corresponding cells.

Every function is `step(params, states, x_t, t) -> (states, output_t)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ostinato import cells


class Network(NamedTuple):
    """A cell, and the same network as a step function, or None to call the cell.

    `hand_made` marks a network without a corresponding cell: `cell` then gives the
    initial states only.
    """

    step: Callable | None
    cell: Any
    init: Callable[[jax.Array], Any]
    hand_made: bool = False

    def cell_on(self, memory: jax.Array) -> Any:
        """Return the cell; if it is an attention, the one that reads `memory`."""
        attends = isinstance(self.cell, cells.Attention)
        return self.cell.attend(memory) if attends else self.cell

    def step_on(self, memory: jax.Array) -> Callable:
        """Return the step function, or the cell if there is none."""
        return self.step or self.cell_on(memory)


def _leaky(params: Any, h: Any, x: Any, t: Any) -> Any:
    w_ih, w_hh, b, leak = params
    new = jnp.tanh(x @ w_ih.T + h @ w_hh.T + b)
    h = (1 - leak) * h + leak * new
    return h, h


def _lstm(params: Any, states: Any, x: Any, t: Any) -> Any:
    h, c = states
    pre = x @ params.w_ih.T + params.b_ih + h @ params.w_hh.T + params.b_hh
    return _lstm_unit(pre, c)


def _mi_lstm(params: Any, states: Any, x: Any, t: Any) -> Any:
    h, c = states
    gx = x @ params.w_ih.T + params.b_ih
    gh = h @ params.w_hh.T + params.b_hh
    pre = params.alpha * gh * gx + params.beta1 * gh + params.beta2 * gx + params.b
    return _lstm_unit(pre, c)


def _lstm_unit(pre: Any, c: Any) -> Any:
    i, f, g, o = jnp.split(pre, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(params: Any, h: Any, x: Any, t: Any) -> Any:
    gx = x @ params.w_ih.T + params.b_ih
    gh = h @ params.w_hh.T + params.b_hh
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (jnp.split(a, 3, axis=-1) for a in (gx, gh))
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * h_n)
    h = (1 - z) * n + z * h
    return h, h


def attention(size: int) -> cells.Attention:
    """Return an LSTM that reads a memory, with `size` inputs, units and features."""
    return cells.Attention(cells.LSTM(2 * size, size), memory_size=size)


def networks(size: int) -> dict[str, Network]:
    """Return all networks by name, with `size` inputs and units."""
    of_cells = {
        "LSTM": (_lstm, cells.LSTM(size, size)),
        "GRU": (_gru, cells.GRU(size, size)),
        "MI-LSTM": (_mi_lstm, cells.MILSTM(size, size)),
        "peephole LSTM": (None, cells.PeepholeLSTM(size, size)),
        "layer norm LSTM": (None, cells.LayerNormLSTM(size, size)),
        "attention LSTM": (None, attention(size)),
    }

    def init_leaky(key: jax.Array) -> Any:
        params = cells.RNN(size, size).init(key)
        return params.w_ih, params.w_hh, params.b_ih, jnp.full(size, 0.3)

    leaky = Network(_leaky, cells.RNN(size, size), init_leaky, hand_made=True)
    return {"leaky tanh RNN": leaky} | {
        name: Network(step, cell, cell.init) for name, (step, cell) in of_cells.items()
    }
