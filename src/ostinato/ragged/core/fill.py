"""Elements for places that have no value, chosen so that they change no result."""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._typing import Array
from ..primitives.constant import constant
from ..types.segments import along, safe_fill


def fill_value(dtype: Any) -> Any:
    """Return NaN, or the fill value of `jax.numpy.take` for dtypes without NaN."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.iinfo(dtype).min
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.iinfo(dtype).max
    return True


def lowest(dtype: Any) -> Any:
    """Return the least value of `dtype`: the identity of `max`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def last_of_all(dtype: Any) -> Any:
    """Return what `top_k` takes last: NaN with the sign bit set, or the least integer.

    Floats have a total order there, from the largest NaN to the largest NaN with the
    sign bit, which is what 0 / 0 is on x86.
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        bits = np.dtype(f"i{dtype.itemsize}")
        return np.full((), -1, bits).view(dtype)[()]
    return lowest(dtype)


def highest(dtype: Any) -> Any:
    """Return the largest value of `dtype`: the identity of `min`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


@ft.partial(jax.jit, inline=True)
def of_present(present: Array, x: Array) -> Array:
    """Return `x`, `[batch, ...]`, with a present example's values for absent examples.

    The value of an absent example is not looked at, but may be NaN, as the mean of no
    tokens is. The cotangent of it is 0, and 0 times NaN would be a NaN gradient. The
    values that stand in for it are constants.

    Args:
        present: bool `[batch]`.
        x: the values of all examples.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    other = lax.dynamic_index_in_dim(x, jnp.argmax(present), 0)
    other = safe_fill(jnp.any(present), other, integer=1)  # it may be a size
    return jnp.where(along(present, 0, x.ndim), x, constant(other))
