"""The parts of a step: what is invariant, what inputs decide, and what recurs."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .jaxprs import jaxpr_of, needed, split_at, type_of, unique, variables

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
"""Operations that are quicker for all steps at once than step by step."""
_SUNK = frozenset({"broadcast_in_dim", "iota"})
"""Invariant operations that cost nothing in the loop, but memory outside of it."""
_PARTS = frozenset({"slice", "split"})
"""Operations whose results are, in the native loop, parts of what they are given."""
_CALLBACKS = frozenset({"debug_callback", "io_callback", "pure_callback"})
_INVARIANT, OF_INPUTS, _RECURRENT = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What runs at each step of a loop; compared by identity.

    Attributes:
        traced: from invariant values, inputs of the step, and states, to new states and
            outputs; without constants.
        num_invariant: the number of invariant values.
        num_inputs: the number of inputs.
        num_states: the number of states.
        input_axes: which axis of each input is that of sequences; None if it has none.
        invariant_axes: the same for invariant values; None also if that is not known.
        turned: for each invariant value, whether it is the transpose of a matrix, which
            the native loop then reads instead; empty if none is.
        counts: the inputs, by position, that are numbers of steps, and so at most the
            number of all steps.
    """

    traced: ClosedJaxpr
    num_invariant: int
    num_inputs: int
    num_states: int
    input_axes: tuple[int | None, ...] = ()
    invariant_axes: tuple[int | None, ...] | None = None
    turned: tuple[bool, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr of the step, without constants."""
        return self.traced.jaxpr

    def parts(self, operands: Sequence[Any]) -> tuple[list, list, list]:
        """Return invariant values, inputs and states of a loop's operands."""
        first = self.num_invariant + self.num_inputs
        operands = list(operands)
        return (
            operands[: self.num_invariant],
            operands[self.num_invariant : first],
            operands[first : first + self.num_states],
        )

    @ft.cached_property
    def products(self) -> dict[Any, Any]:
        """The products of an invariant value with one that changes.

        The key is the variable of the product, the value that of the invariant factor.
        """
        invariant = set(self.jaxpr.invars[: self.num_invariant])
        found = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in PRODUCTS:
                factors = invariant.intersection(variables(eqn))
                if len(factors) == 1 and len(set(variables(eqn))) == 2:
                    found[eqn.outvars[0]] = factors.pop()
        return found

    @ft.cached_property
    def hoisted(self) -> Hoisted:
        """The step without the products of its inputs, which come from outside."""
        jaxpr = self.jaxpr
        invariant, inputs, states = split_at(
            jaxpr.invars, [self.num_invariant, self.num_invariant + self.num_inputs]
        )
        levels = levels_of(jaxpr, self.num_invariant, self.num_inputs)
        products = _products_of_inputs(jaxpr.eqns, levels)
        rest = [eqn for eqn in jaxpr.eqns if eqn.outvars[0] not in products]
        rest = needed(rest, jaxpr.outvars)
        read = read_by(rest) | dict.fromkeys(unique(jaxpr.outvars))
        kept = tuple(i for i, v in enumerate(inputs) if v in read)
        at_step = [*(inputs[i] for i in kept), *products]
        core = Step(
            jaxpr_of(rest, [*invariant, *at_step, *states], jaxpr.outvars),
            self.num_invariant,
            len(at_step),
            self.num_states,
        )
        made = jaxpr_of(jaxpr.eqns, [*invariant, *inputs], products)
        return Hoisted(made, core, kept)


class Hoisted(NamedTuple):
    """A step whose products of inputs are computed before the loop.

    Attributes:
        products: from invariant values and inputs of the step to products of inputs.
        core: the rest; its inputs are those of `kept`, then the products.
        kept: the inputs, by position, that the rest reads.
    """

    products: ClosedJaxpr
    core: Step
    kept: tuple[int, ...]


class Traced(NamedTuple):
    """A step without what is the same at every step.

    Attributes:
        once: from the invariant arguments to the invariant values of the step.
        step: the rest.
        inputs: the inputs, by position, that it reads.
    """

    once: ClosedJaxpr
    step: Step
    inputs: tuple[int, ...]


@ft.lru_cache(maxsize=256)
def without_invariants(
    jaxpr: Jaxpr,
    num_arrays: int,
    num_states: int,
    counts: tuple[int, ...],
    keep_parts: bool = False,
) -> Traced:
    """Take what is the same at every step out of a step.

    Args:
        jaxpr: the step, flat and without constants, from `num_arrays` invariant arrays,
            `num_states` states and inputs, to new states and outputs.
        num_arrays: see there.
        num_states: see there.
        counts: the inputs, by position, that are numbers of steps.
        keep_parts: whether parts of invariant vectors stay in the step. They cost
            nothing in the native loop, and a kernel each outside of it.
    """
    arrays, states, inputs = split_at(
        jaxpr.invars, [num_arrays, num_arrays + num_states]
    )
    fixed = set(arrays)
    for eqn in jaxpr.eqns:
        if fixed.issuperset(variables(eqn)):
            fixed.update(eqn.outvars)
    in_loop = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _SUNK
        or (keep_parts and _is_part_of_vector(eqn, arrays, states))
        or not fixed.issuperset(eqn.outvars)
    ]
    in_loop = needed(in_loop, jaxpr.outvars)
    read = read_by(in_loop)
    made = {v for eqn in in_loop for v in eqn.outvars}
    read |= dict.fromkeys(v for v in unique(jaxpr.outvars) if v not in made)
    invariant = [v for v in read if v in fixed]
    kept = tuple(i for i, v in enumerate(inputs) if v in read)
    at_step = [inputs[i] for i in kept]
    transposes = {eqn.outvars[0] for eqn in jaxpr.eqns if _turns_matrix(eqn)}
    step = Step(
        jaxpr_of(in_loop, [*invariant, *at_step, *states], jaxpr.outvars),
        len(invariant),
        len(at_step),
        num_states,
        tuple(0 if v.aval.shape else None for v in at_step),
        turned=tuple(v in transposes for v in invariant),
        counts=tuple(k for k, i in enumerate(kept) if i in counts),
    )
    return Traced(jaxpr_of(jaxpr.eqns, arrays, invariant), step, kept)


