"""Parts of arrays, cut on the host: `lax.slice` compiles a program for every size."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ... import _checks
from ..._typing import Array

Place = tuple[slice | int, ...]


def cut(data: Array, places: Sequence[Place]) -> list[Array]:
    """Return `data[place]` for each place, on the device of `data`.

    Traced arrays, random keys and arrays of other processes are sliced by JAX. What is
    spread over several devices comes on the default one.
    """
    if not _can_be_read(data):
        return [data[place] for place in places]
    alone = data.committed and len(data.sharding.device_set) == 1
    device = data.device if alone else None
    host = np.asarray(data)
    return jax.device_put([np.array(host[place]) for place in places], device)


def _can_be_read(data: Array) -> bool:
    concrete = isinstance(data, jax.Array) and _checks.is_concrete(data)
    if not concrete or jnp.issubdtype(data.dtype, jax.dtypes.extended):
        return False
    return data.is_fully_addressable
