"""The reference backend for rows: padded, run, and taken apart again.

Each function is its namesake of xla.py. What is in no sequence's rows, NaN included, is
replaced on the way in and on the way out, so that it reaches neither values nor
derivatives of any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array
from . import xla
from .call import (
    Differentiable,
    Operands,
    Outputs,
    Residuals,
    RNNCall,
    Saved,
    holds_steps,
)


def forward(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """`xla.forward`, of rows too."""
    return _padded(xla.forward, call, operands)


def tangent(
    call: RNNCall, operands: Operands, residuals: Residuals, dot: Differentiable
) -> Outputs:
    """`xla.tangent`, of rows too."""
    return _padded(xla.tangent, call, operands, residuals, dot)


def backward(
    call: RNNCall,
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Differentiable:
    """`xla.backward`, of rows too."""
    return _padded(xla.backward, call, operands, residuals, bar, wrt=wrt)


def _padded(
    form: Callable, call: RNNCall, operands: Operands, *rest: Any, **params: Any
) -> Any:
    if call.rows is None:
        return form(call, operands, *rest, **params)
    places = _places(call, operands)
    padded, *others = _map_rows(places.pad, (operands, *rest))
    padded = padded._replace(seq_lengths=places.lengths, row_lengths=None)
    padded_call = dataclasses.replace(call, rows=None, time_major=True)
    return _map_rows(places.unpad, form(padded_call, padded, *others, **params))


def _map_rows(change: Callable, tree: Any) -> Any:
    """`tree`, of the named tuples in call.py, with every array of rows changed."""
    return jax.tree.map(
        lambda a, steps: change(a) if steps else a, tree, holds_steps(tree)
    )


class _Places(NamedTuple):
    """Where steps stand among rows, and rows among steps.

    Attributes:
        lengths: steps of each sequence, int32 `[B]`.
        row: of every step the row that holds it, `[T, B]`.
        is_step: which of them there are, `[T, B]`.
        step: of every row the step that it holds, counted in `[T, B]` as in `[T * B]`.
        holds_step: which of them hold one, `[R]`.
    """

    lengths: Array
    row: Array
    is_step: Array
    step: Array
    holds_step: Array

    def pad(self, rows: Array) -> Array:
        """`[R, ...]` as `[T, B, ...]`."""
        return _take(rows, self.row, self.is_step)

    def unpad(self, steps: Array) -> Array:
        """`[T, B, ...]` as `[R, ...]`."""
        size = steps.shape[0] * steps.shape[1]
        flat = steps.reshape(size, *steps.shape[2:])
        return _take(flat, self.step, self.holds_step)


def _take(a: Array, index: Array, there: Array) -> Array:
    """`a[index]` where `there`, else 0."""
    if 0 in (a.shape[0], *index.shape):
        return jnp.zeros((*index.shape, *a.shape[1:]), a.dtype)
    there = jnp.expand_dims(there, range(there.ndim, there.ndim + a.ndim - 1))
    taken = a.at[index].get(mode="clip")
    return jnp.where(there, taken, jnp.zeros((), a.dtype))


def _places(call: RNNCall, operands: Operands) -> _Places:
    assert call.rows is not None
    piles = call.rows.piles
    steps, batch = call.sizes(operands)
    size, each = operands.x.shape[0] // piles, batch // piles
    # [piles, each], counted from the first row of the pile
    room = jnp.clip(operands.row_lengths, 0, size).reshape(piles, each)
    ends = jnp.minimum(jnp.cumsum(room, axis=1, dtype=jnp.int32), size)
    starts = jnp.concatenate([jnp.zeros((piles, 1), jnp.int32), ends], 1)[:, :-1]
    lengths = jnp.minimum(ends - starts, steps).reshape(batch)
    if operands.seq_lengths is not None:
        lengths = jnp.clip(operands.seq_lengths, 0, lengths)
    first = (starts + size * jnp.arange(piles, dtype=jnp.int32)[:, None]).reshape(batch)
    time = jnp.arange(steps, dtype=jnp.int32)[:, None]

    # Whose rows they are: as many sequences of the pile end before them.
    within = jnp.arange(size, dtype=jnp.int32)
    find = jax.vmap(lambda ends: jnp.searchsorted(ends, within, side="right"))
    sequence = jnp.minimum(find(ends).astype(jnp.int32), max(each - 1, 0))
    sequence = (sequence + each * jnp.arange(piles, dtype=jnp.int32)[:, None]).reshape(
        piles * size
    )
    if batch == 0:
        at = jnp.zeros_like(sequence)
        holds_step = jnp.zeros(sequence.shape, bool)
    else:
        at = jnp.arange(piles * size, dtype=jnp.int32) - first[sequence]
        holds_step = at < lengths[sequence]
    return _Places(
        lengths=lengths,
        row=first[None] + time,
        is_step=time < lengths[None],
        step=at * batch + sequence,
        holds_step=holds_step,
    )
