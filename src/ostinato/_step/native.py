"""The loops over a step as the native library runs them."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from .._typing import Array
from . import xla
from .gradients import Derivative, is_float
from .jaxprs import jaxpr_of, split_at
from .lower import Given, Lowered, Unsupported, axes_of, lower
from .program import Place
from .split import Step
from .xla import Loop, Mask


def forward(loop: Loop, wrt: Mask | None, operands: Sequence[Array]) -> list[Array]:
    """Run the loop in the native library if it can; see `xla.forward`."""
    try:
        _check_available(loop)
        return xla.forward(loop, wrt, operands, scan_forward)
    except Unsupported:
        return xla.forward(loop, wrt, operands)


def backward(loop: Loop, wrt: Mask, *arguments: Sequence[Array]) -> dict[int, Array]:
    """Run the loop backwards in the native library if it can; see `xla.backward`."""
    try:
        _check_available(loop)
        return xla.backward(loop, wrt, *arguments, scan_backward)
    except Unsupported:
        return xla.backward(loop, wrt, *arguments)


def scan_forward(
    loop: Loop,
    step: Step,
    derivative: Derivative | None,
    invariant: list[Array],
    states: list[Array],
    inputs: list[Array],
) -> tuple[list[Array], list[Array]]:
    """Return final states, and outputs and saved values of all steps."""
    length = inputs[0].shape[0] if inputs else loop.length
    lowered = lower_forward(loop, step, derivative)
    results = _call(lowered, [*invariant, *inputs, *states], length, loop.reverse)
    return results[: step.num_states], results[step.num_states :]


@ft.lru_cache(maxsize=256)
def lower_forward(loop: Loop, step: Step, derivative: Derivative | None) -> Lowered:
    """Return the program of a step, and of what it saves for `derivative`."""
    traced = step.traced if derivative is None else derivative.forward
    jaxpr = traced.jaxpr
    count = len(step.jaxpr.outvars)
    states = jaxpr.invars[step.num_invariant + step.num_inputs :]
    kept = [] if derivative is None else [states[i] for i in derivative.saved_states]
    results = [*jaxpr.outvars[:count], *kept, *jaxpr.outvars[count:]]
    whole = jaxpr_of(
        jaxpr.eqns, jaxpr.invars, results,
        dict(zip(jaxpr.constvars, traced.consts, strict=True)),
    )  # fmt: skip
    places = [Place.NEXT] * step.num_states
    places += [Place.OUTPUT] * (len(results) - step.num_states)
    return lower(whole, _given(loop, step), places, _batch(step))


def _batch(step: Step) -> int:
    """Return the number of sequences."""
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    if not states or not states[0].aval.shape:
        raise Unsupported("it has no state with an axis of sequences")
    return states[0].aval.shape[0]


def _given(loop: Loop, step: Step) -> tuple[Given, ...]:
    """Return what the arguments of a step, or of the core of one, are."""
    most = loop.length
    _, inputs, states = split_at(
        step.jaxpr.invars, [step.num_invariant, step.num_invariant + step.num_inputs]
    )
    axes = _input_axes(loop, step)
    return (
        *[Given(Place.INVARIANT, None)] * step.num_invariant,
        *(
            Given(Place.INPUT, axis, None if v.aval.shape else most)
            for v, axis in zip(inputs, axes, strict=True)
        ),
        *(Given(Place.STATE, 0) for _ in states),
    )


def _input_axes(loop: Loop, step: Step) -> list[int | None]:
    whole = loop.step
    if step is whole:
        return list(step.input_axes)
    taken = whole.taken
    given = [Given(Place.INVARIANT, None)] * whole.num_invariant
    given += [Given(Place.INPUT, axis, loop.length) for axis in whole.input_axes]
    ahead = taken.ahead
    products = axes_of(ahead, given, _batch(whole)) if ahead.jaxpr.outvars else []
    return [*(whole.input_axes[i] for i in taken.kept), *products]


def scan_backward(
    loop: Loop,
    derivative: Derivative,
    given: tuple[list[Array], ...],
    d_states: list[Array],
    d_outputs: list[Array],
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """Return cotangents: of states, of inputs, of invariant values; and products'."""
    invariant, more, inputs, saved = given
    lowered = lower_backward(loop, derivative)
    per_step = [*inputs, *saved, *d_outputs]
    length = per_step[0].shape[0] if per_step else loop.length
    arguments = [*invariant, *more, *inputs, *saved, *d_states, *d_outputs]
    results = _call(lowered, arguments, length, not loop.reverse)
    counts = np.cumsum(
        [len(d_states), len(derivative.inputs), len(derivative.invariant)]
    )
    d_states, d_inputs, d_invariant, pairs = split_at(results, counts.tolist())
    return d_states, d_inputs, d_invariant, pairs


