"""The data and the lengths of a `RaggedArray`, from what its constructors get."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _checks
from ..._typing import Array
from .checked import checked
from .checks import check_fill, check_lengths
from .padded import numbers_text
from .segments import Segments, UsedCapacity, along, is_inside, positions


def longest_of(lengths: Any) -> int:
    """Return the longest of concrete lengths, 0 where there are no lengths."""
    return int(np.asarray(lengths).max(initial=0))


def checked_examples(arrays: Any) -> list[Any]:
    """Return arrays of numpy if all are, else of JAX, in dtypes that JAX has."""
    if hasattr(arrays, "to_numpy"):  # of pandas: a table or a column, not examples
        raise TypeError(
            f"`arrays` must be a sequence of arrays, got a {type(arrays).__name__}; "
            "take [group['column'].to_numpy() for _, group in frame.groupby('key')]"
        )
    arrays = list(arrays)
    for i, a in enumerate(arrays):
        if isinstance(a, tuple) and len(a) == 2 and hasattr(a[1], "to_numpy"):
            raise TypeError(
                f"`arrays[{i}]` must be an array, got a key and a "
                f"{type(a[1]).__name__}, as groupby of pandas gives them; take "
                "[group['column'].to_numpy() for _, group in frame.groupby('key')]"
            )
    if all(isinstance(a, np.ndarray) for a in arrays):
        dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays]
        return [a.astype(t, copy=False) for a, t in zip(arrays, dtypes, strict=True)]
    return [_checks.check_array(f"arrays[{i}]", a) for i, a in enumerate(arrays)]


def check_capacity(capacity: int, tokens: int) -> None:
    """Raise unless the capacity holds all tokens."""
    if capacity < tokens:
        raise ValueError(f"`capacity` must hold all {tokens} tokens, got {capacity}")


def joined(arrays: Sequence[Any], axis: int, capacity: int) -> Any:
    """Return the tokens of `arrays`, then zeros up to the capacity."""
    tokens = sum(a.shape[axis] for a in arrays)
    check_capacity(capacity, tokens)
    parts, first = list(arrays), arrays[0]
    # JAX would compile it for each list of lengths.
    module: Any = np if isinstance(first, np.ndarray) else jnp
    if capacity > tokens:
        shape = (*first.shape[:axis], capacity - tokens, *first.shape[axis + 1 :])
        parts.append(module.zeros(shape, first.dtype))
    return module.concatenate(parts, axis)


def check_other_axes(arrays: Sequence[Any], axis: int) -> None:
    """Raise unless the arrays have one dtype, and one shape apart from `axis`."""
    _checks.check_same_dtype(**{f"arrays[{i}]": a for i, a in enumerate(arrays)})
    shape = arrays[0].shape
    for i, a in enumerate(arrays):
        same = (
            a.shape[:axis] == shape[:axis] and a.shape[axis + 1 :] == shape[axis + 1 :]
        )
        if a.ndim != len(shape) or not same:
            raise ValueError(
                f"`arrays[{i}]` must have the shape of `arrays[0]`, {list(shape)}, "
                f"but for axis {axis}, got {list(a.shape)}"
            )


def pack_padded(x: Array, lengths: Array, capacity: int) -> Array:
    """Return the tokens of padded examples, then zeros: `[capacity, ...]`.

    Args:
        x: `[batch, size, ...]`.
        lengths: int32 `[batch]`.
        capacity: the tokens of the result.
    """
    if 0 in x.shape[:2]:
        return jnp.zeros((capacity, *x.shape[2:]), x.dtype)

    def take(segments: Segments) -> Array:  # two places: one could be beyond int32
        return x.at[segments.ids, segments.position].get(mode="clip")

    return _used_tokens(take, lengths, 0, capacity)


@ft.partial(jax.jit, static_argnums=(3, 4), inline=True)
def take_tokens(
    data: Array, begins: Array, lengths: Array, axis: int, capacity: int
) -> Array:
    """Return segments of `data` one after another, then zeros up to the capacity.

    Args:
        data: with tokens on `axis`.
        begins: int32 `[k]`, the first token of each segment.
        lengths: int32 `[k]`, the tokens of each segment.
        axis: of the tokens.
        capacity: the tokens of the result.
    """
    if lengths.shape[0] == 0 or data.shape[axis] == 0:
        shape = (*data.shape[:axis], capacity, *data.shape[axis + 1 :])
        return jnp.zeros(shape, data.dtype)

    def take(segments: Segments) -> Array:
        tokens = begins[segments.ids] + segments.position
        return jnp.take(data, tokens, axis, mode="clip")

    return _used_tokens(take, lengths, axis, capacity)


def _used_tokens(
    take: Callable[[Segments], Array], lengths: Array, axis: int, capacity: int
) -> Array:
    """Return what `take` gives for each token, and zeros after the last one."""
    used = UsedCapacity.of(lengths, capacity)
    taken = take(Segments.of(lengths, capacity, used))
    if jnp.issubdtype(taken.dtype, jax.dtypes.prng_key):
        return taken
    valid = along(used.valid, axis, taken.ndim)
    return jnp.where(valid, taken, jnp.zeros((), taken.dtype))


def unpack_padded(
    data: Array, axis: int, lengths: Array, max_length: int, fill: Any
) -> Array:
    """Return padded examples, `[batch, ...]`; see `RaggedArray.to_padded`."""
    return _unpack(data, axis, lengths, max_length, check_fill(fill, data.dtype))


@ft.partial(jax.jit, static_argnums=(1, 3), inline=True)
def _unpack(
    data: Array, axis: int, lengths: Array, max_length: int, fill: Array
) -> Array:
    tokens = jnp.moveaxis(data, axis, 0)
    if tokens.shape[0] == 0:
        tokens = jnp.zeros((1, *tokens.shape[1:]), tokens.dtype)
    index = (jnp.cumsum(lengths) - lengths)[:, None] + positions(max_length)[None]
    x = jnp.take(tokens, index.reshape(-1), 0, mode="clip")
    x = x.reshape(*index.shape, *tokens.shape[1:])
    inside = is_inside(lengths, max_length)
    inside = inside.reshape(*inside.shape, *[1] * (tokens.ndim - 1))
    return jnp.moveaxis(jnp.where(inside, x, fill), 1, axis + 1)


def lengths_of_ids(segment_ids: Any, num_segments: int | None, capacity: int) -> Array:
    """Return the number of tokens of each example; see `from_segment_ids`."""
    ids = check_lengths(segment_ids, "segment_ids")
    _checks.check_shape("segment_ids", ids, capacity=capacity)
    if _checks.is_concrete(ids):
        values = np.asarray(ids)
        if np.any(np.diff(values) < 0) or np.any(values < 0):
            raise ValueError(
                "`segment_ids` must be 0 or more and ascend, got "
                f"{numbers_text(values)}; sort the tokens first"
            )
        if num_segments is None:
            num_segments = int(values.max(initial=-1)) + 1
    elif num_segments is None:
        raise TypeError("`num_segments` must be given where `segment_ids` is traced")
    else:
        ascends = (ids[1:] >= ids[:-1]).all() & (ids >= 0).all()
        message = "`segment_ids` must be 0 or more and ascend; sort the tokens first"
        ids = checked(ids, {message: ascends})
    num_segments = _checks.check_size("num_segments", num_segments, 0)
    return jnp.zeros(num_segments, jnp.int32).at[ids].add(1, mode="drop")
