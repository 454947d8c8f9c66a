"""Arrays sharded like the batch, on meshes with explicit axes.

Such a mesh is strict: the carry of a loop, or what `jnp.where` chooses from, must have
one sharding. A state of zeros that is made inside of `jit` has none.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._typing import Array


def batch_sharding(inputs: Any, states: Any, time_major: bool) -> NamedSharding | None:
    """Return the sharding of `[B]` like the batch axis; None without explicit axes."""
    leaves, axis = jax.tree.leaves(inputs), 1 if time_major else 0
    leaf, axis = (leaves[0], axis) if leaves else (jax.tree.leaves(states)[0], 0)
    sharding = jax.typeof(leaf).sharding
    if not sharding.mesh.explicit_axes:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[axis]))


def with_batch_axis(x: Array, batch: NamedSharding | None) -> Array:
    """Return `x`, `[B, ...]`, sharded like the batch, unless it is along that axis."""
    if batch is None or batch.spec[0] is None:
        return x
    first, *others = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)[: x.ndim]
    if first is not None or batch.spec[0] in others:
        return x
    spec = PartitionSpec(batch.spec[0], *others)
    return jax.sharding.reshard(x, NamedSharding(batch.mesh, spec))


def sharded_like(x: Array, other: Array) -> Array:
    """Return `x` sharded like `other`, of the same shape."""
    sharding = jax.typeof(other).sharding
    if not sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, sharding)
