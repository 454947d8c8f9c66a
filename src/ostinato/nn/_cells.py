"""The code that `Recurrent` layers of every library share: runs of one cell."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .. import RNNOutput, _checks, recurrent_net
from .._padding import select
from .._rnn.masking import ValidSteps, check_with_mask
from .._typing import Array, ArrayLike, Bool, Int, Padding
from ..cells import Cell
from ..cells.base import params_dtype
from ..cells.sampling import sample


def check_cell(cell: Any) -> Cell:
    """Return `cell`; raise TypeError unless it is a cell that a layer can hold."""
    if not isinstance(cell, Cell):
        raise TypeError(
            "`cell` must be a cell of ostinato.cells, such as cells.LayerNormLSTM(3, "
            f"4), got {_checks.describe(cell)}"
        )
    try:
        hash(cell)
    except TypeError as error:
        raise TypeError(
            f"`cell` must hold no arrays, got {type(cell).__name__} with a memory or "
            "with random choices; give a layer the cell without them, and the other "
            "one to a call: layer(x, cell=...)"
        ) from error
    return cell


def hashable_recompute(recompute: Iterable[str] | bool) -> Any:
    """Return names of what is to be recomputed as a hashable value."""
    if isinstance(recompute, str) or not isinstance(recompute, Iterable):
        return recompute  # `recurrent_net` says what is wrong with it
    return tuple(recompute)


def initial_state(cell: Cell, params: Any, batch: int) -> Any:
    """Return the states of a cell before the first step."""
    batch = _checks.check_batch(batch)
    return cell.initial_state(batch, params_dtype(params))


def run_cell(
    cell: Cell,
    params: Any,
    x: Any,
    states: Any = None,
    *,
    key: Array | None = None,
    seq_lengths: Int[ArrayLike, " B"] | None = None,
    mask: Bool[ArrayLike, "B T"] | None = None,
    resets: Bool[Array, "B T"] | None = None,
    padding: Padding = "zero",
    time_major: bool = False,
    recompute: Any = (),
    segment_length: Any = None,
) -> RNNOutput:
    """Run a cell over whole sequences, with the arguments of a layer."""
    axis = 0 if _checks.check_bool("time_major", time_major) else 1
    first = _leaves(x, "x", 2)[0]
    steps, batch = first.shape[axis], first.shape[1 - axis]
    if key is not None:
        cell = sample(cell, key, batch)
    if states is None:
        states = initial_state(cell, params, batch)
    valid = reset_at_end = None
    if mask is not None:
        check_with_mask(seq_lengths, padding)
        mask = _batch_first("mask", mask, axis, steps, batch)
        valid = ValidSteps.of(mask)
        seq_lengths = valid.lengths
        x = jax.tree.map(lambda a: valid.gather(a, axis), x)
        if resets is not None:
            resets = _batch_first("resets", resets, axis, steps, batch)
            resets, reset_at_end = valid.gather_resets(resets)
            resets = resets.T if axis == 0 else resets
    out = recurrent_net(
        cell,
        x,
        states,
        params=params,
        seq_lengths=seq_lengths,
        resets=resets,
        padding="zero" if valid is not None else padding,
        time_major=time_major,
        recompute=recompute,
        segment_length=segment_length,
    )
    y, states = out.outputs, out.states
    if valid is not None:
        y = jax.tree.map(lambda a: _spread(valid, a, axis, padding), y)
    if reset_at_end is not None:
        states = select(~reset_at_end, states)
    return RNNOutput(y, states)


def step_cell(
    cell: Cell,
    params: Any,
    x_t: Any,
    states: Any = None,
    *,
    resets: Bool[ArrayLike, " B"] | None = None,
    active: Bool[ArrayLike, " B"] | None = None,
) -> RNNOutput:
    """Run one step of a cell, with the arguments of a layer."""
    if not getattr(cell, "has_step", True):
        raise ValueError(
            f"`step` needs a cell that runs one step at a time, got "
            f"{type(cell).__name__} with two directions; call the layer with whole "
            "sequences"
        )
    batch = _leaves(x_t, "x_t", 1)[0].shape[0]
    if states is None:
        states = initial_state(cell, params, batch)
    if resets is not None:
        states = select(~_checks.check_mask("resets", resets, B=batch), states)
    if active is not None:
        active = _checks.check_mask("active", active, B=batch).astype(jnp.int32)
    x = jax.tree.map(lambda a: a[None], x_t)
    y, states = run_cell(cell, params, x, states, seq_lengths=active, time_major=True)
    return RNNOutput(jax.tree.map(lambda a: a[0], y), states)


def _leaves(x: Any, name: str, rank: int) -> list[Any]:
    """Return the arrays of `x`, which has at least `rank` axes in each."""
    leaves = jax.tree.leaves(x)
    axes = "[B, T, ...]" if rank == 2 else "[B, ...]"
    if not leaves or any(jnp.ndim(a) < rank for a in leaves):
        got = [_checks.describe(a) for a in leaves]
        raise ValueError(
            f"`{name}` must consist of arrays {axes}, got {', '.join(got) or 'none'}"
        )
    return leaves


def _batch_first(name: str, value: Any, axis: int, steps: Any, batch: Any) -> Array:
    """Check bools in the layout of the caller; return them as `[B, T]`."""
    if axis == 0:
        return _checks.check_mask(name, value, T=steps, B=batch).T
    return _checks.check_mask(name, value, B=batch, T=steps)


def _spread(valid: ValidSteps, y: Array, axis: int, padding: str) -> Array:
    first = None
    if padding == "hold":
        none = jax.lax.slice_in_dim(y, 0, 0, axis=axis)
        first = jnp.sum(none, axis, dtype=y.dtype)  # zeros, even without a step
    return valid.spread(y, axis, first)


# ------------------------------------------------------------------------- serving


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FrozenCell:
    """A `Recurrent` layer for serving, as its `.freeze()` returns it.

    It is a pytree, an argument of jitted functions like any array, and it runs in
    evaluation, without random choices. It does not follow its layer: after a change of
    parameters, freeze again.

    Attributes:
        cell: the cell.
        params: its parameters, as arrays.

    Holds under every JAX transformation.
    """

    cell: Cell = dataclasses.field(metadata={"static": True})
    params: Any

    def __call__(
        self,
        x: Any,
        initial_state: Any = None,
        *,
        seq_lengths: Int[ArrayLike, " B"] | None = None,
        mask: Bool[ArrayLike, "B T"] | None = None,
        resets: Bool[Array, "B T"] | None = None,
        padding: Padding = "zero",
        time_major: bool = False,
        cell: Cell | None = None,
    ) -> RNNOutput:
        """Run the cell over whole sequences; the arguments are those of `Recurrent`."""
        return run_cell(
            self.cell if cell is None else cell,
            self.params,
            x,
            initial_state,
            seq_lengths=seq_lengths,
            mask=mask,
            resets=resets,
            padding=padding,
            time_major=time_major,
        )

    def step(
        self,
        x_t: Any,
        state: Any = None,
        *,
        resets: Bool[ArrayLike, " B"] | None = None,
        active: Bool[ArrayLike, " B"] | None = None,
        cell: Cell | None = None,
    ) -> RNNOutput:
        """Run one step; the arguments are those of `Recurrent.step`.

        It is compiled, and needs no `jax.jit` around it, unless `cell` is given.
        """
        if cell is None:
            resets, active = map(_as_array, (resets, active))
            return _step(self, x_t, state, resets, active)
        return step_cell(cell, self.params, x_t, state, resets=resets, active=active)

    def initial_state(self, batch: int) -> Any:
        """Return the states of `batch` sequences before the first step."""
        return initial_state(self.cell, self.params, batch)


@ft.partial(jax.jit, inline=True)
def _step(
    layer: FrozenCell, x_t: Any, state: Any, resets: Any, active: Any
) -> RNNOutput:
    cell, params = layer.cell, layer.params
    return step_cell(cell, params, x_t, state, resets=resets, active=active)


def _as_array(value: Any) -> Array | None:
    """Return bools as an array, for a compiled function; None stays None."""
    return None if value is None else jnp.asarray(_checks.unwrap(value))
