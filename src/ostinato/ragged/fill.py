"""What stands where there is no value, and what changes no result."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


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
