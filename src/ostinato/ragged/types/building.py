"""The data and the lengths of a `RaggedArray`, from what its constructors get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _checks
from ..._typing import Array
from .checks import check_lengths, check_traced
from .padded import numbers_text
from .segments import Segments, UsedCapacity, along


def longest_of(lengths: Any) -> int:
    """Return the longest of concrete lengths, 0 where there are no lengths."""
    return int(np.asarray(lengths).max(initial=0))


def checked_examples(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays of numpy if all are, else of JAX, in dtypes that JAX has."""
    if all(isinstance(a, np.ndarray) for a in arrays):
        dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays]
        return [a.astype(t, copy=False) for a, t in zip(arrays, dtypes, strict=True)]
    return [_checks.check_array(f"arrays[{i}]", a) for i, a in enumerate(arrays)]


def joined(arrays: Sequence[Any], axis: int, capacity: int) -> Any:
    """Return the tokens of `arrays`, then zeros up to the capacity."""
    tokens = sum(a.shape[axis] for a in arrays)
    if capacity < tokens:
        raise ValueError(f"`capacity` must hold all {tokens} rows, got {capacity}")
    parts, first = list(arrays), arrays[0]
    # JAX would compile it for each list of lengths.
    module: Any = np if isinstance(first, np.ndarray) else jnp
    if capacity > tokens:
        shape = (*first.shape[:axis], capacity - tokens, *first.shape[axis + 1 :])
        parts.append(module.zeros(shape, first.dtype))
    return module.concatenate(parts, axis)


def without_axis(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])


def pack_padded(x: Array, lengths: Array, capacity: int) -> Array:
    """Return the tokens of padded examples, then zeros: `[capacity, ...]`.

    Args:
        x: `[batch, size, ...]`.
        lengths: int32 `[batch]`.
        capacity: the tokens of the result.
    """
    merged = lax.collapse(x, 0, 2)
    if merged.shape[0] == 0:
        return jnp.zeros((capacity, *merged.shape[1:]), x.dtype)
    used = UsedCapacity.of(lengths, capacity)
    segments = Segments.of(lengths, capacity, used)
    tokens = segments.ids * x.shape[1] + segments.position
    data = jnp.take(merged, tokens, 0, mode="clip")
    valid = along(used.valid, 0, data.ndim)
    return jnp.where(valid, data, jnp.zeros((), data.dtype))


def lengths_of_ids(segment_ids: Any, num_segments: int | None) -> Array:
    """Return the number of tokens of each example; see `from_segment_ids`."""
    ids = check_lengths(segment_ids, "segment_ids")
    if _checks.is_concrete(ids):
        values = np.asarray(ids)
        if np.any(np.diff(values) < 0) or np.any(values < 0):
            raise ValueError(
                "`segment_ids` must be 0 or more and ascend, got "
                f"{numbers_text(values)}; sort the rows first"
            )
        if num_segments is None:
            num_segments = int(values.max(initial=-1)) + 1
    elif num_segments is None:
        raise TypeError("`num_segments` must be given where `segment_ids` is traced")
    else:
        check_traced(
            (ids[1:] >= ids[:-1]).all() & (ids >= 0).all(),
            "`segment_ids` must be 0 or more and ascend; sort the rows first",
        )
    num_segments = _checks.check_size("num_segments", num_segments, 0)
    return jnp.zeros(num_segments, jnp.int32).at[ids].add(1, mode="drop")
