"""The loops over a step as XLA runs them: forward, and backward in reverse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._rnn.accumulation import accumulation_dtype
from .._typing import Array
from .gradients import Derivative, Mask, Policy, differentiate, is_float
from .jaxprs import evaluate, split_at, variables
from .split import PRODUCTS, Step


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


def forward(loop: Loop, wrt: Mask | None, operands: Sequence[Array]) -> list[Array]:
    """Run the loop.

    Args:
        loop: what is static.
        wrt: if given, what the loop is differentiated with respect to, so that values
            are saved for `backward`.
        operands: invariant values, inputs `[T, ...]` and initial states.

    Returns:
        Final states, outputs `[T, ...]`, then saved values `[T, ...]`.
    """
    invariant, inputs, states = parts(loop.step, operands)
    step, ahead = loop.step, []
    if wrt is not None or _pays_ahead(step):
        step, ahead = loop.step.taken.core, products_ahead(loop, invariant, inputs)
        inputs = [*(inputs[i] for i in loop.step.taken.kept), *ahead]
    derivative = None if wrt is None else derivative_of(loop, wrt)
    traced = step.traced if derivative is None else derivative.forward
    kept = () if derivative is None else derivative.saved_states
    num_outputs = len(step.jaxpr.outvars) - step.num_states

    def body(states: list[Array], at: list[Array]) -> tuple[list[Array], list[Array]]:
        results = evaluate(traced, [*invariant, *at, *states])
        new, outputs, saved = split_at(
            results, [step.num_states, step.num_states + num_outputs]
        )
        return new, [*outputs, *(states[i] for i in kept), *saved]

    final, stacked = lax.scan(
        body, states, inputs, length=loop.length, reverse=loop.reverse
    )
    saved = ahead if wrt is not None and saves_products(loop) else []
    return [*final, *stacked, *saved]


def _pays_ahead(step: Step) -> bool:
    """Return whether products of inputs are quicker ahead of a loop without gradients.

    They are for one sequence, where a product of all steps reads its matrix once; for
    more, XLA multiplies as fast in the loop and need not store the results.
    """
    products = [e for e in step.taken.ahead.jaxpr.eqns if e.primitive.name in PRODUCTS]
    return any(e.outvars[0].aval.shape[:1] == (1,) for e in products)


def products_ahead(
    loop: Loop, invariant: Sequence[Array], inputs: Sequence[Array]
) -> list[Array]:
    """Return the products of inputs of all steps, `[T, ...]`."""
    taken = loop.step.taken
    if not taken.ahead.jaxpr.outvars:
        return []
    read = {v for e in taken.ahead.jaxpr.eqns for v in variables(e)}
    variables_of = taken.ahead.jaxpr.invars[len(invariant) :]
    axes = [0 if v in read else None for v in variables_of]
    given = [
        a if v in read else a[:0] for v, a in zip(variables_of, inputs, strict=True)
    ]
    return jax.vmap(
        lambda *at: evaluate(taken.ahead, [*invariant, *at]), in_axes=tuple(axes)
    )(*given)


def saves_products(loop: Loop) -> bool:
    """Return whether `policy` saves the products of inputs, computed ahead."""
    return loop.policy is not None and any(
        loop.policy(e.primitive, *(v.aval for v in e.invars), **e.params)
        for e in loop.step.taken.ahead.jaxpr.eqns
        if e.primitive.name in PRODUCTS
    )


def derivative_of(loop: Loop, wrt: Mask) -> Derivative:
    """Return the derivative of the loop's core with respect to what `wrt` leads to."""
    taken = loop.step.taken
    invariant, inputs, states = parts(loop.step, wrt)
    read = {v for e in taken.ahead.jaxpr.eqns for v in variables(e)}
    leads = any(
        w for v, w in zip(taken.ahead.jaxpr.invars, wrt, strict=False) if v in read
    )
    ahead = [leads] * len(taken.ahead.jaxpr.outvars)
    mask = (*invariant, *(inputs[i] for i in taken.kept), *ahead, *states)
    return differentiate(taken.core, mask, loop.policy)


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> dict[int, Array]:
    """Run the loop backwards.

    Args:
        loop: what is static.
        wrt: as in `forward`.
        operands: as in `forward`; initial states are not read.
        saved: what `forward` saved, in its order.
        cotangents: of the final states and of the outputs that have derivatives.

    Returns:
        The cotangents of operands, by position; of others it is 0.
    """
    whole, taken = loop.step, loop.step.taken
    invariant, inputs, states = parts(whole, operands)
    derivative = derivative_of(loop, wrt)

    def ahead(invariant: list[Array], inputs: list[Array]) -> list[Array]:
        return products_ahead(loop, invariant, inputs)

    products, pull = jax.vjp(ahead, invariant, inputs)
    if saves_products(loop):
        count = len(saved) - len(products)
        saved, products = saved[:count], list(saved[count:])
    core_inputs = [*(inputs[i] for i in taken.kept), *products]
    d_invariant, d_inputs, d_states = _backward_core(
        loop, derivative, invariant, core_inputs, saved, cotangents
    )
    first = whole.num_invariant + whole.num_inputs
    found = dict(d_invariant)
    for k, i in enumerate(taken.kept):
        if k in d_inputs:
            found[whole.num_invariant + i] = d_inputs[k]
    floats = [i for i, a in enumerate(states) if is_float(a)]
    found |= {first + i: d for i, d in zip(floats, d_states, strict=True)}
    places = [len(taken.kept) + k for k in range(len(products))]
    if any(k in d_inputs for k in places):
        bar = [d_inputs[k] for k in places]
        for i, d in enumerate(itertools.chain(*pull(bar))):
            if wrt[i]:
                found[i] = found[i] + d if i in found else d
    return found


def _backward_core(
    loop: Loop,
    derivative: Derivative,
    invariant: list[Array],
    inputs: list[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> tuple[dict[int, Array], dict[int, Array], list[Array]]:
    """Return cotangents of invariant values and inputs, by position, and of states."""
    step = derivative.step
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
