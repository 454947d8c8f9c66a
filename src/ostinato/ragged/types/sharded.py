"""Batches whose examples are dealt out to the devices of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ... import _checks
from ..._typing import Array, ArrayLike, Int, Shaped
from .checks import check_known
from .cutting import cut
from .padded import PaddedRagged, type_text


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedBatch:
    """Values of equal sizes, one for each example of a batch dealt out to devices.

    A result of `ragged.vmap`, or an array that `ragged.shard` dealt out. It is a
    pytree.

    Attributes:
        data: `[batch, ...]`, the values in the order in which they were dealt, sharded
            along the batch; a PaddedRagged for results with several ragged axes. A sum
            over all examples may read it as it is.
        order: int32 `[batch]`: `data[i]` belongs to example `order[i]` of the caller.
        mesh: the mesh of the devices.
        mesh_axis: the name of its axis, or names, over which examples are dealt.
    """

    data: Any
    order: Int[Array, " batch"]
    mesh: Any = _static()
    mesh_axis: Any = _static()

    def in_order(self) -> Any:
        """Return `data` in the caller's order, which moves it between devices."""

        def ordered(data: Any, order: Array) -> Any:
            places = jnp.argsort(order)
            return jax.tree.map(lambda x: jnp.take(x, places, axis=0), data)

        run: Any = ordered
        explicit = self.mesh.explicit_axes
        if explicit:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            run = jax.sharding.auto_axes(
                ordered, axes=explicit, out_sharding=everywhere
            )
        return run(self.data, self.order)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.order.shape[0]

    def __repr__(self) -> str:
        if isinstance(self.data, PaddedRagged):
            return f"ShardedBatch({self.data}, over {self.mesh_axis!r})"
        return f"ShardedBatch({type_text(self.data)}, over {self.mesh_axis!r})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedRagged:
    """A batch of different sizes whose examples are dealt out to the devices of a mesh.

    The result of `ragged.shard`. Each device has a buffer of its own with the tokens of
    its share of the examples, all of one capacity. It is a pytree.

    Attributes:
        data: the tokens of all buffers, on `axis`, sharded along it.
        lengths: int32 `[batch]`, in the order in which examples were dealt.
        order: int32 `[batch]`: the i-th of these is example `order[i]` of the caller.
        axis: the axis of the tokens, in `data` and in each example.
        dim: the name of the size.
        max_length: see `RaggedArray`.
        mesh: the mesh of the devices.
        mesh_axis: the name of its axis, or names, over which examples are dealt.
    """

    data: Shaped[Array, "shares*capacity ..."]
    lengths: Int[Array, " batch"]
    order: Int[Array, " batch"]
    axis: int = _static()
    dim: str = _static()
    max_length: int = _static()
    mesh: Any = _static()
    mesh_axis: Any = _static()

    @property
    def shares(self) -> int:
        """The number of devices that the examples are dealt out to."""
        return count_of(self.mesh, self.mesh_axis)

    @property
    def capacity(self) -> int:
        """The number of tokens that the buffer of a device can hold."""
        return self.data.shape[self.axis] // self.shares

    @property
    def imbalance(self) -> float:
        """The tokens of the fullest device over those of the mean device, less 1."""
        lengths = np.asarray(check_known("ShardedRagged", self.lengths))
        tokens = lengths.reshape(self.shares, -1).sum(1)
        return float(tokens.max() / tokens.mean() - 1) if tokens.any() else 0

    def with_data(self, data: ArrayLike) -> ShardedRagged:
        """Return the same batch with other tokens, as `RaggedArray.with_data`."""
        data = _checks.check_array("data", data)
        size = self.data.shape[self.axis]
        if data.ndim <= self.axis or data.shape[self.axis] != size:
            raise ValueError(
                f"`data` must have {size} tokens on axis {self.axis}, got shape "
                f"{list(data.shape)}"
            )
        return dataclasses.replace(self, data=data)

    def to_list(self) -> list[Array]:
        """Return the examples in the caller's order. Not under `jit`."""
        lengths = check_known("ShardedRagged", self.lengths)
        shares = lengths.reshape(self.shares, -1)
        begins = np.cumsum(shares, 1) - shares
        begins += self.capacity * np.arange(self.shares)[:, None]
        before = (slice(None),) * self.axis
        tokens = map(slice, begins.ravel(), begins.ravel() + lengths)
        places = [(*before, of) for of in tokens]
        in_order = np.argsort(np.asarray(self.order))
        return cut(self.data, [places[i] for i in in_order])

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.order.shape[0]

    def __repr__(self) -> str:
        return (
            f"ShardedRagged({type_text(self.data)}, {len(self)} examples over "
            f"{self.mesh_axis!r}, dim={self.dim!r}, axis={self.axis}, "
            f"max_length={self.max_length})"
        )


def count_of(mesh: Any, mesh_axis: Any) -> int:
    """Return the number of shares: the size of one axis of a mesh, or of several."""
    names = (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis
    return int(np.prod([mesh.shape[name] for name in names]))


def spec_of(at: int, mesh_axis: Any) -> PartitionSpec:
    """Return the partition of an array that is split along its axis `at`."""
    return PartitionSpec(*[None] * at, mesh_axis)


def is_sharded(x: Any) -> bool:
    """Return whether `x` has been dealt out to devices."""
    return isinstance(x, (ShardedBatch, ShardedRagged))
