"""What the forward pass saves for the backward pass, chosen by bytes."""

from __future__ import annotations

import dataclasses
import functools as ft
from typing import Any

from .gradients import Derivative, Mask, Policy, differentiate
from .jaxprs import is_literal, known_product, type_of
from .split import Step


@dataclasses.dataclass(frozen=True)
class Choice:
    """A policy, and results that are saved too where this takes no more bytes.

    Results that are dear to compute again may take the place of others: those of an
    LSTM's gates, for example, make its products unnecessary.

    Attributes:
        policy: what is saved, as for `jax.checkpoint`.
        also: names of primitives whose results may be saved too.
    """

    policy: Any
    also: frozenset[str]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Return whether the result of an operation is saved in any case."""
        return self.policy(primitive, *avals, **params)


@dataclasses.dataclass(frozen=True)
class _WithSmall:
    """A policy that saves results of at most `most` elements too."""

    choice: Choice
    most: int

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        if self.choice.policy(primitive, *avals, **params):
            return True
        size = max((known_product(a.shape) for a in avals), default=0)
        return primitive.name in self.choice.also and size <= self.most


@dataclasses.dataclass(frozen=True)
class _WithoutReads:
    """A policy that does not save what `reads` are of, but reads it once more."""

    policy: Any
    reads: frozenset[Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        if _read_of(primitive, avals, params) in self.reads:
            return False
        return self.policy(primitive, *avals, **params)


def _read_of(primitive: Any, avals: Any, params: Any) -> Any:
    """Return what tells reads of a step from each other; None of other operations."""
    if primitive.name != "gather":
        return None
    return (*(a.shape for a in avals), params["slice_sizes"])


def _reads_of_invariant(core: Step) -> frozenset[Any]:
    """Return the reads whose array all steps share: their index says all of them."""
    shared = {*core.jaxpr.invars[: core.num_invariant], *core.jaxpr.constvars}
    reads: tuple[set, set] = set(), set()
    for eqn in core.jaxpr.eqns:
        if eqn.primitive.name == "gather":
            avals = [v.aval for v in eqn.invars]
            is_shared = not is_literal(eqn.invars[0]) and eqn.invars[0] in shared
            reads[is_shared].add(_read_of(eqn.primitive, avals, eqn.params))
    return frozenset(reads[True] - reads[False])


@ft.lru_cache(maxsize=256)
def best_derivative(
    core: Step, wrt: Mask, policy: Policy, num_kept: int, saves_products: bool
) -> Derivative:
    """Return the derivative of a step with what is best saved.

    Args:
        core: the step.
        wrt: as for `differentiate`.
        policy: as for `jax.checkpoint`, or a `Choice`.
        num_kept: the inputs that are at hand; the others are products of inputs.
        saves_products: whether these are saved if the backward step reads them.
    """
    if not isinstance(policy, Choice):
        return differentiate(core, wrt, policy)
    reads = _reads_of_invariant(core)
    if reads:
        policy = Choice(_WithoutReads(policy.policy, reads), policy.also)
    least = differentiate(core, wrt, policy.policy)
    sizes = {
        known_product(type_of(eqn.outvars[0]).shape)
        for eqn in core.jaxpr.eqns
        if eqn.primitive.name in policy.also
    }
    bytes_of = ft.partial(
        _saved_bytes, num_kept=num_kept, saves_products=saves_products
    )
    for most in sorted(sizes, reverse=True):
        more = differentiate(core, wrt, _WithSmall(policy, most))
        if bytes_of(more) <= bytes_of(least):
            return more
    return least


def _saved_bytes(derivative: Derivative, num_kept: int, saves_products: bool) -> int:
    step = derivative.step
    inputs = step.jaxpr.invars[step.num_invariant :]
    states = inputs[step.num_inputs :]
    saved = [states[i] for i in derivative.saved_states]
    saved += derivative.forward.jaxpr.outvars[len(step.jaxpr.outvars) :]
    if saves_products:
        saved += [inputs[i] for i in derivative.read_inputs if i >= num_kept]
    types = map(type_of, saved)
    return sum(known_product(a.shape) * a.dtype.itemsize for a in types)
