"""The loops over a step as XLA runs them: forward, and backward in reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._compat import draws_from_first
from .._padding import select
from .._rnn.accumulation import accumulation_dtype
from .._segments import near_divisor, scan_segments
from .._typing import Array
from .cost import pays_hoisting
from .gradients import Derivative, Mask, Policy, is_float, weight_gradient
from .jaxprs import evaluate, known_product, run_one, split_at, split_by, variables
from .masks import StepMask
from .maxima import with_own_derivative
from .policies import best_derivative
from .split import PRODUCTS, Step

_BLOCK, _ROWS = 64, 256
"""A block has this many steps at least, and this many rows of products about."""
_SHARE = 4
"""Blocks pay if what exists for one at a time is more than 1 / _SHARE of the rest.

The rest is copied to blocks and from them. Real-time recurrent learning, which stores
the Jacobians of each step, takes 25 ms in place of 72.
"""
_SUM = 1024
"""A gradient may be one sum over this many steps."""


class Members(NamedTuple):
    """The members of a loop under `vmap`, such as the models of an ensemble.

    Attributes:
        size: their number.
        mapped: for each operand of the loop whether each member has one of its own; it
            then has an axis of members in front, as all results have.
    """

    size: int
    mapped: tuple[bool, ...]


class Loop(NamedTuple):
    """What is static in a loop.

    Attributes:
        step: the step.
        length: the number of steps.
        total: the number of steps of the sequences, of which these may be a part.
        reverse: whether the last step runs first.
        policy: what the forward pass saves for the backward pass, as for
            `jax.checkpoint`, or a `Choice`.
        masked: whether the last operand is the lengths of the sequences, int32 `[B]`.
            A sequence runs the steps before its length; at the others its states do not
            change, and its outputs are undefined.
        backend: `"xla"`, `"cpu"`, `"cuda"`, or None for the quickest one.
        capacity: if given, the sequences of a masked loop lie one after another: what
            has an axis of sequences at every step, which is then the first one, is
            `[capacity, ...]`, without axes of steps and of sequences; see `tokens`.
        members: if given, the loop stands for that of each of them; see `members`.
    """

    step: Step
    length: int
    total: int
    reverse: bool
    policy: Policy
    masked: bool
    backend: str | None
    capacity: int | None = None
    members: Members | None = None


class Scans(NamedTuple):
    """What runs the steps of a loop, once their products of inputs are known.

    Attributes:
        forward: as `_scan`.
        backward: as `_scan_back`.
        in_blocks: whether steps run in blocks, each after its products of inputs, so
            that these are few. A step without gradients then has them inside.
    """

    forward: Callable
    backward: Callable
    in_blocks: bool


def forward(
    loop: Loop, wrt: Mask | None, operands: Sequence[Array], scans: Scans | None = None
) -> list[Array]:
    """Run the loop.

    Args:
        loop: what is static.
        wrt: if given, what the loop is differentiated with respect to, so that values
            are saved for `backward`.
        operands: invariant values, inputs `[T, ...]` and initial states.
        scans: what runs the steps; None for `lax.scan`.

    Returns:
        Final states, outputs `[T, ...]`, then saved values `[T, ...]`.
    """
    invariant, inputs, states = loop.step.parts(operands)
    mask = StepMask.of(loop.masked, loop.length, operands, states)
    scans = SCANS if scans is None else scans
    if wrt is None and scans.in_blocks and not pays_hoisting(loop.step):
        at = (inputs, mask.valid)
        final, stacked = scans.forward(
            loop, loop.step, None, invariant, mask, states, at
        )
        return [*final, *stacked]
    hoisted = loop.step.hoisted
    derivative = None if wrt is None else derivative_of(loop, wrt)

    def run(states: list[Array], at: Any) -> tuple[list, tuple]:
        inputs, valid = at
        products = products_of_inputs(loop.step, invariant, inputs)
        inputs = [*(inputs[i] for i in hoisted.kept), *products]
        at = (inputs, valid)
        final, stacked = scans.forward(
            loop, hoisted.core, derivative, invariant, mask, states, at
        )
        return final, (stacked, products)

    saved = [] if wrt is None else saved_products(loop, wrt)
    core = hoisted.core.traced if derivative is None else derivative.forward
    kept = [a.shape for a in core.out_avals[loop.step.num_states :]]
    pays = _is_much([a.shape for a in hoisted.products.out_avals], kept)
    if saved or not (scans.in_blocks and pays):
        final, (stacked, products) = run(states, (inputs, mask.valid))
        return [*final, *stacked, *(products[k] for k in saved)]
    final, (stacked, _) = in_blocks(
        loop,
        lambda s, at: _without_products(run(s, at)),
        states,
        (inputs, mask.valid),
        loop.reverse,
    )
    return [*final, *stacked]


def _without_products(results: tuple[list, tuple]) -> tuple[list, tuple]:
    final, (stacked, _) = results
    return final, (stacked, ())


def _scan(
    loop: Loop,
    step: Step,
    derivative: Derivative | None,
    invariant: list[Array],
    mask: StepMask,
    states: list[Array],
    per_step: Any,
) -> tuple[list[Array], list[Array]]:
    """Return final states, and outputs and saved values of all steps."""
    traced = step.traced if derivative is None else derivative.forward
    kept = () if derivative is None else derivative.saved_states
    num_outputs = len(step.jaxpr.outvars) - step.num_states

    def body(old: list[Array], at: Any) -> tuple[list[Array], list[Array]]:
        inputs, valid = at
        states = mask.before(valid, old)
        values = [*invariant, *inputs, *states]
        results = evaluate(traced, values, with_own_derivative)
        new, outputs, saved = split_at(
            results, [step.num_states, step.num_states + num_outputs]
        )
        new = new if valid is None else select(valid, new, old)
        return new, [*outputs, *(states[i] for i in kept), *saved]

    leaves = jax.tree.leaves(per_step)
    length = leaves[0].shape[0] if leaves else loop.length
    return lax.scan(body, states, per_step, length=length, reverse=loop.reverse)


def in_blocks(
    loop: Loop, run: Callable, carry: Any, per_step: Any, reverse: bool
) -> tuple[Any, Any]:
    """Run `run(carry, per_step)` on blocks of steps, so that its values are few.

    Args:
        loop: what is static.
        run: returns a new carry, and arrays of all steps of the block.
        carry: of the first block.
        per_step: a pytree of arrays, time first.
        reverse: whether the last block runs first.
    """
    rows = max((a.shape[1] for a in jax.tree.leaves(per_step) if a.ndim > 1), default=1)
    size = near_divisor(
        loop.length, max(_BLOCK, _ROWS // max(known_product([rows]), 1))
    )
    if loop.length <= size or not jax.tree.leaves(per_step):
        return run(carry, per_step)
    return scan_segments(run, carry, per_step, size, reverse)


def _is_much(shapes: Sequence[Any], rest: Sequence[Any]) -> bool:
    """Return whether blocks pay for values that exist for one block at a time.

    Args:
        shapes: theirs, at one step.
        rest: those of what else is read or written at a step.
    """
    few, many = (sum(map(known_product, s)) for s in (shapes, rest))
    return _SHARE * few > many


def products_of_inputs(
    step: Step, invariant: Sequence[Array], inputs: Sequence[Array]
) -> list[Array]:
    """Return the products of inputs of all steps, `[T, ...]`."""
    return map_steps(step.hoisted.products, invariant, inputs)


def map_steps(
    part: ClosedJaxpr, invariant: Sequence[Array], inputs: Sequence[Array]
) -> list[Array]:
    """Return what a part of a step without states returns, of all steps."""
    if not part.jaxpr.outvars:
        return []
    read = {v for e in part.jaxpr.eqns for v in variables(e)}
    variables_of = part.jaxpr.invars[len(invariant) :]
    axes = [0 if v in read else None for v in variables_of]
    given = [
        a if v in read else a[:0] for v, a in zip(variables_of, inputs, strict=True)
    ]

    def of_step(*at: Array) -> list[Array]:
        return evaluate(part, [*invariant, *at], _in_turn)

    return jax.vmap(of_step, in_axes=tuple(axes))(*given)


def _in_turn(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Run an operation on keys step by step where JAX maps it to other numbers."""
    is_key = lambda v: jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)  # noqa: E731
    keys = [a for v, a in zip(eqn.invars, inputs, strict=True) if is_key(v)]
    drawn = any(map(draws_from_first, keys))
    if not drawn and eqn.primitive.name != "rng_bit_generator":
        return None
    return sequential_vmap(lambda *inputs: run_one(eqn, inputs))(*inputs)


