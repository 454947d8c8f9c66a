"""Branches and short inner loops of a step as operations on all of its values."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .._compat import scan_counts
from .._typing import Array
from .cost import CUSTOM, equations_of, leaves_out_much
from .jaxprs import evaluate, is_literal, run_one, struct, type_of, variables
from .programs.lower import PRIMITIVES

_MOST_ITERATIONS, _MOST_EQUATIONS = 16, 256
"""Of an inner loop that is written out."""
_POLES = frozenset(
    "acos acosh asin atan2 atanh cbrt div erf_inv integer_pow log log1p log2 pow rem "
    "rsqrt sqrt tan".split()
)
"""Operations whose results or derivatives may be infinite."""
_FLOW = frozenset({"cond", "scan"})


@ft.lru_cache(maxsize=256)
def without_control_flow(jaxpr: Jaxpr, num_fixed: int) -> Jaxpr:
    """Write out branches and short loops where this is about as quick.

    All branches of a `cond` run, and the results of one are selected.

    Args:
        jaxpr: a step, flat and without constants.
        num_fixed: how many of its first arguments are the same at every step.
    """
    if not any(eqn.primitive.name in _FLOW for eqn in jaxpr.eqns):
        return jaxpr
    fixed = set(jaxpr.invars[:num_fixed])
    for eqn in jaxpr.eqns:
        if fixed.issuperset(variables(eqn)):
            fixed.update(eqn.outvars)

    def hook(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if fixed.issuperset(variables(eqn)):
            return None
        changing = [v not in fixed for v in eqn.invars if not is_literal(v)]
        return _written_out(eqn, inputs, changing)

    def run(*arguments: Any) -> list[Any]:
        return evaluate(ClosedJaxpr(jaxpr, ()), arguments, hook)

    closed = jax.make_jaxpr(run)(*(struct(v.aval) for v in jaxpr.invars))
    assert not closed.consts, "a step that has been traced closes over nothing"
    return closed.jaxpr


def _written_out(
    eqn: JaxprEqn, inputs: list[Any], changing: Sequence[bool]
) -> list[Any] | None:
    """Return the results of a branch or a loop, or None where it stays as it is.

    Args:
        eqn: the equation.
        inputs: its operands.
        changing: which of those that are no literals differ from step to step.
    """
    name = eqn.primitive.name
    if name == "cond" and stays(eqn) is None:
        which = iter(changing)
        flags = [not is_literal(v) and next(which) for v in eqn.invars]
        return _select_branch(eqn, inputs, flags[1:])
    if name == "scan" and stays(eqn) is None:
        return _unrolled(eqn, inputs)
    return None


def stays(eqn: JaxprEqn) -> str | None:
    """Return why a branch or a loop is not written out, or None if it is."""
    if eqn.primitive.name == "scan":
        count = eqn.params["length"]
        equations = count * sum(1 for _ in equations_of(eqn.params["jaxpr"].jaxpr))
        if count > _MOST_ITERATIONS or equations > _MOST_EQUATIONS:
            return "it has a long `scan`"
        return None
    branches = [branch.jaxpr for branch in eqn.params["branches"]]
    found = [e for branch in branches for e in equations_of(branch)]
    for inner in found:
        flow = inner.primitive.name in _FLOW and stays(inner) is None
        if inner.primitive.name not in PRIMITIVES and not flow:
            return f"it has `{inner.primitive.name}` in a branch"
        if inner.primitive.name in CUSTOM and any(
            e.primitive.name in _POLES - {"log1p"}
            for closed in jaxprs_in_params(inner.params)
            for e in equations_of(closed)
        ):
            return f"it has `{inner.primitive.name}` in a branch"
    if leaves_out_much(branches):
        return "it has `cond` that leaves out much work"
    return None


def _select_branch(
    eqn: JaxprEqn, inputs: list[Any], changing: Sequence[bool]
) -> list[Any]:
    """Run all branches and select the results of one.

    Branches that are not taken get zeros, and a number between 0 and 1 where there are
    poles, so that neither their results nor their derivatives are infinite: with a
    cotangent of 0, those would make NaN.
    """
    index, *operands = inputs
    branches = eqn.params["branches"]
    index = jnp.clip(index, 0, len(branches) - 1)
    results = []
    for k, branch in enumerate(branches):
        taken = index == k

        def hook(
            inner: JaxprEqn, values: list[Any], taken: Array = taken
        ) -> list[Any] | None:
            if _has_pole(inner):
                safe = 1.5 if inner.primitive.name == "acosh" else 0.5
                return run_one(inner, [_guarded(taken, v, safe) for v in values])
            flags = [True] * len(variables(inner))
            return _written_out(inner, values, flags)

        given = [
            _guarded(taken, a, 0) if c else a
            for a, c in zip(operands, changing, strict=True)
        ]
        results.append(evaluate(branch, given, hook))
    if len(branches) == 2:
        return [lax.select_n(index != 0, *pair) for pair in zip(*results, strict=True)]
    found = results[-1]
    for k in reversed(range(len(branches) - 1)):
        pairs = zip(found, results[k], strict=True)
        found = [lax.select_n(index == k, *pair) for pair in pairs]
    return found


def _has_pole(eqn: JaxprEqn) -> bool:
    """Return whether finite operands may lead to infinite results or derivatives."""
    if eqn.primitive.name == "div":
        return not is_literal(eqn.invars[1])
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] < 0
    return eqn.primitive.name in _POLES


def _guarded(taken: Array, value: Any, safe: float) -> Any:
    aval = jax.typeof(value)
    if not jnp.issubdtype(aval.dtype, jnp.floating) or isinstance(value, (int, float)):
        return value
    return lax.select_n(taken, jnp.full(aval.shape, safe, aval.dtype), value)


def _unrolled(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Run the iterations of an inner loop one after another."""
    params = eqn.params
    count, (num_consts, num_carry) = params["length"], scan_counts(params)
    consts = inputs[:num_consts]
    carry = inputs[num_consts : num_consts + num_carry]
    per_iteration = inputs[num_consts + num_carry :]
    order = range(count)
    rows: list[list[Any]] = [[]] * count

    def hook(inner: JaxprEqn, values: list[Any]) -> list[Any] | None:
        return _written_out(inner, values, [True] * len(variables(inner)))

    for i in reversed(order) if params["reverse"] else order:
        at = [lax.index_in_dim(a, i, keepdims=False) for a in per_iteration]
        results = evaluate(params["jaxpr"], [*consts, *carry, *at], hook)
        carry, rows[i] = results[:num_carry], results[num_carry:]
    if count == 0:
        found = [type_of(v) for v in eqn.outvars[num_carry:]]
        return [*carry, *(jnp.zeros(a.shape, a.dtype) for a in found)]
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]
