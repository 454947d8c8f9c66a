"""Functions that make one batch of several arrays, named as those of `jax.numpy`."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _checks
from .._typing import ArrayLike
from .types.array import RaggedArray
from .types.capacity import Size, round_capacity, round_length
from .types.joining import joined_batches


def stack(
    arrays: Sequence[ArrayLike],
    *,
    axis: int = 0,
    dim: str = "n",
    capacity: Size = round_capacity,
    max_length: Size = round_length,
) -> RaggedArray:
    """Make a batch of its examples; the same as `RaggedArray.from_list`.

    Args:
        arrays: arrays that differ in the size of `axis` alone.
        axis: the axis of different sizes.
        dim: the name of the size.
        capacity: see `RaggedArray.from_list`.
        max_length: see `RaggedArray.from_list`.

    Raises:
        TypeError, ValueError: as `RaggedArray.from_list`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> ragged.stack([jnp.arange(3.0), jnp.arange(2.0)])
        RaggedArray(float32[5], n=[3, 2], axis=0, max_length=4)
    """
    return RaggedArray.from_list(
        arrays, axis=axis, dim=dim, capacity=capacity, max_length=max_length
    )


def concatenate(
    batches: Sequence[RaggedArray], *, capacity: Size = round_capacity
) -> RaggedArray:
    """Join batches: return one batch of all their examples.

    To join the examples themselves, map `jnp.concatenate` by `ragged.vmap`.

    Args:
        batches: RaggedArrays of one dtype, `axis`, `dim` and shape of a token.
        capacity: the capacity of the result: a number, or a function of the number of
            tokens, which is taken for the sum of all capacities if lengths are traced.

    Returns:
        A RaggedArray with the largest `max_length` of `batches`.

    Raises:
        TypeError: `batches` is not a sequence of RaggedArrays, or dtypes differ.
        ValueError: `batches` is empty; axes, dims or shapes differ; `capacity` is too
            small.

    Holds under `jit`, `grad` and `vmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> one = ragged.stack([jnp.arange(3.0)])
        >>> ragged.concatenate([one, ragged.stack([jnp.arange(2.0), jnp.arange(1.0)])])
        RaggedArray(float32[6], n=[3, 2, 1], axis=0, max_length=4)
    """
    if isinstance(batches, RaggedArray):
        raise TypeError(
            f"`batches` must be a sequence of RaggedArrays, got one: {batches}"
        )
    batches = list(batches)
    for i, batch in enumerate(batches):
        if not isinstance(batch, RaggedArray):
            raise TypeError(
                f"`batches[{i}]` must be a RaggedArray, got {_checks.describe(batch)}; "
                "ragged.stack makes one of arrays"
            )
    if not batches:
        raise ValueError("`batches` must hold at least one RaggedArray, got none")
    data, lengths, axis, max_length = joined_batches(batches, capacity)
    dim = batches[0].dim
    return RaggedArray(data, lengths, axis=axis, dim=dim, max_length=max_length)