def derivative_of(loop: Loop, wrt: Mask) -> Derivative:
    """Return the derivative of the loop's core with respect to what `wrt` leads to."""
    hoisted = loop.step.hoisted
    invariant, inputs, states = loop.step.parts(wrt)
    read = {v for e in hoisted.products.jaxpr.eqns for v in variables(e)}
    leads = any(
        w for v, w in zip(hoisted.products.jaxpr.invars, wrt, strict=False) if v in read
    )
    products = [leads] * len(hoisted.products.jaxpr.outvars)
    mask = (*invariant, *(inputs[i] for i in hoisted.kept), *products, *states)
    saves = _saves_products(loop)
    return best_derivative(hoisted.core, mask, loop.policy, len(hoisted.kept), saves)


def _saves_products(loop: Loop) -> bool:
    return loop.policy is not None and any(
        loop.policy(e.primitive, *(v.aval for v in e.invars), **e.params)
        for e in loop.step.hoisted.products.jaxpr.eqns
        if e.primitive.name in PRODUCTS
    )


def saved_products(loop: Loop, wrt: Mask) -> list[int]:
    """Return which products of inputs, computed before the loop, are saved.

    They are those that the backward step reads, if `policy` saves products.
    """
    if not _saves_products(loop):
        return []
    first = len(loop.step.hoisted.kept)
    return [k - first for k in derivative_of(loop, wrt).read_inputs if k >= first]


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
    scans: Scans | None = None,
) -> dict[int, Array]:
    """Run the loop backwards.

    Args:
        loop: what is static.
        wrt: as in `forward`.
        operands: as in `forward`; initial states are not read.
        saved: what `forward` saved, in its order.
        cotangents: of the final states and of the outputs that have derivatives.
        scans: see `forward`.

    Returns:
        The cotangents of operands, by position; of others it is 0.
    """
    whole, scans = loop.step, SCANS if scans is None else scans
    invariant, inputs, states = whole.parts(operands)
    derivative = derivative_of(loop, wrt)
    more = evaluate(derivative.before_backward, invariant)
    floats = [i for i, a in enumerate(states) if is_float(a)]
    d_final, d_outputs = split_at(cotangents, [len(floats)])
    weights = [i for i, w in enumerate(wrt[: whole.num_invariant]) if w]
    which = saved_products(loop, wrt)
    saved, products = split_at(saved, [len(saved) - len(which)])

    def block(carry: Any, at: Any) -> tuple[Any, dict[int, Array]]:
        d_states, sums = carry
        inputs, saved, products, d_outputs, valid = at
        found, d_inputs, d_states = _backward_block(
            loop,
            wrt,
            scans,
            derivative,
            (invariant, more, inputs, saved, dict(zip(which, products, strict=True))),
            (d_states, d_outputs),
            valid,
        )
        sums = [
            s + found[i].astype(s.dtype) if i in found else s
            for s, i in zip(sums, weights, strict=True)
        ]
        return (d_states, sums), d_inputs

    wide = [zeros_wide(invariant[i]) for i in weights]
    valid = StepMask.of(loop.masked, loop.length, operands, []).valid
    per_step = (inputs, saved, products, d_outputs, valid)
    results = derivative.backward.out_avals
    pairs = results[len(results) - 2 * len(derivative.products) :]
    few = [*whole.hoisted.products.out_avals, *pairs]
    many = [a.shape[1:] for a in (*inputs, *saved)]
    pays = loop.length > _SUM or _is_much([a.shape for a in few], many)
    (d_states, sums), d_inputs = (
        in_blocks(loop, block, (d_final, wide), per_step, not loop.reverse)
        if scans.in_blocks and pays
        else block((d_final, wide), per_step)
    )
    found = {
        i: s.astype(invariant[i].dtype) for i, s in zip(weights, sums, strict=True)
    }
    found |= {whole.num_invariant + i: d for i, d in d_inputs.items()}
    first = whole.num_invariant + whole.num_inputs
    return found | {first + i: d for i, d in zip(floats, d_states, strict=True)}


