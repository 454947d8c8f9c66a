"""Indices `array[arange(n), i]` as those of an array for each sequence.

JAX takes the pairs of numbers for any places: the derivative of a write must find out
which of several writes to one place is the last. Each place has a row of its own here.
"""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .jaxprs import evaluate, is_literal, read, struct, type_of

_INDEXING = frozenset({"gather", "scatter", "scatter-add"})
_MOST = 2**16


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    numbers = np.arange(shape[dimension], dtype=dtype)
    return np.broadcast_to(numbers.reshape(sizes), shape)


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = np.ones(len(shape), int)
    sizes[list(broadcast_dimensions)] = np.shape(x)
    return np.broadcast_to(np.reshape(x, sizes), shape)


def _select(which: Any, *cases: Any, **_: Any) -> np.ndarray:
    every = np.stack([*np.broadcast_arrays(*cases)])
    which = np.broadcast_to(np.asarray(which, int), every.shape[1:])
    return np.take_along_axis(every, which[None], 0)[0]


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, **_: np.add(a, b),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda x, new_dtype, **_: np.asarray(x, new_dtype),
    "iota": _iota,
    "lt": lambda a, b, **_: np.less(a, b),
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "select_n": _select,
}
"""What makes the numbers from 0 on, as `jnp` does, in NumPy.

JAX would compute them in the trace or the `shard_map` around the step.
"""


@ft.lru_cache(maxsize=256)
def with_own_rows(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat jaxpr in which such operations have an axis of sequences."""
    if not any(eqn.primitive.name in _INDEXING for eqn in jaxpr.eqns):
        return jaxpr
    numbers = _numbers(jaxpr)
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    replaced: list[Any] = []

    def hook(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if eqn.primitive.name not in _INDEXING:
            return None
        index: Any = eqn.invars[1]
        pairs = None if is_literal(index) else made.get(index)
        if pairs is None or pairs.primitive.name != "concatenate":
            return None
        results = _on_own_rows(eqn, inputs, numbers.get(pairs.invars[0]))
        replaced.extend(results or [])
        return results

    def run(*arguments: Any) -> list[Any]:
        return evaluate(ClosedJaxpr(jaxpr, ()), arguments, hook)

    closed = jax.make_jaxpr(run)(*(struct(v.aval) for v in jaxpr.invars))
    assert not closed.consts, "a step that has been traced closes over nothing"
    return closed.jaxpr if replaced else jaxpr


def _numbers(jaxpr: Jaxpr) -> dict[Any, np.ndarray]:
    """Return the values of integers that depend on nothing."""
    found: dict[Any, np.ndarray] = {}
    for eqn in jaxpr.eqns:
        known = all(is_literal(v) or v in found for v in eqn.invars)
        compute = _OF_NUMBERS.get(eqn.primitive.name)
        if known and compute is not None and _is_small(type_of(eqn.outvars[0])):
            given = [read(v, found) for v in eqn.invars]
            if not all(map(_is_whole, given)):
                continue
            found[eqn.outvars[0]] = np.asarray(compute(*given, **eqn.params))
    return found


def _is_whole(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "biu"


def _is_small(aval: Any) -> bool:
    """Return whether there are few integers, or truth values, of a known number."""
    if not (np.issubdtype(aval.dtype, np.integer) or aval.dtype == bool):
        return False
    return not any(map(is_symbolic_dim, aval.shape)) and math.prod(aval.shape) <= _MOST


def _on_own_rows(
    eqn: JaxprEqn, inputs: list[Any], first: np.ndarray | None
) -> list[Any] | None:
    """Return the results of an operation whose first index is the row's number.

    Args:
        eqn: a gather or scatter.
        inputs: the array, the indices, and what is written.
        first: the numbers that index the first axis, if they are known.
    """
    gathers = eqn.primitive.name == "gather"
    d = eqn.params["dimension_numbers"]
    axes, dropped = (
        (d.start_index_map, d.collapsed_slice_dims)
        if gathers
        else (d.scatter_dims_to_operand_dims, d.inserted_window_dims)
    )
    count = inputs[0].shape[0]
    index = inputs[1]
    if (
        first is None
        or d.operand_batching_dims
        or len(axes) < 2
        or axes[0] != 0
        or 0 not in dropped
        or first.shape != (count, *[1] * (index.ndim - 1))
        or index.shape != (*first.shape[:-1], len(axes))
        or not np.array_equal(first.ravel(), np.arange(count))
    ):
        return None
    rest = tuple(a for a in dropped if a != 0)
    of_batch = dict(operand_batching_dims=(0,))
    if gathers:
        of_batch["start_indices_batching_dims"] = (0,)
        d = d._replace(start_index_map=axes[1:], collapsed_slice_dims=rest, **of_batch)
    else:
        of_batch["scatter_indices_batching_dims"] = (0,)
        d = d._replace(
            scatter_dims_to_operand_dims=axes[1:],
            inserted_window_dims=rest,
            **of_batch,
        )
    params = {**eqn.params, "dimension_numbers": d, "unique_indices": True}
    operands = [inputs[0], index[..., 1:], *inputs[2:]]
    return [eqn.primitive.bind(*map(jnp.asarray, operands), **params)]
