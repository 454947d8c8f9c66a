"""What inputs alone decide and the native loop lacks: computed before the loop."""

from __future__ import annotations

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .jaxprs import jaxpr_of, needed, split_at, type_of, unique, variables
from .programs.lower import INDEXING, PRIMITIVES
from .split import OF_INPUTS, Step, levels_of, read_by, simplicity

_CHEAP = PRIMITIVES - INDEXING
"""What programs compute in no more laborious way than XLA, with their gradients."""


class Precomputed(NamedTuple):
    """A step, some of whose values without states are computed before the loop.

    Attributes:
        values: from invariant values and inputs of the step to what they return.
        step: the rest; its inputs are those of `kept`, then these values.
        invariant: the invariant values, by position, that it reads.
        kept: the inputs, by position, that it reads.
    """

    values: ClosedJaxpr
    step: Step
    invariant: tuple[int, ...]
    kept: tuple[int, ...]


@ft.lru_cache(maxsize=256)
def precompute(step: Step, batch: int, shared: bool) -> Precomputed | None:
    """Take what programs lack out of a step where it needs no states.

    Args:
        step: the step.
        batch: the number of sequences.
        shared: whether all sequences share what depends on the number of the step
            alone. Else an axis of `batch` elements, if it comes first, is theirs.

    Returns:
        The parts; None if there is nothing to take.
    """
    jaxpr = step.jaxpr
    levels = levels_of(jaxpr, step.num_invariant, step.num_inputs)
    is_simple = simplicity(jaxpr.eqns)
    taken = [
        eqn
        for eqn in jaxpr.eqns
        if max(levels[v] for v in eqn.outvars) == OF_INPUTS
        and (eqn.primitive.name not in _CHEAP or _of_keys(eqn))
        and all(map(is_simple, eqn.outvars))
    ]
    values = [v for eqn in taken for v in eqn.outvars]
    rest = [eqn for eqn in jaxpr.eqns if eqn not in taken]
    rest = needed(rest, jaxpr.outvars)
    read = read_by(rest) | dict.fromkeys(unique(jaxpr.outvars))
    values = [v for v in values if v in read]
    if not values:
        return None
    invariant, inputs, states = split_at(
        jaxpr.invars, [step.num_invariant, step.num_invariant + step.num_inputs]
    )
    fixed = tuple(i for i, v in enumerate(invariant) if v in read)
    kept = tuple(i for i, v in enumerate(inputs) if v in read)
    at_step = [*(inputs[i] for i in kept), *values]
    arguments = [*(invariant[i] for i in fixed), *at_step, *states]
    common = set(invariant) | {v for v in inputs if not v.aval.shape}
    for eqn in jaxpr.eqns:
        if common.issuperset(variables(eqn)):
            common.update(eqn.outvars)
    axes = tuple(
        0 if v.aval.shape[:1] == (batch,) and not (shared and v in common) else None
        for v in at_step
    )
    return Precomputed(
        jaxpr_of(jaxpr.eqns, [*invariant, *inputs], values),
        Step(
            jaxpr_of(rest, arguments, jaxpr.outvars),
            len(fixed),
            len(at_step),
            step.num_states,
            axes,
            turned=tuple(step.turned[i] for i in fixed if step.turned),
            counts=tuple(k for k, i in enumerate(kept) if i in step.counts),
        ),
        fixed,
        kept,
    )


def _of_keys(eqn: JaxprEqn) -> bool:
    """Return whether an equation has PRNG keys."""
    return any(
        jnp.issubdtype(type_of(atom).dtype, jax.dtypes.extended)
        for atom in (*eqn.invars, *eqn.outvars)
    )
