"""What is static about a linear recurrence, and the shapes of its arrays.

`b` and `h` are `[B, T, *F]`, time-major `[T, B, *F]`, and `h_0` is `[B, *F]`. `a` has
the axes of `b`, of which those of the batch, of time and the last one may have size 1:
all sequences, all steps or all units then share a factor. Blocks add one axis: `a` is
`[B, T, *F, k]`, and `F` ends with `k`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _padding
from .._typing import Array


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """What is static about a call.

    Attributes:
        reverse: run from the last step to the first.
        after: whether the factor acts after the step, as in the transpose:
            `s_t = b_t + c_{t-1}`, `c_t = a_t s_t`; the results are `s` and the last
            `c`. Otherwise `h_t = a_t h_{t-1} + b_t`.
        time_major: whether time is the first axis.
        blocks: whether factors are matrices `[k, k]`.
        has_lengths: whether the operands end with lengths, int32 `[B]`.
        has_resets: whether the last operand is resets, bool `[B, T]`.
        backend: the backend that the caller asks for, or None.
    """

    reverse: bool = False
    after: bool = False
    time_major: bool = False
    blocks: bool = False
    has_lengths: bool = False
    has_resets: bool = False
    backend: str | None = None

    @property
    def time_axis(self) -> int:
        """The axis of time in `a`, `b` and `h`."""
        return 0 if self.time_major else 1

    @property
    def batch_axis(self) -> int:
        """The axis of the batch in `a`, `b` and `h`."""
        return 1 - self.time_axis

    def transposed(self) -> Recurrence:
        """Return the call of the transpose: it runs the other way."""
        return dataclasses.replace(self, reverse=not self.reverse, after=not self.after)

    def masks(self, masks: Any) -> tuple[Array | None, Array | None]:
        """Return lengths and resets of the operands behind the others."""
        masks = iter(masks)
        lengths = next(masks) if self.has_lengths else None
        return lengths, next(masks) if self.has_resets else None

    def shares(self, a: Any, axis: int) -> bool:
        """Return whether all along an axis of `b` share factors."""
        return isinstance(a.shape[axis], int) and a.shape[axis] == 1

    def shares_units(self, a: Any, b: Any) -> bool:
        """Return whether a factor is for all units of the last axis."""
        return not self.blocks and len(b.shape) > 2 and a.shape[-1] != b.shape[-1]

    def factor_shape(self, a: Any, b: Any) -> tuple[Any, ...]:
        """Return the shape of the gradient of `a`, by sequence."""
        shape = list(a.shape)
        shape[self.batch_axis] = b.shape[self.batch_axis]
        return tuple(shape)


def multiply(call: Recurrence, a: Array, h: Array) -> Array:
    """Return factors times states, or matrices times vectors."""
    if call.blocks:
        return jnp.sum(a * jnp.expand_dims(h, -2), -1)
    shape = jnp.broadcast_shapes(a.shape, h.shape)
    return jnp.broadcast_to(a, shape) * jnp.broadcast_to(h, shape)


def previous_states(
    call: Recurrence, h: Array, h_0: Array, lengths: Array | None
) -> Array:
    """Return the state before each step, in the shape of `h`."""
    axis = call.time_axis
    start = jnp.expand_dims(h_0, axis)
    steps = h.shape[axis]
    if not call.reverse:
        rest = jax.lax.slice_in_dim(h, 0, max(steps - 1, 0), axis=axis)
        moved = [start, rest]
    else:
        rest = jax.lax.slice_in_dim(h, min(1, steps), steps, axis=axis)
        moved = [rest, start]
    if steps == 0:
        return h
    moved = jnp.concatenate(moved, axis)
    if call.reverse and lengths is not None:
        last = _padding.is_last_step(lengths, steps, axis)
        moved = _padding.select(last, jnp.broadcast_to(start, h.shape), moved)
    return moved


def active(
    call: Recurrence, like: Array, lengths: Array | None, resets: Array | None
) -> Array | None:
    """Return where a step sees the state before it, None for everywhere.

    Not in the padding, and not at a reset; in a shape that broadcasts to `like`.
    """
    inside = valid(call, like, lengths)
    if resets is None:
        return inside
    kept = ~jnp.expand_dims(resets, range(2, like.ndim))
    return kept if inside is None else inside & kept


def valid(call: Recurrence, like: Array, lengths: Array | None) -> Array | None:
    """Return where `like` is not padding, in a shape that broadcasts to it."""
    if lengths is None:
        return None
    inside = _padding.is_step(lengths, like.shape[call.time_axis], call.time_axis)
    return jnp.expand_dims(inside, range(2, like.ndim))


def select(condition: Array | None, x: Array) -> Array:
    """Return `x` where the condition holds, or everywhere for None, else 0."""
    if condition is None:
        return x
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, jnp.zeros((), x.dtype))


def numbers(call: Recurrence, a: Any, b: Any) -> np.ndarray:
    """Return sizes and distances as kernels take them.

    Their order is that of native/ffi/linear_cpu.cc and of _cuda/text/linear.h.
    """
    steps, batch = b.shape[call.time_axis], b.shape[call.batch_axis]
    a_steps, a_batch = a.shape[call.time_axis], a.shape[call.batch_axis]
    units, row = math.prod(b.shape[2:]), math.prod(a.shape[2:])
    shared = call.shares_units(a, b)
    masked = call.has_lengths or call.has_resets
    if call.time_major and not (masked or shared) and a.shape[:2] == b.shape[:2]:
        # All units of a step lie side by side.
        batch, a_batch, units, row = 1, 1, batch * units, batch * row
    groups = math.prod(b.shape[2:-1]) or 1 if shared else 1
    width = b.shape[-1] if shared else units

    def strides(row: int, batch: int, steps: int) -> tuple[int, int]:
        """Return the distances from sequence to sequence and from step to step."""
        return (row, batch * row) if call.time_major else (steps * row, row)

    of_sequences, of_steps = strides(row, a_batch, a_steps)
    da_sequences, da_steps = strides(row, batch, a_steps)
    constant = call.shares(a, call.time_axis)
    found = (
        batch,
        steps,
        groups,
        width,
        *strides(units, batch, steps),
        0 if a_batch == 1 else of_sequences,
        0 if constant else of_steps,
        1,
        da_sequences,
        0 if constant else da_steps,
        *((1, batch) if call.time_major else (steps, 1)),
        shared,
        call.blocks,
        call.reverse,
        call.after,
        call.has_lengths,
        call.has_resets,
    )
    return np.array(found, np.int64)
