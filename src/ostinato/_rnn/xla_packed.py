"""The reference implementation for packed sequences: pads, runs, and packs again.

Each function runs the function of the same name in xla_network.py. A token that belongs
to no sequence is replaced both in arguments and in results, so that its value, NaN
included, reaches neither values nor derivatives of any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._padding import is_step
from .._typing import Array
from . import xla_network
from .call import (
    Differentiable,
    Operands,
    Outputs,
    Packed,
    Residuals,
    RNNCall,
    Saved,
    holds_steps,
)


def forward(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """Run `xla_network.forward` on padded or packed sequences."""
    return run_padded(xla_network.forward, call, operands)


def tangent(
    call: RNNCall, operands: Operands, residuals: Residuals, dot: Differentiable
) -> Outputs:
    """Run `xla_network.tangent` on padded or packed sequences."""
    return run_padded(xla_network.tangent, call, operands, residuals, dot)


def backward(
    call: RNNCall,
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Differentiable:
    """Run `xla_network.backward` on padded or packed sequences."""
    return run_padded(xla_network.backward, call, operands, residuals, bar, wrt=wrt)


def run_padded(
    implementation: Callable,
    call: RNNCall,
    operands: Operands,
    *rest: Any,
    **params: Any,
) -> Any:
    """Run an implementation for padded sequences on padded or packed ones."""
    if call.packed is None:
        return implementation(call, operands, *rest, **params)
    index = _token_index(call, call.packed, operands)
    padded, *others = _map_tokens(index.pad, (operands, *rest))
    padded = padded._replace(seq_lengths=index.lengths, segment_lengths=None)
    padded_call = dataclasses.replace(call, packed=None, time_major=True)
    results = implementation(padded_call, padded, *others, **params)
    return _map_tokens(index.pack, results)


def _map_tokens(change: Callable, tree: Any) -> Any:
    """Apply `change` to every array of tokens in `tree`, of named tuples of call.py."""
    return jax.tree.map(
        lambda a, steps: change(a) if steps else a, tree, holds_steps(tree)
    )


class _TokenIndex(NamedTuple):
    """The indices of steps among tokens, and of tokens among steps.

    Attributes:
        lengths: the number of steps of each sequence, int32 `[B]`.
        token: for every step, the index of the token that holds it, `[T, B]`.
        is_step: True for the steps that exist, `[T, B]`.
        step: for every token, the index of its step in the flat array `[T * B]`.
        holds_step: True for the tokens that hold a step, `[tokens]`.
    """

    lengths: Array
    token: Array
    is_step: Array
    step: Array
    holds_step: Array

    def pad(self, tokens: Array) -> Array:
        """Convert `[tokens, ...]` to `[T, B, ...]`."""
        return _take(tokens, self.token, self.is_step)

    def pack(self, steps: Array) -> Array:
        """Convert `[T, B, ...]` to `[tokens, ...]`."""
        size = steps.shape[0] * steps.shape[1]
        flat = steps.reshape(size, *steps.shape[2:])
        return _take(flat, self.step, self.holds_step)


def _take(a: Array, index: Array, exists: Array) -> Array:
    """Return `a[index]` where `exists` holds, else 0."""
    if 0 in (a.shape[0], *index.shape):
        return jnp.zeros((*index.shape, *a.shape[1:]), a.dtype)
    exists = jnp.expand_dims(exists, range(exists.ndim, exists.ndim + a.ndim - 1))
    taken = a.at[index].get(mode="clip")
    return jnp.where(exists, taken, jnp.zeros((), a.dtype))


def _token_index(call: RNNCall, packed: Packed, operands: Operands) -> _TokenIndex:
    buffers = packed.buffers
    steps, batch = call.sizes(operands)
    capacity, each = operands.x.shape[0] // buffers, batch // buffers
    if isinstance(steps, int) and isinstance(batch, int) and steps * batch >= 2**31:
        raise NotImplementedError(
            f"concatenated sequences run as padded ones on xla, of which {batch} of "
            f"{steps} steps have 2**31 places or more; give fewer sequences to a call"
        )
    # All of shape [buffers, each] and counted from the first token of the buffer.
    held = jnp.clip(operands.segment_lengths, 0, capacity).reshape(buffers, each)
    ends = jnp.minimum(jnp.cumsum(held, axis=1, dtype=jnp.int32), capacity)
    starts = jnp.concatenate([jnp.zeros((buffers, 1), jnp.int32), ends], 1)[:, :-1]
    lengths = jnp.minimum(ends - starts, steps).reshape(batch)
    if operands.seq_lengths is not None:
        lengths = jnp.clip(operands.seq_lengths, 0, lengths)
    buffer = jnp.arange(buffers, dtype=jnp.int32)[:, None]
    first = (starts + capacity * buffer).reshape(batch)
    time = jnp.arange(steps, dtype=jnp.int32)[:, None]

    # The index of a token's sequence is the number of sequences that end before it.
    within = jnp.arange(capacity, dtype=jnp.int32)
    find = jax.vmap(lambda ends: jnp.searchsorted(ends, within, side="right"))
    sequence = jnp.minimum(find(ends).astype(jnp.int32), max(each - 1, 0))
    sequence = (sequence + each * buffer).reshape(buffers * capacity)
    if batch == 0:
        at = jnp.zeros_like(sequence)
        holds_step = jnp.zeros(sequence.shape, bool)
    else:
        at = jnp.arange(buffers * capacity, dtype=jnp.int32) - first[sequence]
        holds_step = at < lengths[sequence]
    return _TokenIndex(
        lengths=lengths,
        token=first[None] + time,
        is_step=is_step(lengths, steps, 0),
        step=at * batch + sequence,
        holds_step=holds_step,
    )
