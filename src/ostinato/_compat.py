"""Code that depends on the version of JAX; only this module uses private names."""

from __future__ import annotations

import warnings
from typing import Any

from jax.extend.core import Primitive

try:
    from jax._src.dispatch import prim_requires_devices_during_lowering as _with_devices
except ImportError:
    _with_devices = None


def lower_with_devices(primitive: Primitive) -> bool:
    """Tell JAX that this primitive's lowering needs to know the mesh.

    `custom_partitioning` inside a lowering needs this. JAX 0.10 and 0.11 offer it under
    a private name only. Where a JAX lacks it, warn that sharded calls will run
    replicated, and return False.
    """
    if _with_devices is None:
        warnings.warn(
            f"this JAX has no way to partition {primitive.name} over devices: sharded "
            "calls will run replicated; use jax.shard_map, or a JAX that ostinato "
            "supports",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _with_devices.add(primitive)
    return True


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `lax.scan` are constants, and how many carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11: a tree of three parts
    return len(consts), len(carry)