def _backward_block(
    loop: Loop,
    wrt: Mask,
    scans: Scans,
    derivative: Derivative,
    given: tuple,
    cotangents: tuple,
    valid: Array | None,
) -> tuple[dict[int, Array], dict[int, Array], list[Array]]:
    """Run a block of steps backwards.

    Args:
        loop: what is static.
        wrt: as in `forward`.
        scans: what runs its steps.
        derivative: of its core.
        given: the invariant values, further ones of `derivative`, inputs, saved values,
            and by position the products of inputs that are saved.
        cotangents: of the last states, and of the outputs.
        valid: see `StepMask`.

    Returns:
        The cotangents of the invariant values and of the inputs that `wrt` asks for, by
        position, and those of the states before the block.
    """
    invariant, more, inputs, saved, products = given
    hoisted = loop.step.hoisted
    wrt_invariant, wrt_inputs, _ = loop.step.parts(wrt)

    def multiply(weights: dict[int, Array], xs: dict[int, Array]) -> list[Array]:
        return products_of_inputs(
            loop.step, _replaced(invariant, weights), _replaced(inputs, xs)
        )

    made, pull = jax.vjp(
        multiply, _chosen(invariant, wrt_invariant), _chosen(inputs, wrt_inputs)
    )
    core_inputs = [*(inputs[i] for i in hoisted.kept), *made]
    for k, product in products.items():
        core_inputs[len(hoisted.kept) + k] = product
    for k, a in enumerate(core_inputs):
        if k not in derivative.read_inputs:
            core_inputs[k] = jnp.zeros((a.shape[0], 0), a.dtype)  # nothing reads it
    d_states, d_outputs = cotangents
    at_step = (invariant, more, core_inputs, saved)
    d_states, d_inputs, sums, pairs = scans.backward(
        loop, derivative, at_step, d_states, d_outputs, valid
    )
    found: dict[int, Array] = {}

    def add(i: int, d: Array) -> None:
        d = d.astype(accumulation_dtype(d.dtype))
        found[i] = found[i] + d if i in found else d

    for i, d in zip(derivative.invariant, sums, strict=True):
        add(i, d)
    for product, (x, dy) in zip(derivative.products, _pairs(pairs), strict=True):
        add(product.weight, weight_gradient(product, invariant[product.weight], x, dy))
    by_input = dict(zip(derivative.inputs, d_inputs, strict=True))
    kept = {hoisted.kept[k]: d for k, d in by_input.items() if k < len(hoisted.kept)}
    result = {i: d for i, d in kept.items() if wrt_inputs[i]}
    d_made = [d for k, d in by_input.items() if k >= len(hoisted.kept)]
    if d_made:
        d_weights, d_xs = pull(d_made)
        for i, d in d_weights.items():
            add(i, d)
        for i, d in d_xs.items():
            result[i] = result[i] + d if i in result else d
    return found, result, d_states


