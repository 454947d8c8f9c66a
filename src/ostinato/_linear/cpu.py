"""The calls of linear recurrences into the native library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from .. import _native
from .._typing import Array
from .call import Recurrence, numbers

_DTYPES = tuple(
    map(np.dtype, ("float32", "float64", jnp.bfloat16, "complex64", "complex128"))
)

# The native library begins each sequence anew, in some 70 ns, while XLA takes one step
# of all sequences at once. With 20000 sequences of 20 numbers, or with 2000 of one step
# of 256, XLA takes a quarter of the time; with 5000 of 128, half of it more.
_MANY_SEQUENCES, _FEW_NUMBERS = 256, 64


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


def needless_reason(call: Recurrence, b: Any) -> str | None:
    """Return why XLA is as quick for calls that name no backend; None if it is not."""
    batch, steps = b.shape[call.batch_axis], b.shape[call.time_axis]
    if any(map(is_symbolic_dim, b.shape)) or batch < _MANY_SEQUENCES:
        return None
    if steps != 1 and math.prod(b.shape) >= batch * _FEW_NUMBERS:
        return None
    return "XLA is as quick for many sequences of few numbers"


def forward(
    call: Recurrence, a: Array, b: Array, h_0: Array, *masks: Array
) -> Sequence[Array]:
    """Return `h` and the last state."""
    results = [_like(b), _like(h_0)]
    return jax.ffi.ffi_call("ostinato_linear_fwd", results)(
        a, b, h_0, *masks, numbers=numbers(call, a, b)
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
        a, h, h_0, dh, dh_n, *masks, numbers=numbers(call, a, h)
    )


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
