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
from .cost import equations_of, leaves_out_much
from .jaxprs import (
    CHECKPOINTS,
    checkpoint_like,
    evaluate,
    is_literal,
    run_one,
    struct,
    type_of,
    variables,
)
from .programs.lower import PRIMITIVES

_MOST_ITERATIONS, _MOST_EQUATIONS = 16, 256
"""Of an inner loop that is written out."""
_POLES = frozenset(
    "acos acosh asin atan2 atanh cbrt erf_inv log log2 pow rem rsqrt sqrt tan".split()
)
"""Operations whose results or derivatives may be infinite, whatever their operands.

Others are so for some operands, see `_poles`.
"""
_GROWING = frozenset("cosh exp exp2 expm1 integer_pow sinh square".split())
"""Operations whose results may be infinite where their operands are large."""
_FLOW = frozenset({"cond", "scan"})
_OPEN = _FLOW | CHECKPOINTS | {"jit"}
"""Operations whose inside is reached when a branch is written out."""


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
        changing = [not is_literal(v) and v not in fixed for v in eqn.invars]
        return _written_out(eqn, inputs, changing)

    def run(*arguments: Any) -> list[Any]:
        return evaluate(ClosedJaxpr(jaxpr, ()), arguments, hook)

    closed = jax.make_jaxpr(run)(*(struct(v.aval) for v in jaxpr.invars))
    assert not closed.consts, "a step that has been traced closes over nothing"
    return closed.jaxpr


def _written_out(
    eqn: JaxprEqn,
    inputs: list[Any],
    changing: Sequence[bool] | None = None,
    taken: Array | None = None,
) -> list[Any] | None:
    """Return the results of an equation by others, or None where it stays as it is.

    Args:
        eqn: the equation.
        inputs: its operands.
        changing: which of them differ from step to step; None if all may.
        taken: whether the branch that it stands in is taken; None if it is in none.
    """
    name = eqn.primitive.name
    if name in _FLOW and stays(eqn) is None:
        if name == "scan":
            return _unrolled(eqn, inputs, taken)
        return _select_branch(eqn, inputs, changing or [True] * len(inputs), taken)
    if taken is None:
        return None
    if name in CHECKPOINTS:
        return _checkpoint_of_branch(eqn, inputs, taken)
    if name in _GROWING or _poles([eqn]):
        safe = 1.5 if name == "acosh" else 0.5
        return run_one(eqn, [_guarded(taken, v, safe) for v in inputs])
    return None


def _inside(jaxpr: ClosedJaxpr, inputs: Sequence[Any], taken: Array | None) -> list:
    """Run what is inside of an equation, written out."""
    return evaluate(jaxpr, inputs, ft.partial(_written_out, taken=taken))


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
        if inner.primitive.name not in _OPEN and _has_poles(inner):
            return f"it has `{inner.primitive.name}` in a branch"
    if leaves_out_much(branches):
        return "it has `cond` that leaves out much work"
    return None


def _has_poles(eqn: JaxprEqn) -> bool:
    """Return whether there are poles inside of an equation, at any depth."""
    return any(
        bool(_poles(jaxpr.eqns)) or any(map(_has_poles, jaxpr.eqns))
        for jaxpr in jaxprs_in_params(eqn.params)
    )


def _poles(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return the equations whose results or derivatives may be infinite.

    The logarithm of 1 + exp(x), as in `jax.nn.softplus`, is none of them.
    """
    positive = {v for e in eqns if e.primitive.name == "exp" for v in e.outvars}

    def has_pole(eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name == "div":
            return not is_literal(eqn.invars[1])
        if name == "integer_pow":
            return eqn.params["y"] < 0
        if name == "log1p":
            return not positive.issuperset(variables(eqn))
        return name in _POLES

    return list(filter(has_pole, eqns))


def _select_branch(
    eqn: JaxprEqn, inputs: list[Any], changing: Sequence[bool], taken: Array | None
) -> list[Any]:
    """Run all branches and select the results of one.

    Branches that are not taken get zeros, and a number between 0 and 1 where there are
    poles or large numbers become infinite, so that neither their results nor their
    derivatives are infinite: with a cotangent of 0, those would make NaN.
    """
    index, *operands = inputs
    branches = eqn.params["branches"]
    index = jnp.clip(index, 0, len(branches) - 1)
    results = []
    for k, branch in enumerate(branches):
        this = index == k if taken is None else taken & (index == k)
        given = [
            _guarded(this, a, 0) if c else a
            for a, c in zip(operands, changing[1:], strict=True)
        ]
        results.append(_inside(branch, given, this))
    if len(branches) == 2:
        return [lax.select_n(index != 0, *pair) for pair in zip(*results, strict=True)]
    found = results[-1]
    for k in reversed(range(len(branches) - 1)):
        pairs = zip(found, results[k], strict=True)
        found = [lax.select_n(index == k, *pair) for pair in pairs]
    return found


def _checkpoint_of_branch(eqn: JaxprEqn, inputs: list[Any], taken: Array) -> list[Any]:
    """Run what is under `jax.checkpoint` in a branch, under `jax.checkpoint` again."""
    (jaxpr,) = jaxprs_in_params(eqn.params)

    def run(taken: Array, *inputs: Any) -> list[Any]:
        return _inside(ClosedJaxpr(jaxpr, ()), inputs, taken)

    return checkpoint_like(eqn, run)(taken, *inputs)


def _guarded(taken: Array, value: Any, safe: float) -> Any:
    aval = jax.typeof(value)
    if not jnp.issubdtype(aval.dtype, jnp.floating) or isinstance(value, (int, float)):
        return value
    return lax.select_n(taken, jnp.full(aval.shape, safe, aval.dtype), value)


def _unrolled(eqn: JaxprEqn, inputs: list[Any], taken: Array | None) -> list[Any]:
    """Run the iterations of an inner loop one after another."""
    params = eqn.params
    count, (num_consts, num_carry) = params["length"], scan_counts(params)
    consts = inputs[:num_consts]
    carry = inputs[num_consts : num_consts + num_carry]
    per_iteration = inputs[num_consts + num_carry :]
    order = range(count)
    rows: list[list[Any]] = [[]] * count
    for i in reversed(order) if params["reverse"] else order:
        at = [lax.index_in_dim(a, i, keepdims=False) for a in per_iteration]
        results = _inside(params["jaxpr"], [*consts, *carry, *at], taken)
        carry, rows[i] = results[:num_carry], results[num_carry:]
    if count == 0:
        found = [type_of(v) for v in eqn.outvars[num_carry:]]
        return [*carry, *(jnp.zeros(a.shape, a.dtype) for a in found)]
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]
