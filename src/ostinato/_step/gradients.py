"""The forward step that saves values, and the backward step that reads them.

A product with an invariant value is differentiated in two parts. Its gradient with
respect to the factor that changes is computed in the backward step. Its gradient with
respect to the invariant factor is one product of the changing factors and the
cotangents of all steps, after the loop; the backward step returns both.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._rnn.sharding import make_varying
from .._typing import Array
from .jaxprs import (
    evaluate,
    flat_trace,
    is_literal,
    jaxpr_of,
    read,
    run_one,
    split_by,
    struct,
    type_of,
    unique,
    variables,
)
from .maxima import steady
from .split import Step

Policy = Callable[..., bool] | None
Mask = tuple[bool, ...]
"""For each operand of a loop, whether to differentiate with respect to it."""


class Product(NamedTuple):
    """A product in the loop of an invariant value with one that changes.

    Attributes:
        eqn: its equation.
        weight: the position of the invariant factor among the operands of the loop.
        changing: the position of the other factor among the operands of the equation.
    """

    eqn: JaxprEqn
    weight: int
    changing: int

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return the product."""
        return run_one(self.eqn, [x, weight] if self.changing == 0 else [weight, x])[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """A step taken apart for reverse mode.

    Attributes:
        step: the step.
        forward: from invariant values, inputs and states, to new states, outputs and
            the values to save.
        num_saved: the number of values to save.
        saved_states: the states, by position, that the backward step reads.
        before_backward: from invariant values, to `backward`'s further ones.
        backward: from invariant values, further ones, inputs, the saved states, saved
            values and the cotangents of new states and outputs, to those of the states,
            of the inputs and of the invariant values that are differentiated; then the
            changing factor and the cotangent of every product.
        products: the products whose weight is differentiated.
        invariant: the invariant values that `backward` returns a cotangent of.
        inputs: the inputs that `backward` returns a cotangent of.
        read_inputs: the inputs, by position, that `backward` reads.
    """

    step: Step
    forward: ClosedJaxpr
    num_saved: int
    saved_states: tuple[int, ...]
    before_backward: ClosedJaxpr
    backward: ClosedJaxpr
    products: tuple[Product, ...]
    invariant: tuple[int, ...]
    inputs: tuple[int, ...]
    read_inputs: tuple[int, ...]


def is_float(aval: Any) -> bool:
    """Return whether values of a type have derivatives."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def float_positions(avals: Sequence[Any]) -> list[int]:
    """Return the positions of the types whose values have derivatives."""
    return [i for i, aval in enumerate(avals) if is_float(aval)]


@ft.lru_cache(maxsize=256)
def differentiate(step: Step, wrt: Mask, policy: Policy) -> Derivative:
    """Take a step apart for reverse mode.

    Args:
        step: the step.
        wrt: for each invariant value, input and state, whether to differentiate with
            respect to it; states with derivatives are differentiated in any case.
        policy: what the forward step saves, as for `jax.checkpoint`.
    """
    core = _Core.of(step, wrt)
    saving = _Saving.of(core, policy)
    back = saving.backward(core)
    # The backward step gets the states that it reads, and no others.
    sizes = [len(step.jaxpr.invars), len(saving.again)]
    operands, more, others = split_by(back.jaxpr.invars, sizes)
    fixed, inputs, states = step.parts(operands)
    used = {v for eqn in back.jaxpr.eqns for v in variables(eqn)}
    used |= set(unique(back.jaxpr.outvars))
    kept = [i for i, v in enumerate(states) if v in used]
    arguments = [*fixed, *more, *inputs, *(states[i] for i in kept), *others]
    backward = jaxpr_of(
        back.jaxpr.eqns,
        arguments,
        back.jaxpr.outvars,
        dict(zip(back.jaxpr.constvars, back.consts, strict=True)),
    )
    forward, constants = saving.jaxpr, saving.constants
    results = [*forward.outvars[: len(step.jaxpr.outvars)], *saving.stacked]
    invariant, _, _ = step.parts(forward.invars)
    return Derivative(
        step,
        jaxpr_of(forward.eqns, forward.invars, results, constants),
        len(saving.stacked),
        tuple(kept),
        jaxpr_of(forward.eqns, invariant, saving.again, constants),
        backward,
        tuple(core.products),
        tuple(core.invariant),
        tuple(core.inputs),
        tuple(i for i, v in enumerate(inputs) if v in used),
    )


class _Saving(NamedTuple):
    """The forward step, with the residuals of its pullback.

    Attributes:
        jaxpr: from the operands of a step to its results, and then all residuals.
        constants: the values of its constants.
        pullback: the tree of the pullback, whose leaves the residuals are.
        again: the residuals that invariant values alone make: they are made once more.
        stacked: the residuals of each step, which are saved.
    """

    jaxpr: Jaxpr
    constants: dict[Any, Any]
    pullback: Any
    again: list[Any]
    stacked: list[Any]

    @classmethod
    def of(cls, core: _Core, policy: Policy) -> _Saving:
        step = core.step
        trees: list[Any] = []

        def forward(*operands: Any) -> list[Any]:
            run = ft.partial(core, operands, policy)
            results, pull, others = jax.vjp(
                run, *core.variables(operands), has_aux=True
            )
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return [*core.merge(results, others), *leaves]

        traced = flat_trace(forward, *(struct(v.aval) for v in step.jaxpr.invars))
        jaxpr = traced.jaxpr
        fixed = _invariant_variables(jaxpr, step.num_invariant)
        residuals = unique(jaxpr.outvars[len(step.jaxpr.outvars) :])
        made = [v for v in residuals if v not in jaxpr.invars]
        return cls(
            jaxpr,
            dict(zip(jaxpr.constvars, traced.consts, strict=True)),
            trees[-1],
            [v for v in made if v in fixed],
            [v for v in made if v not in fixed],
        )

    def backward(self, core: _Core) -> ClosedJaxpr:
        """Return the step from operands, `again`, `stacked` and cotangents of results.

        It returns the cotangents of `core.variables`, see there.
        """
        invars, results = self.jaxpr.invars, core.step.jaxpr.outvars
        residuals = self.jaxpr.outvars[len(results) :]
        sizes = [len(invars), len(self.again), len(self.stacked)]

        def pull(*arguments: Any) -> list[Any]:
            operands, more, saved, cotangents = split_by(arguments, sizes)
            values = dict(zip(invars, operands, strict=True))
            values |= zip(self.again, more, strict=True)
            values |= zip(self.stacked, saved, strict=True)
            leaves = [read(v, values) for v in residuals]
            return core.cotangents(
                jax.tree.unflatten(self.pullback, leaves)(cotangents)
            )

        given = [
            *invars,
            *self.again,
            *self.stacked,
            *(results[i] for i in core.results),
        ]
        return flat_trace(pull, *(struct(v.aval) for v in given))


class _Core(NamedTuple):
    """A step as a function of what it is differentiated with respect to.

    Attributes:
        step: the step.
        products: the products whose weight is differentiated after the loop.
        invariant: positions of the invariant values differentiated in the loop.
        inputs: positions of the inputs that are differentiated.
        states: positions of the states that have derivatives.
        results: positions of the results that have derivatives.
    """

    step: Step
    products: list[Product]
    invariant: list[int]
    inputs: list[int]
    states: list[int]
    results: list[int]

    @classmethod
    def of(cls, step: Step, wrt: Mask) -> _Core:
        jaxpr, num, inputs = step.jaxpr, step.num_invariant, step.num_inputs
        weights = {v: i for i, v in enumerate(jaxpr.invars[:num]) if wrt[i]}
        products = []
        for eqn in jaxpr.eqns:
            factor = step.products.get(eqn.outvars[0])
            if factor in weights:
                changing = int(eqn.invars[0] is factor)
                products.append(Product(eqn, weights[factor], changing))
        after = {id(p.eqn) for p in products}
        others = {v for e in jaxpr.eqns if id(e) not in after for v in variables(e)}
        others |= {v for v in jaxpr.outvars if not is_literal(v)}
        states = [v.aval for v in jaxpr.invars[num + inputs :]]
        return cls(
            step,
            products,
            [i for v, i in weights.items() if v in others],
            [i for i in range(inputs) if wrt[num + i]],
            float_positions(states),
            float_positions([v.aval for v in jaxpr.outvars]),
        )

    def variables(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the differentiated operands, and a probe for each product."""
        num = self.step.num_invariant
        first = num + self.step.num_inputs
        probes = []
        for eqn, _, changing in self.products:
            x, weight = type_of(eqn.invars[changing]), type_of(eqn.invars[1 - changing])
            y = type_of(eqn.outvars[0])
            dtype = _factor_dtype(x.dtype, weight.dtype)
            probes.append((jnp.zeros(x.shape, dtype), jnp.zeros(y.shape, y.dtype)))
        return (
            [operands[i] for i in self.invariant],
            [operands[num + i] for i in self.inputs],
            [operands[first + i] for i in self.states],
            probes,
        )

    def __call__(
        self,
        operands: Sequence[Any],
        policy: Policy,
        invariant: list[Any],
        inputs: list[Any],
        states: list[Any],
        probes: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the results that have derivatives, and the others."""
        num = self.step.num_invariant
        first = num + self.step.num_inputs

        def compute(invariant: Any, inputs: Any, states: Any, probes: Any) -> Any:
            full = list(operands)
            for where, values in (
                (self.invariant, invariant),
                ([num + i for i in self.inputs], inputs),
                ([first + i for i in self.states], states),
            ):
                for i, value in zip(where, values, strict=True):
                    full[i] = value
            probe_of = {
                id(p.eqn): (p, probe)
                for p, probe in zip(self.products, probes, strict=True)
            }

            def hook(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
                if id(eqn) not in probe_of:
                    return steady(eqn, values)
                product, probe = probe_of[id(eqn)]
                x, weight = values[product.changing], values[1 - product.changing]
                x = x.astype(_factor_dtype(x.dtype, weight.dtype))
                return [_product(product, x, weight, *probe)]

            results = evaluate(self.step.traced, full, hook)
            return (
                [results[i] for i in self.results],
                [r for i, r in enumerate(results) if i not in self.results],
            )

        return jax.checkpoint(compute, policy=policy, prevent_cse=False)(
            invariant, inputs, states, probes
        )

    def merge(self, results: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Return all results in their order."""
        left, right = iter(results), iter(others)
        count = len(results) + len(others)
        return [next(left if i in self.results else right) for i in range(count)]

    def cotangents(self, pulled: Any) -> list[Any]:
        """Return what the backward step returns, of the cotangents of `variables`."""
        invariant, inputs, states, probes = pulled
        return [*states, *inputs, *invariant, *(a for pair in probes for a in pair)]


def _factor_dtype(x: Any, weight: Any) -> Any:
    """Return the dtype in which `x` is multiplied: integers have no cotangents."""
    return x if jnp.issubdtype(x, jnp.inexact) else weight


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    product: Product, x: Array, weight: Array, x_probe: Array, y_probe: Array
) -> Array:
    """Return a product whose probes' cotangents are `x` and the result's cotangent."""
    return product(x, weight)


def _product_forward(
    product: Product, x: Array, weight: Array, x_probe: Array, y_probe: Array
) -> tuple[Array, tuple[Array, Array]]:
    return product(x, weight), (x, weight)


def _product_backward(product: Product, saved: Any, dy: Array) -> tuple[Any, ...]:
    x, weight = saved
    pull = jax.linear_transpose(lambda x: product(x, weight), x)
    return (*pull(dy), None, x, dy)


_product.defvjp(_product_forward, _product_backward)


def _invariant_variables(jaxpr: Any, num_invariant: int) -> set[Any]:
    """Return the variables that depend on the invariant values alone, or on nothing."""
    fixed = {*jaxpr.constvars, *jaxpr.invars[:num_invariant]}
    for eqn in jaxpr.eqns:
        if fixed.issuperset(variables(eqn)):
            fixed.update(eqn.outvars)
    return fixed


def weight_gradient(product: Any, weight: Array, x: Array, dy: Array) -> Array:
    """Return the gradient of a weight: one product of all steps."""

    def all_steps(weight: Array) -> Array:
        return jax.vmap(product, in_axes=(0, None))(x, weight)

    x, dy, weight = make_varying([x, dy, weight])
    (gradient,) = jax.linear_transpose(all_steps, weight)(dy)
    return gradient
