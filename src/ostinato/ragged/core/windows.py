"""Windows of an axis: where they begin, and which of them leave it."""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from ..._typing import Array


@ft.partial(jax.jit, inline=True)
def starts_in_range(start: Array, size: Any, window: Any) -> tuple[Array, Array]:
    """Return the starts of windows, moved into an axis, and which of them were in it.

    Args:
        start: int32, the first position of each window.
        size: the size of the axis, in a shape that broadcasts.
        window: the size of the windows, likewise: 1 for single elements.

    Returns:
        The nearest starts of windows that end within the axis, 0 where windows are
        larger than it; and where those are the given ones and the windows fit.
    """
    last = size - window
    inside = (start >= 0) & (start <= last)
    return jnp.clip(start, 0, jnp.maximum(last, 0)), inside


def as_int32(index: Array) -> Array:
    """Return positions as int32; those beyond its range stay out of every axis."""
    if jnp.iinfo(index.dtype).max > jnp.iinfo(jnp.int32).max:
        low = -1 if jnp.issubdtype(index.dtype, jnp.signedinteger) else 0
        index = jnp.clip(index, low, jnp.iinfo(jnp.int32).max)
    return index.astype(jnp.int32)
