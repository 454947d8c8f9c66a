"""Indices `array[arange(n), i]` as those of an array for each sequence.

JAX takes the pairs of numbers for any places: the derivative of a write must find out
which of several writes to one place is the last. Each place has a row of its own here.
"""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .integers import computed
from .jaxprs import evaluate, is_literal, read, struct

_INDEXING = frozenset({"gather", "scatter", "scatter-add"})


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
        if all(is_literal(v) or v in found for v in eqn.invars):
            numbers = computed(eqn, [read(v, found) for v in eqn.invars])
            if numbers is not None:
                found[eqn.outvars[0]] = numbers
    return found


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
