"""Integers and truth values that a program writes down, computed in NumPy.

JAX would compute them in the trace or the `shard_map` around the step. With these, the
divisor of `x % 5` is the number 5, which bounds the remainder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

_MOST = 2**16


def computed(eqn: JaxprEqn, inputs: Sequence[Any]) -> np.ndarray | None:
    """Return what an equation makes of few integers that are known, else None."""
    compute = _COMPUTE.get(eqn.primitive.name)
    if compute is None or not all(map(_is_known, inputs)):
        return None
    result: Any = eqn.outvars[0].aval
    if not _is_small(result):
        return None
    return np.asarray(compute(*inputs, **eqn.params), result.dtype)


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.Array) and np.asarray(x).dtype.kind in "biu"


def _is_small(aval: Any) -> bool:
    """Return whether there are few integers, or truth values, of a known number."""
    if not any(jnp.issubdtype(aval.dtype, kind) for kind in (np.integer, np.bool_)):
        return False
    return not any(map(is_symbolic_dim, aval.shape)) and math.prod(aval.shape) <= _MOST


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    numbers = np.arange(shape[dimension], dtype=dtype)
    return np.broadcast_to(numbers.reshape(sizes), shape)


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = np.ones(len(shape), int)
    sizes[list(broadcast_dimensions)] = np.shape(x)
    return np.broadcast_to(np.reshape(x, sizes), shape)


def _reshape(x: Any, *, new_sizes: Any, dimensions: Any, **_: Any) -> np.ndarray:
    order = range(np.ndim(x)) if dimensions is None else dimensions
    return np.reshape(np.transpose(x, order), new_sizes)


def _select(which: Any, *cases: Any) -> np.ndarray:
    every = np.stack([*np.broadcast_arrays(*cases)])
    which = np.broadcast_to(np.asarray(which, int), every.shape[1:])
    return np.take_along_axis(every, which[None], 0)[0]


_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda x, new_dtype, **_: np.asarray(x).astype(new_dtype),
    "eq": np.equal,
    "gt": np.greater,
    "iota": _iota,
    "lt": np.less,
    "ne": np.not_equal,
    "reshape": _reshape,
    "select_n": _select,
    "sign": np.sign,
}
"""The operations by which `jnp` counts from 0 and divides."""
