"""The loops over a step as the native library runs them."""

from __future__ import annotations

import functools as ft
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .. import _native
from .._typing import Array
from . import xla
from .gradients import Derivative, Product, differentiate, is_float
from .jaxprs import evaluate, flat_trace, split_at, struct, type_of
from .lower import Given, Lowered, Unsupported, lower
from .program import Place
from .split import Step
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
    return _call(lowered, loop, operands, _lengths(loop, operands), loop.reverse)[0]


@ft.lru_cache(maxsize=256)
def lower_forward(loop: Loop, wrt: Mask | None) -> Lowered:
    """Return the program of a step, and of what it saves for `lower_backward`."""
    step = loop.step
    traced, count = step.traced, len(step.jaxpr.outvars)
    if wrt is not None:
        derivative = xla.derivative_of(loop, wrt)
        which = xla.saved_products(loop, wrt)

        def saving(*operands: Any) -> list[Any]:
            invariant, inputs, states = xla.parts(step, operands)
            taken = step.taken
            products = evaluate(taken.ahead, [*invariant, *inputs])
            core = [*(inputs[i] for i in taken.kept), *products]
            results = evaluate(derivative.forward, [*invariant, *core, *states])
            kept = [states[i] for i in derivative.saved_states]
            saved = [*kept, *results[count:], *(products[k] for k in which)]
            return [*results[:count], *saved]

        traced = flat_trace(saving, *(struct(v.aval) for v in step.jaxpr.invars))
    outputs = len(traced.jaxpr.outvars) - step.num_states
    places = [Place.NEXT] * step.num_states + [Place.OUTPUT] * outputs
    return lower(_closed(traced), _given(loop), places, _batch(step))


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> dict[int, Array]:
    """Run the loop backwards in the native library if it can; see `xla.backward`."""
    try:
        check_available(loop)
        plan = plan_backward(loop, wrt)
    except Unsupported:
        return xla.backward(loop, wrt, operands, saved, cotangents)
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
        _add(found, i, d.astype(invariant[i].dtype))
    for k, product in enumerate(plan.products):
        weight = invariant[product.weight]
        d = matrices[k]
        if d is None:
            d = xla.weight_gradient(product, weight, *pairs[2 * k : 2 * k + 2])
        _add(found, product.weight, d.astype(weight.dtype))
    return found


def _add(found: dict[int, Array], i: int, d: Array) -> None:
    found[i] = found[i] + d if i in found else d


class _Backward(NamedTuple):
    """The program of a step backwards.

    Attributes:
        lowered: the program. It returns cotangents of states, of inputs and of
            invariant values, and then the factors of products.
        counts: where these begin.
        derivative: of the core of the loop.
        inputs: the inputs, by position, that it returns cotangents of.
        invariant: the invariant values, by position, that it returns cotangents of.
        products: the products whose matrix is differentiated.
    """

    lowered: Lowered
    counts: list[int]
    derivative: Derivative
    inputs: list[int]
    invariant: list[int]
    products: list[Product]


