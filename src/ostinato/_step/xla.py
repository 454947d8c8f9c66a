"""The loops over a step as XLA runs them: forward, and backward in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._rnn.accumulation import accumulation_dtype
from .._typing import Array
from .gradients import Derivative, Policy, is_float
from .jaxprs import evaluate
from .split import Step


class Loop(NamedTuple):
    """What is static in a loop.

    Attributes:
        step: the step.
        length: the number of steps.
        reverse: whether the last step runs first.
        policy: what the forward pass saves for the backward pass, as for
            `jax.checkpoint`.
    """

    step: Step
    length: int
    reverse: bool
    policy: Policy


def forward(
    loop: Loop, derivative: Derivative | None, operands: Sequence[Array]
) -> list[Array]:
    """Run the loop.

    Args:
        loop: what is static.
        derivative: if given, values for its backward step are saved.
        operands: invariant values, inputs `[T, ...]` and initial states.

    Returns:
        Final states, outputs `[T, ...]`, then saved states and values `[T, ...]`.
    """
    step = loop.step
    invariant, inputs, states = parts(step, operands)
    traced = step.traced if derivative is None else derivative.forward
    kept = () if derivative is None else derivative.saved_states

    def body(states: list[Array], at: list[Array]) -> tuple[list[Array], list[Array]]:
        results = evaluate(traced, [*invariant, *at, *states])
        saved = [states[i] for i in kept]
        new, rest = results[: step.num_states], results[step.num_states :]
        num_outputs = len(step.jaxpr.outvars) - step.num_states
        return new, [*rest[:num_outputs], *saved, *rest[num_outputs:]]

    final, stacked = lax.scan(
        body, states, inputs, length=loop.length, reverse=loop.reverse
    )
    return [*final, *stacked]


def backward(
    loop: Loop,
    derivative: Derivative,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> tuple[dict[int, Array], dict[int, Array], list[Array]]:
    """Run the loop backwards.

    Args:
        loop: what is static.
        derivative: of the step.
        operands: as in `forward`; initial states are not read.
        saved: what `forward` saved, in its order.
        cotangents: of the final states and of the outputs that have derivatives.

    Returns:
        The cotangents of invariant values and of inputs, by position, and those of the
        states that have derivatives.
    """
    step = derivative.step
    invariant, inputs, _ = parts(step, operands)
    more = evaluate(derivative.before_backward, invariant)
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    num_states = sum(is_float(v.aval) for v in states)
    num_inputs, num_sums = len(derivative.inputs), len(derivative.invariant)

    def body(carry: Any, at: Any) -> Any:
        d_states, sums = carry
        at_inputs, at_saved, d_outputs = at
        given = [*invariant, *more, *at_inputs, *at_saved, *d_states, *d_outputs]
        results = evaluate(derivative.backward, given)
        d_states, rest = results[:num_states], results[num_states:]
        d_inputs, rest = rest[:num_inputs], rest[num_inputs:]
        parts_of_sums, pairs = rest[:num_sums], rest[num_sums:]
        added = [
            s + p.astype(s.dtype) for s, p in zip(sums, parts_of_sums, strict=True)
        ]
        return (d_states, added), (d_inputs, pairs)

    wide = [_zeros_wide(invariant[i]) for i in derivative.invariant]
    (d_states, sums), (d_inputs, pairs) = lax.scan(
        body,
        (list(cotangents[:num_states]), wide),
        (inputs, list(saved), list(cotangents[num_states:])),
        length=loop.length,
        reverse=not loop.reverse,
    )
    d_invariant = {
        i: total.astype(invariant[i].dtype)
        for i, total in zip(derivative.invariant, sums, strict=True)
    }
    for k, product in enumerate(derivative.products):
        weight = invariant[product.weight]
        gradient = _weight_gradient(product, weight, pairs[2 * k], pairs[2 * k + 1])
        there = d_invariant.get(product.weight)
        d_invariant[product.weight] = gradient if there is None else there + gradient
    by_input = dict(zip(derivative.inputs, d_inputs, strict=True))
    return d_invariant, by_input, d_states


def parts(step: Step, operands: Sequence[Any]) -> tuple[list, list, list]:
    """Return invariant values, inputs and states of a loop's operands."""
    first = step.num_invariant + step.num_inputs
    operands = list(operands)
    return (
        operands[: step.num_invariant],
        operands[step.num_invariant : first],
        operands[first : first + step.num_states],
    )


def _weight_gradient(product: Any, weight: Array, x: Array, dy: Array) -> Array:
    """Return the gradient of a weight: one product of all steps."""

    def all_steps(weight: Array) -> Array:
        return jax.vmap(product, in_axes=(0, None))(x, weight)

    (gradient,) = jax.linear_transpose(all_steps, weight)(dy)
    return gradient


def _zeros_wide(a: Array) -> Array:
    return jnp.zeros(a.shape, accumulation_dtype(a.dtype))
