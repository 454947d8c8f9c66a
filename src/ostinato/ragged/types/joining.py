"""Batches made of examples of other batches: selection, concatenation, stacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _checks
from ..._typing import Array
from .building import check_capacity, take_tokens
from .capacity import Size, chosen_size
from .segments import UsedCapacity, along, safe_fill


def example_numbers(index: Any, batch: int) -> Any:
    """Return the numbers of the examples that an index of several examples selects.

    Args:
        index: a slice, or integers or bools `[k]`: an array or a list.
        batch: the number of examples.

    Returns:
        int32 `[k]`, not negative: numpy's, or JAX's where `index` is traced.
    """
    if isinstance(index, slice):
        return np.arange(batch, dtype=np.int32)[index]
    wanted = "an integer, a slice, or a vector of integers or bools"
    if isinstance(index, tuple) or (
        not hasattr(index, "dtype") and not isinstance(index, list)
    ):
        raise TypeError(
            f"the index of examples must be {wanted}, got {_checks.describe(index)}"
        )
    if isinstance(index, list):
        index = np.asarray(index, None if index else np.int32)
    if index.ndim != 1 or index.dtype.kind not in "iub":
        raise TypeError(
            f"the index of examples must be {wanted}, got {_checks.describe(index)}"
        )
    if index.dtype == np.bool_:
        _checks.check_shape("index", index, batch=batch)
        if not _checks.is_concrete(index):
            raise TypeError(
                "the index of examples must hold integers under jit, where the number "
                "of True elements is not known, got traced bools"
            )
        return np.flatnonzero(np.asarray(index)).astype(np.int32)
    if not _checks.is_concrete(index):
        index = _checks.clamped(index, -batch, batch - 1)
        return jnp.where(index < 0, index + batch, index)
    numbers = np.asarray(index)
    wrong = numbers[(numbers < -batch) | (numbers >= batch)]
    if wrong.size:
        raise IndexError(f"no example {wrong[0]} in a batch of {batch}")
    return (numbers.astype(np.int64) % max(batch, 1)).astype(np.int32)


def take_examples(
    data: Array, axis: int, lengths: Array, numbers: Any, most_tokens: int, size: Size
) -> tuple[Array, Array]:
    """Return the tokens and the lengths of some examples.

    Args:
        data: the tokens of all examples, on `axis`.
        axis: the axis of the tokens.
        lengths: int32 `[batch]`.
        numbers: integers `[k]`, the examples, with repeats or without.
        most_tokens: the tokens of the result at most, for traced lengths.
        size: the capacity of the result, of its number of tokens.
    """
    if _checks.is_concrete(lengths) and _checks.is_concrete(numbers):
        known = np.asarray(lengths)
        chosen = known[np.asarray(numbers)]
        begins = (np.cumsum(known) - known)[np.asarray(numbers)]
        capacity = chosen_size("capacity", size, int(chosen.sum()))
    else:
        chosen = lengths[numbers]
        begins = (jnp.cumsum(lengths) - lengths)[numbers]
        capacity = chosen_size("capacity", None, most_tokens)
    chosen = jnp.asarray(chosen, jnp.int32)
    begins = jnp.asarray(begins, jnp.int32)
    return take_tokens(data, begins, chosen, axis, capacity), chosen


def map_tokens(
    function: Callable[[Array], Array], data: Array, axis: int, lengths: Array
) -> tuple[Array, int]:
    """Return `function` of every token, and the axis of the tokens in the result.

    The unused capacity repeats the first token while `function` runs, so that it adds
    no NaN to a gradient.
    """
    shapes = jax.eval_shape(
        function,
        jax.ShapeDtypeStruct(data.shape[:axis] + data.shape[axis + 1 :], data.dtype),
    )
    if not hasattr(shapes, "shape"):
        raise TypeError(
            "`function` must return one array, got "
            f"{jax.tree.structure(shapes)}; map each result by itself"
        )
    out_axis = axis if shapes.ndim >= axis else 0
    capacity = data.shape[axis]
    used = UsedCapacity.of(lengths, capacity)
    first = jax.lax.slice_in_dim(data, 0, min(capacity, 1), axis=axis)
    first = safe_fill(used.any_token, first, integer=1)
    safe = jnp.where(along(used.valid, axis, data.ndim), data, first)
    out = jax.vmap(function, axis, out_axis)(safe)
    valid = along(used.valid, out_axis, out.ndim)
    return jnp.where(valid, out, jnp.zeros((), out.dtype)), out_axis


def joined_batches(
    batches: Sequence[Any], capacity: Size
) -> tuple[Array, Array, int, int]:
    """Return tokens, lengths, axis and `max_length` of batches one after another.

    Args:
        batches: RaggedArrays of one dtype, shape of a token, axis and dim.
        capacity: as in `concatenate`.
    """
    first = batches[0]
    for i, batch in enumerate(batches):
        for name in ("dtype", "axis", "dim"):
            want, got = getattr(first, name), getattr(batch, name)
            if want != got:
                kind = TypeError if name == "dtype" else ValueError
                raise kind(
                    f"`batches[{i}]` must have the {name} of `batches[0]`, {want!s}, "
                    f"got {got!s}"
                )
        if batch.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"`batches[{i}]` must have the shape of `batches[0]` after the batch, "
                f"{list(first.shape[1:])}, got {list(batch.shape[1:])}"
            )
    axis = first.axis
    begins, offset = [], 0
    for batch in batches:
        begins.append(jnp.cumsum(batch.lengths) - batch.lengths + offset)
        offset += batch.capacity
    lengths = jnp.concatenate([batch.lengths for batch in batches])
    known = _checks.is_concrete(lengths)
    tokens = int(np.asarray(lengths).sum()) if known else offset
    size = chosen_size("capacity", capacity, tokens)
    if known:
        check_capacity(size, tokens)
    data = take_tokens(
        jnp.concatenate([batch.data for batch in batches], axis),
        jnp.concatenate(begins),
        lengths,
        axis,
        size,
    )
    return data, lengths, axis, max(batch.max_length for batch in batches)
