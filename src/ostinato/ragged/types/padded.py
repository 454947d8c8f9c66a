"""Batches of arrays that differ in the sizes of several axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ... import _checks
from ..._typing import Array, Shaped
from .checks import check_index, check_known, refuse_in
from .cutting import Place, cut


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PaddedRagged:
    """A batch of arrays that differ in the sizes of two axes or more.

    Attention scores are an example.

    Attributes:
        data: `[batch, ...]`, padded with zeros.
        lengths: for each such axis int32 `[batch]`.
        dims: for each of them, the axis of one example and the name of its size.
    """

    data: Shaped[Array, "batch ..."]
    lengths: tuple[Array, ...]
    dims: tuple[tuple[int, str], ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """The dtype of `data`."""
        return self.data.dtype

    def to_list(self) -> list[Array]:
        """Return the examples without padding. Not under `jit`."""
        sizes = [check_known("PaddedRagged", lengths) for lengths in self.lengths]
        places: list[Place] = []
        for number in range(len(self)):
            place: list[slice | int] = [slice(None)] * self.data.ndim
            place[0] = number
            for (axis, _), size in zip(self.dims, sizes, strict=True):
                place[axis + 1] = slice(int(size[number]))
            places.append(tuple(place))
        return cut(self.data, places)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.lengths[0].shape[0]

    def __getitem__(self, index: Any) -> Array:
        """Return one example without padding. `lengths` must not be traced."""
        number = check_index(index, len(self))
        example = self.data[number]
        for (axis, _), lengths in zip(self.dims, self.lengths, strict=True):
            size = int(check_known("PaddedRagged", lengths)[number])
            example = jax.lax.slice_in_dim(example, 0, size, axis=axis)
        return example

    def __iter__(self) -> Iterator[Array]:
        """Iterate over the examples without padding. `lengths` must not be traced."""
        return (self[i] for i in range(len(self)))

    def __contains__(self, x: Any) -> bool:
        """Raise TypeError: examples are arrays, whose `==` is no truth value."""
        refuse_in("PaddedRagged")

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}@{axis}={numbers_text(lengths)}"
            for (axis, name), lengths in zip(self.dims, self.lengths, strict=True)
        )
        return f"PaddedRagged({type_text(self.data)}, {sizes})"


def type_text(x: Any) -> str:
    """Return dtype and shape of an array, as a repr shows them."""
    if not hasattr(x, "shape"):
        return type(x).__name__
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def numbers_text(x: Any) -> str:
    """Return the numbers in an array of integers, as a repr shows them."""
    if not isinstance(x, (jax.Array, np.ndarray)) or not _checks.is_concrete(x):
        return f"traced {type_text(x)}" if hasattr(x, "shape") else type_text(x)
    values = np.asarray(x).tolist()
    if len(values) > 16:
        return f"[{', '.join(map(str, values[:12]))}, ... {len(values)} in all]"
    return str(values)
