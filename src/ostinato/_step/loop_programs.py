"""The programs of a loop, forward and backward, for the native library."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr

from .._typing import Array
from . import xla
from .gradients import Derivative, Product, differentiate, is_float, weight_gradient
from .jaxprs import evaluate, flat_trace, split_by, struct, type_of
from .programs.lower import lower
from .programs.lowered import Given, Lowered
from .programs.program import Place
from .programs.values import Unsupported
from .split import Step
from .xla import Loop, Mask


@ft.lru_cache(maxsize=256)
def saving_step(loop: Loop, wrt: Mask) -> Step:
    """Return a step that also returns what `xla.forward` saves."""
    step, count = loop.step, len(loop.step.jaxpr.outvars)
    derivative = xla.derivative_of(loop, wrt)
    which = xla.saved_products(loop, wrt)

    def saving(*operands: Any) -> list[Any]:
        invariant, inputs, states = step.parts(operands)
        hoisted = step.hoisted
        products = evaluate(hoisted.products, [*invariant, *inputs])
        core = [*(inputs[i] for i in hoisted.kept), *products]
        results = evaluate(derivative.forward, [*invariant, *core, *states])
        kept = [states[i] for i in derivative.saved_states]
        saved = [*kept, *results[count:], *(products[k] for k in which)]
        return [*results[:count], *saved]

    traced = flat_trace(saving, *(struct(v.aval) for v in step.jaxpr.invars))
    return dataclasses.replace(step, traced=traced)


@ft.lru_cache(maxsize=256)
def lower_forward(loop: Loop, wrt: Mask | None) -> Lowered:
    """Return the program of a step, and of what it saves for `lower_backward`."""
    step = loop.step
    traced = step.traced if wrt is None else saving_step(loop, wrt).traced
    count = len(traced.jaxpr.outvars) - step.num_states
    places = [Place.NEXT] * step.num_states + [Place.OUTPUT] * count
    batch = _batch(step)
    lowered = lower(_closed(traced), _given(loop), places, batch, loop.length)
    outputs = lowered.sources[step.num_states : len(step.jaxpr.outvars)]
    axes = [lowered.results[s].axis for s in outputs if s is not None and s >= 0]
    if batch > 1 and not {*axes} <= {0, None}:
        raise Unsupported("an output has its sequences along another axis")
    return lowered


class LoweredBackward(NamedTuple):
    """The program of a step backwards.

    Attributes:
        lowered: the program. It returns cotangents of states, of inputs and of
            invariant values, and then the factors of products.
        counts: of each of the former.
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
def lower_backward(loop: Loop, wrt: Mask) -> LoweredBackward:
    """Return the program that differentiates the core and the products before it."""
    pullback = Pullback(loop, wrt)
    traced = flat_trace(pullback, *pullback.types())
    lowered = lower(
        _closed(traced),
        pullback.given(),
        pullback.places(),
        _batch(loop.step),
        loop.length,
        pullback.products,
        adds=True,
    )
    counts = [pullback.num_states, len(pullback.inputs), len(pullback.invariant)]
    return LoweredBackward(
        lowered,
        counts,
        pullback.core,
        pullback.inputs,
        pullback.invariant,
        pullback.products,
    )