@ft.lru_cache(maxsize=256)
def plan_backward(loop: Loop, wrt: Mask) -> _Backward:
    """Return the program that differentiates the core and the products ahead of it."""
    step, taken = loop.step, loop.step.taken
    core = xla.derivative_of(loop, wrt)
    forward = lower_forward(loop, wrt)
    num, num_kept = step.num_invariant, len(taken.kept)
    wrt_inputs = xla.parts(step, wrt)[1]
    # The products of inputs, as a step of their own without states.
    inner = Step(taken.ahead, num, step.num_inputs, 0)
    ahead = differentiate(inner, wrt[: num + step.num_inputs], _saves_nothing)
    assert ahead.num_saved == 0 and not ahead.before_backward.jaxpr.outvars
    bar = [k - num_kept for k in core.inputs if k >= num_kept]
    inputs = [i for i in range(step.num_inputs) if wrt_inputs[i]]
    invariant = list(dict.fromkeys([*core.invariant, *ahead.invariant]))
    which = xla.saved_products(loop, wrt)
    floats = [i for i, v in enumerate(step.jaxpr.outvars) if is_float(v.aval)]
    num_states = sum(i < step.num_states for i in floats)

    def run(*arguments: Any) -> list[Any]:
        given = split_at(arguments, bounds)
        invariant_values, more, at, saved, products, d_states, d_outputs = given
        made = evaluate(taken.ahead, [*invariant_values, *at])
        core_inputs = [*(at[i] for i in taken.kept), *made]
        for k, product in zip(which, products, strict=True):
            core_inputs[num_kept + k] = product
        results = evaluate(
            core.backward,
            [*invariant_values, *more, *core_inputs, *saved, *d_states, *d_outputs],
        )
        counts = [num_states, len(core.inputs), len(core.invariant)]
        d_states, d_core, d_invariant, pairs = split_at(results, _ends(counts))
        of_core = dict(zip(core.inputs, d_core, strict=True))
        d_inputs = {i: of_core[k] for k, i in enumerate(taken.kept) if k in of_core}
        sums = dict(zip(core.invariant, d_invariant, strict=True))
        if bar:
            d_products = [
                of_core[num_kept + k] if k in bar else _zeros(v)
                for k, v in enumerate(taken.ahead.jaxpr.outvars)
            ]  # fmt: skip
            results = evaluate(ahead.backward, [*invariant_values, *at, *d_products])
            counts = [len(ahead.inputs), len(ahead.invariant)]
            d_at, d_invariant, more_pairs = split_at(results, _ends(counts))
            pairs = [*pairs, *more_pairs]
            for i, d in zip(ahead.inputs, d_at, strict=True):
                _add(d_inputs, i, d)
            for i, d in zip(ahead.invariant, d_invariant, strict=True):
                _add(sums, i, d)
        variables = step.jaxpr.invars
        return [
            *d_states,
            *(d_inputs.get(i, _zeros(variables[num + i])) for i in inputs),
            *(sums.get(i, _zeros(variables[i])) for i in invariant),
            *pairs,
        ]

    outputs = forward.sources[len(step.jaxpr.outvars) :]
    num_saved = len(outputs) - len(which)
    num_more = len(core.before_backward.jaxpr.outvars)
    sizes = [num, num_more, step.num_inputs, num_saved, len(which), num_states]
    bounds = _ends(sizes)
    saved_shapes = _saved_shapes(loop, wrt)
    shapes = [struct(v.aval) for v in step.jaxpr.invars[: num + step.num_inputs]]
    more = [struct(v.aval) for v in core.before_backward.jaxpr.outvars]
    results = [struct(step.jaxpr.outvars[i].aval) for i in floats]
    traced = flat_trace(
        run, *shapes[:num], *more, *shapes[num:], *saved_shapes, *results
    )
    axes = [_axis_of(forward, i) for i in range(len(forward.sources))]
    given = _given(loop)
    more_given = [Given(Place.INVARIANT, None)] * num_more
    given = [*given[:num], *more_given, *given[num : num + step.num_inputs]]
    count = len(step.jaxpr.outvars)
    given += [Given(Place.INPUT, axis) for axis in axes[count:]]
    given += [Given(Place.STATE, 0)] * num_states
    given += [Given(Place.INPUT, axes[i]) for i in floats if i >= step.num_states]
    products = [*core.products, *(ahead.products if bar else ())]
    places = [Place.NEXT] * num_states + [Place.OUTPUT] * len(inputs)
    places += [Place.SUM] * len(invariant) + [Place.OUTPUT] * (2 * len(products))
    lowered = lower(_closed(traced), given, places, _batch(step), products)
    counts = _ends([num_states, len(inputs), len(invariant)])
    return _Backward(lowered, counts, core, inputs, invariant, products)


def _zeros(variable: Any) -> Array:
    return jnp.zeros(type_of(variable).shape, type_of(variable).dtype)


def _saves_nothing(*_: Any, **__: Any) -> bool:
    return False


def _saved_shapes(loop: Loop, wrt: Mask) -> list[Any]:
    """Return the types of what the forward pass saves at a step, products included."""
    derivative, step = xla.derivative_of(loop, wrt), loop.step
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    variables = [states[i] for i in derivative.saved_states]
    variables += derivative.forward.jaxpr.outvars[len(step.jaxpr.outvars) :]
    products = step.taken.ahead.jaxpr.outvars
    variables += [products[k] for k in xla.saved_products(loop, wrt)]
    return [struct(v.aval) for v in variables]


def _ends(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def _axis_of(lowered: Lowered, result: int) -> int | None:
    """Return which axis of a result of a step is that of sequences."""
    source = lowered.sources[result]
    assert source is not None
    return (
        lowered.given[-1 - source].axis if source < 0 else lowered.results[source].axis
    )


def _closed(traced: ClosedJaxpr) -> ClosedJaxpr:
    if traced.consts:
        raise Unsupported("it has constant arrays")
    return traced


def _batch(step: Step) -> int:
    """Return the number of sequences."""
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    if not states or not type_of(states[0]).shape:
        raise Unsupported("it has no state with an axis of sequences")
    return type_of(states[0]).shape[0]


def _given(loop: Loop) -> list[Given]:
    """Return what the arguments of the step are."""
    step = loop.step
    inputs = step.jaxpr.invars[step.num_invariant :][: step.num_inputs]
    turned = step.turned or (False,) * step.num_invariant
    return [
        *(Given(Place.INVARIANT, None, turned=t) for t in turned),
        *(
            Given(Place.INPUT, axis, None if type_of(v).shape else loop.length)
            for v, axis in zip(inputs, step.input_axes, strict=True)
        ),
        *[Given(Place.STATE, 0)] * step.num_states,
    ]


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
        results.append((a.T if r.turned else a).astype(r.dtype))
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
