"""The calls of linear recurrences into the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from .._typing import Array
from .call import Recurrence, size

_DTYPES = tuple(
    map(np.dtype, ("float32", "float64", jnp.bfloat16, "complex64", "complex128"))
)


def unsupported_reason(call: Recurrence, b: Any) -> str | None:
    """Return why the native library cannot run this; None if it can."""
    library, reason = _native.status()
    if library is None:
        return reason
    if np.dtype(b.dtype) not in _DTYPES:
        return f"it has no kernels for {np.dtype(b.dtype)}"
    if call.blocks and b.shape[-1] != 2:
        return f"it has kernels for blocks [2, 2], not {[b.shape[-1]] * 2}"
    return None


def forward(
    call: Recurrence, a: Array, b: Array, h_0: Array, *masks: Array
) -> Sequence[Array]:
    """Return `h` and the last state."""
    results = [_like(b), _like(h_0)]
    return jax.ffi.ffi_call("ostinato_linear_fwd", results)(
        a, b, h_0, *masks, numbers=_numbers(call, a, b)
    )


def backward(
    call: Recurrence,
    a: Array,
    h: Array,
    h_0: Array,
    dh: Array,
    dh_n: Array,
    *masks: Any,
) -> Sequence[Array]:
    """Return the gradients of `a`, by sequence, of `b` and of `h_0`."""
    da = jax.ShapeDtypeStruct(call.factor_shape(a, h), a.dtype)
    results = [da, _like(h), _like(h_0)]
    return jax.ffi.ffi_call("ostinato_linear_bwd", results)(
        a, h, h_0, dh, dh_n, *masks, numbers=_numbers(call, a, h)
    )


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _numbers(call: Recurrence, a: Any, b: Any) -> np.ndarray:
    """Return the attribute `numbers`, see native/ffi/linear_cpu.cc."""
    steps, batch = b.shape[call.time_axis], b.shape[call.batch_axis]
    a_steps, a_batch = a.shape[call.time_axis], a.shape[call.batch_axis]
    units, row = size(b.shape[2:]), size(a.shape[2:])
    shared = call.shares_units(a, b)
    masked = call.has_lengths or call.has_resets
    if call.time_major and not (masked or shared) and a.shape[:2] == b.shape[:2]:
        # All units of a step lie side by side.
        batch, a_batch, units, row = 1, 1, batch * units, batch * row
    groups = units // b.shape[-1] if shared and units else 1
    width = b.shape[-1] if shared else units

    def strides(row: int, batch: int, steps: int) -> tuple[int, int]:
        """Return the distances from sequence to sequence and from step to step."""
        return (row, batch * row) if call.time_major else (steps * row, row)

    of_sequences, of_steps = strides(row, a_batch, a_steps)
    da_sequences, da_steps = strides(row, batch, a_steps)
    constant = call.shares(a, call.time_axis)
    numbers = (
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
    return np.array(numbers, np.int64)
