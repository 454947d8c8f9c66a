"""Batches of arrays that differ in the sizes of several axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ... import _checks
from ..._typing import Array
from .checks import check_known, check_place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PaddedRagged:
    """Arrays that differ in the sizes of two axes or more, such as attention scores.

    Attributes:
        data: `[batch, ...]`, padded with zeros.
        lengths: for each such axis int32 `[batch]`.
        dims: for each of them, the axis of one example and the name of its size.
    """

    data: Array
    lengths: tuple[Array, ...]
    dims: tuple[tuple[int, str], ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """The dtype of `data`."""
        return self.data.dtype

    def to_list(self) -> list[Array]:
        """The examples without padding. Not under `jit`."""
        return list(self)

    def __len__(self) -> int:
        """The number of examples."""
        return self.lengths[0].shape[0]

    def __getitem__(self, index: Any) -> Array:
        """One example without padding. `lengths` must not be traced."""
        place = check_place(index, len(self))
        example = self.data[place]
        for (axis, _), lengths in zip(self.dims, self.lengths, strict=True):
            size = int(check_known("PaddedRagged", lengths)[place])
            example = jax.lax.slice_in_dim(example, 0, size, axis=axis)
        return example

    def __iter__(self) -> Iterator[Array]:
        """The examples without padding. `lengths` must not be traced."""
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}@{axis}={numbers(lengths)}"
            for (axis, name), lengths in zip(self.dims, self.lengths, strict=True)
        )
        return f"PaddedRagged({kind(self.data)}, {sizes})"


def kind(x: Any) -> str:
    """Dtype and shape of an array, as a repr shows them."""
    if not hasattr(x, "shape"):
        return type(x).__name__
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def numbers(x: Any) -> str:
    """The numbers in an array of integers, as a repr shows them."""
    if not isinstance(x, (jax.Array, np.ndarray)) or not _checks.is_concrete(x):
        return f"traced {kind(x)}" if hasattr(x, "shape") else kind(x)
    values = np.asarray(x).tolist()
    if len(values) > 16:
        return f"[{', '.join(map(str, values[:12]))}, ... {len(values)} in all]"
    return str(values)
