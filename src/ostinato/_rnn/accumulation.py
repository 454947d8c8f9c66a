"""The accumulation dtype: 16-bit floats are multiplied and summed in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._typing import Array


def accumulation_dtype(dtype: Any) -> Any:
    """Return float32 for a float of fewer bits, and any other dtype unchanged."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if narrow else dtype


def widen(a: Array) -> Array:
    """Convert `a` to its accumulation dtype."""
    return a.astype(accumulation_dtype(a.dtype))


def wide_product(
    a: Array,
    b: Array,
    contract: tuple[Any, Any],
    *,
    batch: tuple[Any, Any] = ((), ()),
    precision: Any = None,
) -> Array:
    """Contract axes of `a` with axes of `b` and sum in the accumulation dtype of `b`.

    Args:
        a: the first factor, in the dtype of `b` or in its accumulation dtype.
        b: the second factor.
        contract: the contracted axes of each factor: an int, or a tuple of ints.
        batch: the batch axes of each factor: an int, or a tuple of ints.
        precision: of products of float32 and float64, as in `lax.dot_general`.
    """

    def both(axes: tuple[Any, Any]) -> tuple[Any, Any]:
        first, second = ((i,) if isinstance(i, int) else i for i in axes)
        return first, second

    return lax.dot_general(
        a,
        b,
        (both(contract), both(batch)),
        precision=precision,
        preferred_element_type=accumulation_dtype(b.dtype),
    )
