"""`Sizes`: the sizes of one example, for functions of a padded example."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._typing import Array
from ..primitives.constant import constant
from ..types.segments import along, positions
from . import sizes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one example, as `Context.batched` hands them to its function."""

    values: Mapping[str, Any]

    def __call__(self, dim: Any) -> Any:
        """Return the size `dim` of this example: an int32 scalar, or an int.

        It is negative only where the example is shorter than `min_length`.
        """
        return sizes.evaluate(dim, self.values) if sizes.is_symbolic(dim) else int(dim)

    def mask(self, x: Array, axis: int, dim: Any) -> Array:
        """Return where `x` is not padding along `axis`, in a shape that broadcasts."""
        return along(positions(x.shape[axis]) < self(dim), axis, x.ndim)

    def cleared(self, x: Array, shape: tuple[Any, ...], fill: Any = 0) -> Array:
        """Return `x`, of one example's shape `shape`, with `fill` in its padding."""
        inside: Any = True
        for axis in sizes.symbolic_axes(shape):
            inside &= self.mask(x, axis, shape[axis])
        return x if inside is True else jnp.where(inside, x, jnp.asarray(fill, x.dtype))

    def backwards(self, x: Array, axis: int, dim: Any) -> Array:
        """Return `x` with its valid slices along `axis` from the last to the first.

        Padding repeats the last one of the result.
        """
        index = self(dim) - 1 - positions(x.shape[axis])
        return jnp.take(x, jnp.maximum(index, 0), axis, mode="clip")

    def repeat_last(self, x: Array, axis: int, dim: Any) -> Array:
        """Return `x` with its last valid slice along `axis`, a constant, as padding."""
        if not sizes.is_symbolic(dim) or x.shape[axis] == 0:
            return x
        last = jnp.maximum(self(dim) - 1, 0)
        last = constant(lax.dynamic_index_in_dim(x, last, axis))
        return jnp.where(self.mask(x, axis, dim), x, last)
