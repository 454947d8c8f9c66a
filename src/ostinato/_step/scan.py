"""A loop over a step, with the interface of `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from . import primitive
from .gradients import Policy
from .jaxprs import flat_trace
from .split import split
from .xla import Loop


def scan(
    body: Callable,
    arrays: Any,
    states: Any,
    inputs: Any,
    *,
    length: int,
    reverse: bool = False,
    policy: Policy = None,
) -> tuple[Any, Any] | str:
    """Run `body(arrays, states, inputs_t)` over all steps, as `lax.scan` would.

    Args:
        body: returns `(new_states, outputs_t)`, the states in unchanged types.
        arrays: a pytree of arrays that do not change.
        states: a pytree of arrays.
        inputs: a pytree of arrays, time first.
        length: the number of steps.
        reverse: whether the last step runs first.
        policy: what is saved for the backward pass, as for `jax.checkpoint`; None saves
            states alone.

    Returns:
        `(states, outputs)`; or the reason why this step cannot be taken apart.
    """
    given, tree = jax.tree.flatten((arrays, states))
    leaves, input_tree = jax.tree.flatten(inputs)
    num_states = len(jax.tree.leaves(states))
    at_step = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in leaves]
    results: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        arrays, states = jax.tree.unflatten(tree, values[: len(given)])
        at = jax.tree.unflatten(input_tree, values[len(given) :])
        new, tree_of_results = jax.tree.flatten(body(arrays, states, at))
        results.append(tree_of_results)
        return new

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    traced = flat_trace(flat, *avals, *at_step)
    reason = unsupported_reason(traced)
    if reason is not None:
        return reason
    # The arrays that the step closes over are invariant too.
    closed = traced.jaxpr.replace(
        constvars=[], invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars]
    )
    arrays_and_consts = [*traced.consts, *given[: len(given) - num_states]]
    taken = split(ClosedJaxpr(closed, []), len(arrays_and_consts), num_states)
    invariant, per_step = taken.before_loop(arrays_and_consts, leaves)
    operands = [*map(jnp.asarray, invariant), *per_step, *given[-num_states:]]
    out = primitive.run(Loop(taken.step, length, reverse, policy), operands)
    return jax.tree.unflatten(results[-1], out)


def unsupported_reason(traced: ClosedJaxpr) -> str | None:
    """Return why a step cannot be taken apart, or None."""
    if traced.effects:
        return f"the step has effects: {', '.join(map(str, traced.effects))}"
    for aval in _types(traced.jaxpr):
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return "the step has complex values"
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return "the step has PRNG keys"
    return None


def _types(jaxpr: Any) -> list[Any]:
    """Return the types of all values of a jaxpr and of its inner ones."""
    types = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    for eqn in jaxpr.eqns:
        types += [v.aval for v in eqn.outvars]
        for inner in jaxprs_in_params(eqn.params):
            types += _types(inner)
    return types
