"""What stands where there is no value, and what changes no result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._typing import Array
from ..primitives.constant import constant
from ..types.segments import along


def fill_value(dtype: Any) -> Any:
    """NaN, or what `jax.numpy.take` gives for an index out of range in that type."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.iinfo(dtype).min
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.iinfo(dtype).max
    return True


def lowest(dtype: Any) -> Any:
    """What no value of `dtype` is below: the identity of `max`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """What no value of `dtype` is above: the identity of `min`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def of_present(present: Array, x: Array) -> Array:
    """`x`, `[batch, ...]`, with that of a present example for those that are not.

    For what is not seen of an example and may be NaN, as a mean of no rows is: times
    the 0 that comes back for it NaN would be a gradient. There is none for the others'.

    Args:
        present: bool `[batch]`.
        x: of every example.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    other = lax.dynamic_index_in_dim(x, jnp.argmax(present), 0)
    other = or_harmless(jnp.any(present), other, integer=1)  # a size, say
    return jnp.where(along(present, 0, x.ndim), x, constant(other))


def or_harmless(any_valid: Array, x: Array, integer: int = 0) -> Array:
    """`x`, or what most functions are finite of where there is nothing valid."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    other = 0.5 if jnp.issubdtype(x.dtype, jnp.inexact) else integer
    return jnp.where(any_valid, x, jnp.asarray(other, x.dtype))