def _turns_matrix(eqn: JaxprEqn) -> bool:
    """Return whether an equation transposes a matrix of several rows and columns.

    A column may have a number for each sequence: it is no matrix of a product.
    """
    shape = type_of(eqn.outvars[0]).shape
    return eqn.primitive.name == "transpose" and len(shape) == 2 and 1 not in shape


def _is_part_of_vector(
    eqn: JaxprEqn, arrays: Sequence[Any], states: Sequence[Any]
) -> bool:
    """Return whether an equation takes some elements of a vector.

    As many as there are sequences may be an element for each of them: that is none.
    """
    vector = eqn.primitive.name in _PARTS and len(type_of(eqn.invars[0]).shape) == 1
    if not vector or not any(eqn.invars[0] is v for v in arrays):
        return False
    part = type_of(eqn.outvars[0]).shape
    return all(type_of(v).shape[:1] != part[:1] for v in states)


def levels_of(jaxpr: Jaxpr, num_invariant: int, num_inputs: int) -> dict[Any, int]:
    """Return for each variable what it depends on: nothing, inputs, or states."""
    invariant, inputs, states = split_at(
        jaxpr.invars, [num_invariant, num_invariant + num_inputs]
    )
    levels = dict.fromkeys(invariant, _INVARIANT)
    levels |= dict.fromkeys(inputs, OF_INPUTS)
    levels |= dict.fromkeys(states, _RECURRENT)
    for eqn in jaxpr.eqns:
        level = max((levels[v] for v in variables(eqn)), default=_INVARIANT)
        levels |= dict.fromkeys(eqn.outvars, level)
    return levels


def _products_of_inputs(eqns: Sequence[JaxprEqn], levels: dict[Any, int]) -> list[Any]:
    """Return the variables of products of inputs with invariant values."""
    is_simple = simplicity(eqns)
    return [
        eqn.outvars[0]
        for eqn in eqns
        if eqn.primitive.name in PRODUCTS
        and sorted(levels[v] for v in variables(eqn)) == [_INVARIANT, OF_INPUTS]
        and is_simple(eqn.outvars[0])
    ]


def simplicity(eqns: Sequence[JaxprEqn]) -> Callable[[Any], bool]:
    """Return a function that tells whether no control flow leads to a variable.

    What it leads to stays in the loop: else all steps would run what a step may leave
    out. So does what callbacks lead to, which take one step at a time.
    """
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    simple: dict[Any, bool] = {}

    def is_simple(v: Any) -> bool:
        if v not in simple:
            eqn = maker.get(v)
            simple[v] = eqn is None or (
                not (has_inner(eqn) and eqn.primitive.name != "custom_jvp_call")
                and eqn.primitive.name not in _CALLBACKS
                and all(map(is_simple, variables(eqn)))
            )
        return simple[v]

    return is_simple


def has_inner(eqn: JaxprEqn) -> bool:
    """Return whether functions stand in an equation."""
    return next(iter(jaxprs_in_params(eqn.params)), None) is not None


def read_by(eqns: Iterable[JaxprEqn]) -> dict[Any, None]:
    """Return the variables that equations read and do not make, in order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return dict.fromkeys(v for e in eqns for v in variables(e) if v not in made)