def _chosen(values: list[Array], wrt: Sequence[bool]) -> dict[int, Array]:
    """Return the values that are differentiated, by position."""
    return {i: a for i, (a, w) in enumerate(zip(values, wrt, strict=True)) if w}


def _replaced(values: list[Array], others: dict[int, Array]) -> list[Array]:
    """Return the values, with `others` at their positions."""
    return [others.get(i, a) for i, a in enumerate(values)]


def _scan_back(
    loop: Loop,
    derivative: Derivative,
    given: tuple[list[Array], ...],
    d_states: list[Array],
    d_outputs: list[Array],
    valid: Array | None,
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """Return cotangents: of states, of inputs, of invariant values; and products'."""
    invariant, more, inputs, saved = given
    counts = len(d_states), len(derivative.inputs), len(derivative.invariant)

    def body(carry: Any, at: Any) -> Any:
        d_new, sums = carry
        at_inputs, at_saved, d_outputs, valid = at
        bar = [*d_new, *d_outputs]
        bar = bar if valid is None else select(valid, bar)
        values = [*invariant, *more, *at_inputs, *at_saved, *bar]
        results = evaluate(derivative.backward, values)
        d_states, d_inputs, d_invariant, pairs = split_by(results, counts)
        d_states = d_states if valid is None else select(valid, d_states, d_new)
        sums = [s + d.astype(s.dtype) for s, d in zip(sums, d_invariant, strict=True)]
        return (d_states, sums), (d_inputs, pairs)

    wide = [zeros_wide(invariant[i]) for i in derivative.invariant]
    per_step = (inputs, saved, d_outputs, valid)
    leaves = jax.tree.leaves(per_step)
    (d_states, sums), (d_inputs, pairs) = lax.scan(
        body,
        (d_states, wide),
        per_step,
        length=leaves[0].shape[0] if leaves else loop.length,
        reverse=not loop.reverse,
    )
    return d_states, d_inputs, sums, pairs


def _pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def zeros_wide(a: Array) -> Array:
    return jnp.zeros(a.shape, accumulation_dtype(a.dtype))


SCANS = Scans(_scan, _scan_back, in_blocks=True)
"""Steps by `lax.scan`."""