@ft.lru_cache(maxsize=256)
def lower_backward(loop: Loop, derivative: Derivative) -> Lowered:
    """Return the program of a step backwards."""
    step = derivative.step
    ahead = lower_forward(loop, step, derivative)
    count = len(step.jaxpr.outvars)
    axes = [
        ahead.given[-1 - source].axis if source is not None and source < 0
        else ahead.results[source].axis
        for source in ahead.sources
    ]  # fmt: skip
    floats = [i for i in range(count) if is_float(step.jaxpr.outvars[i].aval)]
    arguments = derivative.backward.jaxpr.invars
    num_states = sum(i < step.num_states for i in floats)
    num_more = len(derivative.before_backward.jaxpr.outvars)
    given = [Given(Place.INVARIANT, None)] * (step.num_invariant + num_more)
    inputs = _given(loop, step)[step.num_invariant :][: step.num_inputs]
    given += inputs
    given += [Given(Place.INPUT, axis) for axis in axes[count:]]
    given += [Given(Place.STATE, 0)] * num_states
    given += [Given(Place.INPUT, axes[i]) for i in floats if i >= step.num_states]
    assert len(given) == len(arguments)
    places = [Place.NEXT] * num_states
    places += [Place.OUTPUT] * len(derivative.inputs)
    places += [Place.SUM] * len(derivative.invariant)
    places += [Place.OUTPUT] * (2 * len(derivative.products))
    return lower(derivative.backward, given, places, _batch(step))


def _call(
    lowered: Lowered, arguments: Sequence[Array], length: int, reverse: bool
) -> list[Array]:
    """Run a program; return what a step returns, of all steps where it is an output."""
    operands = []
    for i in lowered.arguments:
        a, kind = arguments[i], lowered.given[i]
        if kind.axis is not None:
            first = int(kind.place is Place.INPUT)
            a = jnp.moveaxis(a, first + kind.axis, first)
        operands.append(_converted(a, kind.place, lowered.dtype))
    shapes = [
        jax.ShapeDtypeStruct(
            (length, *r.shape) if r.place is Place.OUTPUT else r.shape,
            _stored(r.dtype, lowered.dtype),
        )
        for r in lowered.results
    ]
    call = jax.ffi.ffi_call("ostinato_step", shapes, vmap_method="sequential")
    found = call(
        *operands,
        program=np.array(lowered.program.numbers, np.int64),
        constants=np.array(lowered.program.constants, np.float64),
        steps=np.int64(length),
        batch=np.int64(lowered.batch),
        reverse=bool(reverse),
        lengths=False,
        wide=lowered.dtype == jnp.float64,
    )
    results = []
    for a, r in zip(found, lowered.results, strict=True):
        if r.axis is not None:
            first = int(r.place is Place.OUTPUT)
            a = jnp.moveaxis(a, first, first + r.axis)
        results.append(a.astype(r.dtype))
    return [
        jnp.zeros((), lowered.dtype) if s is None
        else results[s] if s >= 0
        else arguments[-1 - s]
        for s in lowered.sources
    ]  # fmt: skip


def _stored(dtype: Any, wide: Any) -> Any:
    """Return what the library stores values of a type as."""
    return dtype if jnp.issubdtype(dtype, jnp.floating) else wide


def _converted(a: Array, place: Place, wide: Any) -> Array:
    """Return an operand in a type that the library reads."""
    half = a.dtype == jnp.bfloat16 and place is not Place.INVARIANT
    return a if half else a.astype(wide)


def _check_available(loop: Loop) -> None:
    if loop.backend == "xla":
        raise Unsupported("`backend` is 'xla'")
    reason = _native.status().reason
    if reason is not None:
        raise Unsupported(f"there is no native library: {reason}")


def check(loop: Loop) -> None:
    """Raise NotImplementedError if the native library cannot run a loop."""
    try:
        _check_available(loop)
        lower_forward(loop, loop.step, None)
    except Unsupported as error:
        raise NotImplementedError(
            f"the cpu loop cannot run this step: {error.args[0]}; use backend=None or "
            "'xla'"
        ) from None
