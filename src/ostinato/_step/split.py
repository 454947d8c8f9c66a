"""The parts of a step: invariant, computed from inputs for all steps, and recurrent."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .._typing import Array
from .jaxprs import is_literal, jaxpr_of, needed, run, variables

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
"""Operations that are quicker for all steps at once than step by step."""
_SUNK = frozenset({"broadcast_in_dim", "iota"})
"""Invariant operations that cost nothing in the loop, but memory outside of it."""
_INVARIANT, _OF_INPUTS, _RECURRENT = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The part of a step that runs in the loop; compared by identity.

    Attributes:
        traced: from invariant values, values of the step, and states, to new states and
            outputs; without constants.
        num_invariant: the number of invariant values.
        num_inputs: the number of values of the step.
        num_states: the number of states.
        products: the results of products of an invariant value with one that changes,
            and the invariant value.
    """

    traced: ClosedJaxpr
    num_invariant: int
    num_inputs: int
    num_states: int

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr of the step, without constants."""
        return self.traced.jaxpr

    @ft.cached_property
    def products(self) -> dict[Any, Any]:
        """The invariant factor of each product with one, by the product's variable."""
        invariant = set(self.jaxpr.invars[: self.num_invariant])
        found = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in PRODUCTS:
                factors = invariant.intersection(variables(eqn))
                if len(factors) == 1 and len(set(variables(eqn))) == 2:
                    found[eqn.outvars[0]] = factors.pop()
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A traced step, taken apart.

    Attributes:
        step: the part that runs in the loop.
        jaxpr: the whole step, from invariant arrays, states and inputs.
        once: the equations that run once, before the loop.
        at_all_steps: the equations that run for all steps at once, before the loop.
        invariant: the variables that the loop reads and that do not change.
        inputs: the variables of `jaxpr` that the loop reads one step of.
    """

    step: Step
    jaxpr: Jaxpr
    once: list[JaxprEqn]
    at_all_steps: list[JaxprEqn]
    invariant: list[Any]
    inputs: list[Any]
    num_arrays: int

    def before_loop(
        self, arrays: Sequence[Any], inputs: Sequence[Array]
    ) -> tuple[list[Any], list[Array]]:
        """Return the invariant values, and the values of all steps, for the loop.

        Args:
            arrays: the invariant arguments of the step.
            inputs: the inputs of all steps, time first.
        """
        values = dict(zip(self.jaxpr.invars[: self.num_arrays], arrays, strict=True))
        run(self.once, values)
        names = self.jaxpr.invars[self.num_arrays + self.step.num_states :]
        all_steps = dict(zip(names, inputs, strict=True))
        if self.at_all_steps:
            wanted = [v for v in self.inputs if v not in all_steps]
            read = [v for v in _read_by(self.at_all_steps) if v in all_steps]

            def at_one_step(given: dict[Any, Array]) -> list[Array]:
                local = values | given
                run(self.at_all_steps, local)
                return [local[v] for v in wanted]

            computed = jax.vmap(lambda *a: at_one_step(dict(zip(read, a, strict=True))))
            results = computed(*(all_steps[v] for v in read))
            all_steps |= dict(zip(wanted, results, strict=True))
        return [values[v] for v in self.invariant], [all_steps[v] for v in self.inputs]


@ft.lru_cache(maxsize=256)
def split(jaxpr: Jaxpr, num_arrays: int, num_states: int) -> Split:
    """Take a step apart.

    Args:
        jaxpr: the step, flat and without constants, from `num_arrays` invariant arrays,
            `num_states` states and inputs, to new states and outputs.
        num_arrays: see there.
        num_states: see there.
    """
    levels = _levels(jaxpr, num_arrays, num_states)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    hoisted = _hoisted_products(jaxpr.eqns, levels, maker)
    products = {v for eqn in hoisted for v in eqn.outvars}

    def sinks(eqn: JaxprEqn) -> bool:
        return levels[eqn.outvars[0]] == _INVARIANT and eqn.primitive.name in _SUNK

    in_loop = [
        eqn
        for eqn in jaxpr.eqns
        if (levels[eqn.outvars[0]] > _INVARIANT or sinks(eqn))
        and products.isdisjoint(eqn.outvars)
    ]
    in_loop = needed(in_loop, jaxpr.outvars)
    made = {v for eqn in in_loop for v in eqn.outvars}
    states = jaxpr.invars[num_arrays : num_arrays + num_states]
    wanted = _ordered(v for eqn in in_loop for v in variables(eqn))
    wanted += [v for v in jaxpr.outvars if not is_literal(v) and v not in wanted]
    wanted = [v for v in wanted if v not in made and v not in states]
    invariant = [v for v in wanted if levels[v] == _INVARIANT]
    inputs = [v for v in wanted if levels[v] == _OF_INPUTS]

    at_all_steps = needed(
        [e for e in jaxpr.eqns if levels[e.outvars[0]] == _OF_INPUTS],
        [v for v in inputs if v in products],
    )
    once = [e for e in jaxpr.eqns if levels[e.outvars[0]] == _INVARIANT]
    once = needed(once, [*invariant, *_read_by(at_all_steps)])
    step = Step(
        jaxpr_of(in_loop, [*invariant, *inputs, *states], jaxpr.outvars),
        len(invariant),
        len(inputs),
        num_states,
    )
    return Split(step, jaxpr, once, at_all_steps, invariant, inputs, num_arrays)


def _levels(jaxpr: Jaxpr, num_arrays: int, num_states: int) -> dict[Any, int]:
    """Return for each variable what it depends on: nothing, inputs, or states."""
    recurrent = num_arrays + num_states
    levels = dict.fromkeys(jaxpr.invars[:num_arrays], _INVARIANT)
    levels |= dict.fromkeys(jaxpr.invars[num_arrays:recurrent], _RECURRENT)
    levels |= dict.fromkeys(jaxpr.invars[recurrent:], _OF_INPUTS)
    for eqn in jaxpr.eqns:
        level = max((levels[v] for v in variables(eqn)), default=_INVARIANT)
        levels |= dict.fromkeys(eqn.outvars, level)
    return levels


def _hoisted_products(
    eqns: Sequence[JaxprEqn], levels: dict[Any, int], maker: dict[Any, JaxprEqn]
) -> list[JaxprEqn]:
    """Return the products of inputs with invariant values.

    A product stays in the loop if control flow leads to its factors: that would run for
    all steps what a step may leave out.
    """
    simple: dict[Any, bool] = {}

    def is_simple(v: Any) -> bool:
        if v not in simple:
            eqn = maker.get(v)
            simple[v] = eqn is None or (
                levels[v] == _INVARIANT
                or (not _has_inner(eqn) and all(map(is_simple, variables(eqn))))
            )
        return simple[v]

    return [
        eqn
        for eqn in eqns
        if eqn.primitive.name in PRODUCTS
        and sorted(levels[v] for v in variables(eqn)) == [_INVARIANT, _OF_INPUTS]
        and is_simple(eqn.outvars[0])
    ]


def _has_inner(eqn: JaxprEqn) -> bool:
    inner = next(iter(jaxprs_in_params(eqn.params)), None)
    return inner is not None and eqn.primitive.name != "custom_jvp_call"


def _read_by(eqns: Iterable[JaxprEqn]) -> dict[Any, None]:
    """Return the variables that equations read and do not make, in order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return dict.fromkeys(v for e in eqns for v in variables(e) if v not in made)


def _ordered(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
