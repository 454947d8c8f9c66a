"""The loops over a step as the native library runs them."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _native
from .._typing import Array
from . import xla
from .gradients import is_float
from .jaxprs import evaluate, split_at
from .lower import LARGEST_GIVEN
from .lowered import Lowered
from .plans import Backward, add_to, lower_forward, plan_backward
from .program import Place
from .values import Unsupported
from .xla import Loop, Mask


def forward(loop: Loop, wrt: Mask | None, operands: Sequence[Array]) -> list[Array]:
    """Run the loop in the native library if it can; see `xla.forward`."""
    try:
        check_available(loop)
        lowered = lower_forward(loop, wrt)
        if wrt is not None:  # past the end of sequences, nothing is saved for `xla`
            plan_backward(loop, wrt)
    except Unsupported:
        return xla.forward(loop, wrt, operands)

    def run() -> list[Array]:
        lengths = _lengths(loop, operands)
        return _call(lowered, loop, operands, lengths, loop.reverse)[0]

    return _if_small(loop, operands, run, lambda: xla.forward(loop, wrt, operands))


def can_run(loop: Loop) -> bool:
    """Return whether the native library can run a loop forward."""
    try:
        check_available(loop)
        lower_forward(loop, None)
    except Unsupported:
        return False
    return True


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> dict[int, Array]:
    """Run the loop backwards in the native library if it can; see `xla.backward`."""
    other = lambda: xla.backward(loop, wrt, operands, saved, cotangents)  # noqa: E731
    try:
        check_available(loop)
        plan = plan_backward(loop, wrt)
    except Unsupported:
        return other()
    run = lambda: _run_back(plan, loop, operands, saved, cotangents)  # noqa: E731
    return _if_small(
        loop, operands, _all(run, wrt, operands), _all(other, wrt, operands)
    )


def _run_back(
    plan: Backward,
    loop: Loop,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> dict[int, Array]:
    """Return the cotangents of operands, by position; of others it is 0."""
    step = loop.step
    invariant, inputs, states = xla.parts(step, operands)
    more = evaluate(plan.derivative.before_backward, invariant)
    d_states, d_outputs = split_at(cotangents, [sum(map(is_float, states))])
    arguments = [*invariant, *more, *inputs, *saved, *d_states, *d_outputs]
    results, matrices = _call(
        plan.lowered, loop, arguments, _lengths(loop, operands), not loop.reverse
    )
    d_states, d_inputs, d_invariant, pairs = split_at(results, plan.counts)
    first = step.num_invariant
    found = {first + i: d for i, d in zip(plan.inputs, d_inputs, strict=True)}
    first += step.num_inputs
    floats = [i for i, a in enumerate(states) if is_float(a)]
    found |= {first + i: d for i, d in zip(floats, d_states, strict=True)}
    for i, d in zip(plan.invariant, d_invariant, strict=True):
        add_to(found, i, d.astype(invariant[i].dtype))
    for k, product in enumerate(plan.products):
        weight = invariant[product.weight]
        d = matrices[k]
        if d is None:
            d = xla.weight_gradient(product, weight, *pairs[2 * k : 2 * k + 2])
        add_to(found, product.weight, d.astype(weight.dtype))
    return found


def _all(
    run: Callable[[], dict[int, Array]], wrt: Mask, operands: Sequence[Array]
) -> Callable[[], dict[int, Array]]:
    """Return `run` with a cotangent of every operand of `wrt`."""

    def all_of() -> dict[int, Array]:
        found = run()
        return {
            i: jnp.broadcast_to(found.get(i, jnp.zeros((), a.dtype)), a.shape)
            for i, a in enumerate(operands)
            if i < len(wrt) and wrt[i]
        }

    return all_of


def _if_small(loop: Loop, operands: Sequence[Array], run: Callable, other: Callable):
    """Return `run()`, or `other()` where floats cannot stand for integers of operands.

    Numbers of steps are known to be small enough.
    """
    first, small = loop.step.num_invariant, []
    steps = range(first, first + loop.step.num_inputs)
    for i, a in enumerate(operands[: len(loop.step.jaxpr.invars)]):
        counts = i in steps and a.ndim == 1
        wide = jnp.issubdtype(a.dtype, jnp.integer) and jnp.iinfo(a.dtype).bits > 16
        if wide and not counts:
            small.append(jnp.all((a <= LARGEST_GIVEN) & (a >= -LARGEST_GIVEN)))
    if not small:
        return run()
    return lax.cond(ft.reduce(jnp.logical_and, small), run, other)


def _lengths(loop: Loop, operands: Sequence[Array]) -> list[Array]:
    return [operands[-1].astype(jnp.int32)] if loop.masked else []


def _call(
    lowered: Lowered,
    loop: Loop,
    arguments: Sequence[Array],
    lengths: list[Array],
    reverse: bool,
) -> tuple[list[Array], list[Array | None]]:
    """Run a program.

    Returns:
        What a step returns, of all steps where it is an output, and the gradients of
        matrices.
    """
    operands = []
    for i in lowered.arguments:
        a, kind = arguments[i], lowered.given[i]
        if kind.axis is not None:
            first = int(kind.place is Place.INPUT)
            a = jnp.moveaxis(a, first + kind.axis, first)
        # XLA leaves out both transposes of a matrix that is one itself.
        a = a.T if kind.turned else a
        operands.append(_converted(a, kind.place, lowered.dtype))
    shapes = [
        jax.ShapeDtypeStruct(
            (loop.length, *r.shape) if r.place is Place.OUTPUT else r.shape,
            _stored(r.dtype, lowered.dtype),
        )
        for r in lowered.results
    ]
    call = jax.ffi.ffi_call("ostinato_step", shapes, vmap_method="sequential")
    found = call(
        *operands,
        *lengths,
        program=np.array(lowered.program.numbers, np.int64),
        constants=np.array(lowered.program.constants, np.float64),
        steps=np.int64(loop.length),
        batch=np.int64(lowered.batch),
        reverse=bool(reverse),
        lengths=bool(lengths),
        wide=lowered.dtype == jnp.float64,
    )
    results = []
    for a, r in zip(found, lowered.results, strict=True):
        if r.axis is not None:
            first = int(r.place is Place.OUTPUT)
            a = jnp.moveaxis(a, first, first + r.axis)
        a = a.T if r.turned else a
        a = a.sum(axis=r.added) if r.added else a
        results.append(a.astype(r.dtype))
    values = [
        jnp.zeros((), lowered.dtype) if i is None
        else results[i] if i >= 0
        else arguments[-1 - i]
        for i in lowered.sources
    ]  # fmt: skip
    return values, [None if i is None else results[i] for i in lowered.matrices]


def _stored(dtype: Any, wide: Any) -> Any:
    """Return what the library stores values of a type as."""
    return dtype if jnp.issubdtype(dtype, jnp.floating) else wide


def _converted(a: Array, place: Place, wide: Any) -> Array:
    """Return an operand in a type that the library reads."""
    half = a.dtype == jnp.bfloat16 and place is not Place.INVARIANT
    return a if half else a.astype(wide)


def check_available(loop: Loop) -> None:
    """Raise `Unsupported` if a loop asks for XLA, or if there is no native library."""
    if loop.backend == "xla":
        raise Unsupported("`backend` is 'xla'")
    reason = _native.status().reason
    if reason is not None:
        raise Unsupported(f"there is no native library: {reason}")