class Pullback:
    """The backward step of a loop, with the products of inputs.

    It takes the invariant values, further ones of `core`, inputs, saved values, saved
    products of inputs, and the cotangents of new states and of outputs. It returns
    cotangents of states, of `inputs` and of `invariant`, and the factors of `products`.
    """

    def __init__(self, loop: Loop, wrt: Mask) -> None:
        step = loop.step
        self.loop, self.wrt = loop, wrt
        self.core = xla.derivative_of(loop, wrt)
        # The products of inputs, as a step of their own without states.
        made = Step(step.hoisted.products, step.num_invariant, step.num_inputs, 0)
        end = step.num_invariant + step.num_inputs
        self.of_products = differentiate(made, wrt[:end], _saves_nothing)
        assert self.of_products.num_saved == 0
        assert not self.of_products.before_backward.jaxpr.outvars
        self.num_kept = len(step.hoisted.kept)
        self.from_core = [
            k - self.num_kept for k in self.core.inputs if k >= self.num_kept
        ]
        self.inputs = [i for i, w in enumerate(step.parts(wrt)[1]) if w]
        found = [*self.core.invariant, *self.of_products.invariant]
        self.invariant = list(dict.fromkeys(found))
        self.products = [
            *self.core.products,
            *(self.of_products.products if self.from_core else ()),
        ]
        results = step.jaxpr.outvars
        self.floats = [i for i, v in enumerate(results) if is_float(v.aval)]
        self.num_states = sum(i < step.num_states for i in self.floats)
        self.saved_products = xla.saved_products(loop, wrt)

    def types(self) -> list[Any]:
        """Return the types of the arguments."""
        step = self.loop.step
        first = step.num_invariant
        known = [struct(v.aval) for v in step.jaxpr.invars[: first + step.num_inputs]]
        more = [struct(v.aval) for v in self.core.before_backward.jaxpr.outvars]
        results = [struct(step.jaxpr.outvars[i].aval) for i in self.floats]
        saved = saved_shapes(self.loop, self.wrt)
        return [*known[:first], *more, *known[first:], *saved, *results]

    def given(self) -> list[Given]:
        """Return what the arguments are."""
        step, forward = self.loop.step, lower_forward(self.loop, self.wrt)
        known, first = _given(self.loop), step.num_invariant
        num_more = len(self.core.before_backward.jaxpr.outvars)
        stacked = [_stacked(forward, i) for i in range(len(forward.sources))]
        outputs = [i for i in self.floats if i >= step.num_states]
        return [
            *known[:first],
            *[Given(Place.INVARIANT, None)] * num_more,
            *known[first : first + step.num_inputs],
            *stacked[len(step.jaxpr.outvars) :],
            *[Given(Place.STATE, 0)] * self.num_states,
            *(stacked[i] for i in outputs),
        ]

    def places(self) -> list[Place]:
        """Return what the results are."""
        return [
            *[Place.NEXT] * self.num_states,
            *[Place.OUTPUT] * len(self.inputs),
            *[Place.SUM] * len(self.invariant),
            *[Place.OUTPUT] * (2 * len(self.products)),
        ]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run the step."""
        step, hoisted = self.loop.step, self.loop.step.hoisted
        num_products = len(self.saved_products)
        sizes = [
            step.num_invariant,
            len(self.core.before_backward.jaxpr.outvars),
            step.num_inputs,
            len(saved_shapes(self.loop, self.wrt)) - num_products,
            num_products,
            self.num_states,
        ]
        given = split_by(arguments, sizes)
        invariant, more, at, saved, products, d_states, d_outputs = given
        made = evaluate(hoisted.products, [*invariant, *at])
        core_inputs = [*(at[i] for i in hoisted.kept), *made]
        for k, product in zip(self.saved_products, products, strict=True):
            core_inputs[self.num_kept + k] = product
        results = evaluate(
            self.core.backward,
            [*invariant, *more, *core_inputs, *saved, *d_states, *d_outputs],
        )
        counts = [self.num_states, len(self.core.inputs), len(self.core.invariant)]
        d_states, d_core, d_invariant, pairs = split_by(results, counts)
        of_core = dict(zip(self.core.inputs, d_core, strict=True))
        d_inputs = {i: of_core[k] for k, i in enumerate(hoisted.kept) if k in of_core}
        sums = dict(zip(self.core.invariant, d_invariant, strict=True))
        if self.from_core:
            pairs += self._add_products(invariant, at, of_core, d_inputs, sums)
        variables = step.jaxpr.invars
        first = step.num_invariant
        return [
            *d_states,
            *(d_inputs.get(i, _zeros(variables[first + i])) for i in self.inputs),
            *(sums.get(i, _zeros(variables[i])) for i in self.invariant),
            *pairs,
        ]

    def _add_products(
        self,
        invariant: list[Array],
        inputs: list[Array],
        of_core: dict[int, Array],
        d_inputs: dict[int, Array],
        sums: dict[int, Array],
    ) -> list[Array]:
        """Add what the products of inputs contribute, and return their factors.

        Args:
            invariant: the invariant values.
            inputs: the inputs of the step.
            of_core: the cotangents of the inputs of the core.
            d_inputs: the cotangents of inputs, which are added to.
            sums: the cotangents of invariant values, which are added to.
        """
        products = self.loop.step.hoisted.products.jaxpr.outvars
        d_products = [
            of_core[self.num_kept + k] if k in self.from_core else _zeros(v)
            for k, v in enumerate(products)
        ]
        results = evaluate(
            self.of_products.backward, [*invariant, *inputs, *d_products]
        )
        counts = [len(self.of_products.inputs), len(self.of_products.invariant)]
        d_at, d_invariant, pairs = split_by(results, counts)
        for i, d in zip(self.of_products.inputs, d_at, strict=True):
            add_to(d_inputs, i, d)
        for i, d in zip(self.of_products.invariant, d_invariant, strict=True):
            add_to(sums, i, d)
        return pairs


def by_operand(
    loop: Loop,
    backward: LoweredBackward | Pullback,
    operands: Sequence[Array],
    results: tuple[list[Array], list[Array], list[Array]],
    matrices: Sequence[Array | None],
    pairs: Sequence[Array],
) -> dict[int, Array]:
    """Return the cotangents of the operands of a loop, by position.

    Args:
        loop: what is static.
        backward: what the results are of.
        operands: of the loop.
        results: the cotangents of states, of inputs and of invariant values.
        matrices: for every product, the gradient of its matrix; None if `pairs` has the
            factors of it.
        pairs: both factors of every product, of all steps.
    """
    invariant, inputs, states = loop.step.parts(operands)
    d_states, d_inputs, d_invariant = results
    first = loop.step.num_invariant
    found = {
        first + i: d.astype(inputs[i].dtype)  # sums over sequences are wider
        for i, d in zip(backward.inputs, d_inputs, strict=True)
    }
    first += loop.step.num_inputs
    floats = [i for i, a in enumerate(states) if is_float(a)]
    found |= {first + i: d for i, d in zip(floats, d_states, strict=True)}
    for i, d in zip(backward.invariant, d_invariant, strict=True):
        add_to(found, i, d.astype(invariant[i].dtype))
    for k, (product, d) in enumerate(zip(backward.products, matrices, strict=True)):
        weight = invariant[product.weight]
        if d is None:
            d = weight_gradient(product, weight, *pairs[2 * k : 2 * k + 2])
        add_to(found, product.weight, d.astype(weight.dtype))
    return found


def add_to(found: dict[int, Array], i: int, d: Array) -> None:
    """Add to the cotangent with a number, or let it be the first one."""
    found[i] = found[i] + d if i in found else d


def _zeros(variable: Any) -> Array:
    return jnp.zeros(type_of(variable).shape, type_of(variable).dtype)


def _saves_nothing(*_: Any, **__: Any) -> bool:
    return False


def saved_shapes(loop: Loop, wrt: Mask) -> list[Any]:
    """Return the types of what the forward pass saves at a step, products included."""
    derivative, step = xla.derivative_of(loop, wrt), loop.step
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    variables = [states[i] for i in derivative.saved_states]
    variables += derivative.forward.jaxpr.outvars[len(step.jaxpr.outvars) :]
    products = step.hoisted.products.jaxpr.outvars
    variables += [products[k] for k in xla.saved_products(loop, wrt)]
    return [struct(v.aval) for v in variables]


def _stacked(lowered: Lowered, result: int) -> Given:
    """Return what a result of all steps is as an input of the backward step."""
    source = lowered.sources[result]
    assert source is not None
    known = lowered.given[-1 - source] if source < 0 else lowered.results[source]
    return Given(Place.INPUT, known.axis, known.most)


def _closed(traced: ClosedJaxpr) -> ClosedJaxpr:
    if traced.consts:
        raise Unsupported("it has constant arrays")
    return traced


def _batch(step: Step) -> int:
    """Return the number of sequences."""
    states = step.jaxpr.invars[step.num_invariant + step.num_inputs :]
    if not states or not type_of(states[0]).shape:
        raise Unsupported("it has no state with an axis of sequences")
    batch = type_of(states[0]).shape[0]
    if is_symbolic_dim(batch):
        raise Unsupported("the number of sequences is a symbol")
    return batch


def _given(loop: Loop) -> list[Given]:
    """Return what the arguments of the step are."""
    step = loop.step
    fixed = step.invariant_axes or (None,) * step.num_invariant
    turned = step.turned or (False,) * step.num_invariant
    return [
        *(
            Given(Place.INVARIANT, axis, turned=t)
            for axis, t in zip(fixed, turned, strict=True)
        ),
        *(
            Given(Place.INPUT, axis, loop.total if i in step.counts else None)
            for i, axis in enumerate(step.input_axes)
        ),
        *[Given(Place.STATE, 0)] * step.num_states,
    ]
