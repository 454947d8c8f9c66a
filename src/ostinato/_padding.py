"""The padding policies: the values of results past the end of a sequence.

Every function takes the `lengths` of the sequences, int32 `[B]`, and arrays whose first
two axes are time and batch; `time_axis`, 0 or 1, says which one is time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._typing import Array


def select(condition: Array, tree: Any, other: Any = None) -> Any:
    """Return `tree` where `condition` holds, and `other` elsewhere.

    Args:
        condition: bool, in the shape of the leading axes of every array in `tree`.
        tree: a pytree of arrays.
        other: the same tree of arrays in shapes that broadcast; None means zeros.
    """

    def pick(a: Array, b: Array | None = None) -> Array:
        mask = jnp.expand_dims(condition, tuple(range(condition.ndim, a.ndim)))
        return jnp.where(mask, a, jnp.zeros((), a.dtype) if b is None else b)

    return jax.tree.map(pick, tree, *([] if other is None else [other]))


def fill_empty_sequences(a: Array, lengths: Array) -> Array:
    """Return `a [B, ...]` with the values of another sequence for those without steps.

    Where no sequence has steps, all values are 1/2, which is seldom a pole of a step; 0
    for integers. The result is a constant to derivatives.
    """
    if a.shape[0] == 0 or jnp.issubdtype(a.dtype, jax.dtypes.extended):
        return a
    # A masked sum picks those of the longest one, since a sharded axis has no indexing.
    index = jnp.arange(a.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(lengths == jnp.max(lengths), index, 0))
    longest = (index == last) & (lengths > 0)
    other = jnp.sum(select(longest, a), axis=0, keepdims=True, dtype=a.dtype)
    other = jnp.where(jnp.any(longest), other, jnp.full_like(other, 0.5))
    return lax.stop_gradient(select(lengths > 0, a, other))


def is_step(lengths: Array, num_steps: Any, time_axis: int) -> Array:
    """Return a mask of the steps before the end, bool `[T, B]` or `[B, T]`."""
    return _steps(num_steps, time_axis) < jnp.expand_dims(lengths, time_axis)


def is_last_step(lengths: Array, num_steps: Any, time_axis: int) -> Array:
    """Return a mask of the last step of each sequence, bool `[T, B]` or `[B, T]`."""
    return _steps(num_steps, time_axis) == jnp.expand_dims(lengths - 1, time_axis)


def _steps(num_steps: Any, time_axis: int) -> Array:
    """Return the number of each step, int32 `[T, 1]` or `[1, T]`."""
    shape = (num_steps, 1) if time_axis == 0 else (1, num_steps)
    return lax.broadcasted_iota(jnp.int32, shape, time_axis)


def zero(a: Array, lengths: Array, time_axis: int) -> Array:
    """Return `a` with zeros past the end of each sequence."""
    return select(is_step(lengths, a.shape[time_axis], time_axis), a)


def hold(
    a: Array, lengths: Array, time_axis: int, initial: Array | None = None
) -> Array:
    """Return `a` with the last step of each sequence repeated past its end.

    Args:
        a: `[T, B, ...]` or `[B, T, ...]`.
        lengths: int32 `[B]`.
        time_axis: 0 or 1.
        initial: `[B, ...]`, the values for sequences of length 0; None means zeros.
    """
    last = at_step(a, jnp.maximum(lengths - 1, 0), time_axis)
    held = jnp.expand_dims(select(lengths > 0, last, initial), time_axis)
    return select(is_step(lengths, a.shape[time_axis], time_axis), a, held)


def drop(states: Any, lengths: Array, num_steps: Any, batch_axis: int = 0) -> Any:
    """Return the final states with zeros for sequences shorter than `num_steps`."""
    whole = jnp.expand_dims(lengths == num_steps, tuple(range(batch_axis)))
    return select(whole, states)


def at_step(a: Array, t: Array, time_axis: int) -> Array:
    """Return `a` at one step of each sequence, `[B, ...]`; zeros if T = 0.

    Args:
        a: `[T, B, ...]` or `[B, T, ...]`.
        t: int32 `[B]`, the step of each sequence.
        time_axis: 0 or 1.
    """
    if a.shape[time_axis] == 0:
        return jnp.zeros((*a.shape[:time_axis], *a.shape[time_axis + 1 :]), a.dtype)
    t = jnp.expand_dims(t, (time_axis, *range(2, a.ndim)))
    taken = jnp.take_along_axis(a, t, axis=time_axis, mode="clip")
    return jnp.squeeze(taken, time_axis)
