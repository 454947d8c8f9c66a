"""Recurrent layers of Equinox: its own cells on the fused operator, and our own.

    from ostinato.nn.equinox import GRU, LSTM, RNN, Recurrent, scan

    state, ys = scan(cell, xs)                # one sequence; jax.vmap for a batch
    y, state = LSTM(3, 5, key=key)(x)         # a batch, or one sequence

`scan` leaves the cells of Equinox, and the tree of the model, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._modules import not_installed

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise not_installed(error, "equinox") from None

from .. import _checks
from .._rnn.output import as_state
from .._typing import Array, Bool, Float
from ..interop.equinox import from_cell
from ..interop.imported import Imported
from ._cells import FrozenCell
from ._equinox_cells import Recurrent
from ._equinox_layers import GRU, LSTM, RNN, DropoutSwitch, Layer
from ._layers import FrozenLayer
from ._sequences import run_fused, same_dtype_reason, select_carry

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "DropoutSwitch",
    "FrozenCell",
    "FrozenLayer",
    "Layer",
    "Recurrent",
    "scan",
]

_CELLS = (eqx.nn.LSTMCell, eqx.nn.GRUCell)


def scan(
    cell: Callable[[Array, Any], Any],
    xs: Float[Array, "T I"],
    state: Any = None,
    *,
    resets: Bool[Array, " T"] | None = None,
    reverse: bool = False,
) -> tuple[Any, Array]:
    """Run a cell over one sequence.

    An `eqx.nn.LSTMCell` or `eqx.nn.GRUCell` whose parameters, inputs and state have one
    dtype runs on the fused operator; every other cell, and a single step, runs in a
    `lax.scan`.

    Args:
        cell: called as `cell(x, state) -> state`.
        xs: the inputs, `[T, I]`; any pytree of `[T, ...]` for a cell of your own.
        state: the initial state, `h` or `(h, c)`; None: zeros, for the cells of
            Equinox.
        resets: True makes the state 0 before that step, and no gradient crosses. Not
            with `reverse`.
        reverse: run from the last step to the first; `ys` stay in the order of `xs`.

    Returns:
        `(state, ys)`: the final state, and `h` after every step, `[T, H]`: the first
        item of a state that is a tuple.

    Raises:
        TypeError: `state` is None for a cell of your own, or not what the cell of
            Equinox has; `resets` are not bools.
        ValueError: `resets` with `reverse`, or a wrong shape.

    Holds under every JAX and Equinox transformation: `jax.vmap` over sequences runs one
    fused call of the whole batch.
    """
    reverse = _checks.check_bool("reverse", reverse)
    if resets is not None and reverse:
        raise ValueError("`resets` must be None with reverse=True")
    known = type(cell) in _CELLS
    if known:
        state = tuple(state) if isinstance(state, list) else state
        xs = _checks.check_array("xs", xs)
        _checks.check_rank("xs", xs, "T", "I")
        _checks.check_shape("xs", xs, T=xs.shape[0], I=cell.input_size)  # pyright: ignore
        if state is not None:
            state = _checked_state(cell, state)
    if resets is not None:
        steps = {"T": jax.tree.leaves(xs)[0].shape[0]}
        resets = _checks.check_mask("resets", resets, **steps)
    if state is None:
        if not known:
            raise TypeError(
                f"`state` must be given for a {type(cell).__name__}, which is no cell "
                "of Equinox"
            )
        zeros = jnp.zeros(cell.hidden_size, cell.weight_hh.dtype)  # pyright: ignore
        state = (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros
    network = _network(cell, xs, state) if known else None
    if network is not None:
        states = state if isinstance(state, tuple) else (state,)
        final, ys = run_fused(
            network.spec,
            network.weights,
            xs,
            states,
            resets=resets,
            reverse=reverse,
            keep_order=True,
        )
        return (final if isinstance(state, tuple) else final[0]), ys

    def step(state: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
        x, reset = at
        if reset is not None:
            state = select_carry(reset, state)
        state = cell(x, state)
        return state, state[0] if isinstance(state, tuple) else state

    return lax.scan(step, state, (xs, resets), reverse=reverse)


def _network(cell: Any, xs: Array, state: Any) -> Imported | None:
    """Return a cell of Equinox as the fused operator runs it, None if it does not."""
    if xs.shape[0] == 1:  # for which the weights are not worth gathering
        return None
    states = {f"state[{i}]": a for i, a in enumerate(jax.tree.leaves(state))}
    if same_dtype_reason(cell.weight_hh.dtype, xs=xs, **states) is not None:
        return None
    try:
        return from_cell(cell)
    except TypeError:  # parameters of several dtypes, or complex ones
        return None


def _checked_state(cell: Any, state: Any) -> Any:
    """Return the state of a cell of Equinox; check that it is one of its own."""
    is_tuple, two = isinstance(state, tuple), isinstance(cell, eqx.nn.LSTMCell)
    if is_tuple != two or two and len(state) != 2:
        wanted = "(h, c), two arrays," if two else "one array h"
        got = f"a tuple of {len(state)}" if is_tuple else _checks.describe(state)
        raise TypeError(
            f"`state` must be {wanted} for a cell of type {type(cell).__name__}, got "
            f"{got}"
        )
    named = {"state[0]": state[0], "state[1]": state[1]} if two else {"state": state}
    named = {name: _checks.check_array(name, a) for name, a in named.items()}
    for name, a in named.items():
        _checks.check_shape(name, a, H=cell.hidden_size)
    return as_state([*named.values()])
