"""Branches and short inner loops of a step as operations on all of its values."""

from __future__ import annotations

import functools as ft
import itertools as it
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
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
_SUMS = frozenset({"add", "add_any", "sub", "neg"})
"""Operations that pass on a cotangent of 0 as 0, whatever their operands are."""
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

    def run(*arguments: Any) -> list[Any]:
        scope = _Scope(None, arguments[:num_fixed])
        return scope.run(ClosedJaxpr(jaxpr, ()), arguments)

    closed = jax.make_jaxpr(run)(*(struct(v.aval) for v in jaxpr.invars))
    assert not closed.consts, "a step that has been traced closes over nothing"
    return closed.jaxpr


class _Scope:
    """A branch, or what is outside of all: how its equations are written out.

    Values that no step changes stay as they are in a branch, so that the loop still
    finds its products with weights. What is made of them and of values that are 0
    where the branch is not taken may be anything there; before another operation reads
    it, it is set to 0.

    Args:
        taken: whether the branch is taken; None outside of branches.
        fixed: values that are the same at every step.
    """

    def __init__(self, taken: Array | None, fixed: Iterable[Any]) -> None:
        self.taken = taken
        self._fixed = {id(value): value for value in fixed}
        self._mixed: dict[int, Any] = {}  # made of fixed and of other values
        self._guarded: dict[int, Any] = {}

    def run(self, jaxpr: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr, whose equations are written out."""
        return evaluate(jaxpr, inputs, self._written_out)

    def is_fixed(self, value: Any) -> bool:
        """Return whether a value is the same at every step."""
        return not isinstance(value, Tracer) or id(value) in self._fixed

    def fix(self, values: list[Any]) -> list[Any]:
        """Return values that are the same at every step, after noting that."""
        self._fixed.update((id(value), value) for value in values)
        return values

    def guarded(self, value: Any) -> Any:
        """Return what is 0, without cotangent, unless the branch is taken."""
        if id(value) not in self._guarded:
            assert self.taken is not None, "outside of branches, all is taken"
            found = _guarded(self.taken, value, 0)
            self._guarded |= {id(value): (value, found), id(found): (found, found)}
        return self._guarded[id(value)][1]

    def _written_out(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        """Return the results of an equation by others, or None where it stays."""
        name = eqn.primitive.name
        if name == "jit":
            return self.run(eqn.params["jaxpr"], inputs)
        fixed = all(map(self.is_fixed, inputs))
        if self.taken is None and fixed:
            return self.fix(run_one(eqn, inputs))
        if name in _FLOW and stays(eqn) is None:
            flow = _unrolled if name == "scan" else _select_branch
            return flow(eqn, inputs, self)
        if self.taken is None or not any(isinstance(v, Tracer) for v in inputs):
            return None
        if name in CHECKPOINTS:
            return _checkpoint_of_branch(eqn, inputs, self)
        if name in _GROWING or _poles([eqn]):
            safe = 1.5 if name == "acosh" else 0.5
            return run_one(eqn, [_guarded(self.taken, v, safe) for v in inputs])
        if fixed:
            return self.fix(run_one(eqn, inputs))
        # A fixed value stays as it is, so that products with it stay so.
        mixes = any(isinstance(v, Tracer) and self.is_fixed(v) for v in inputs)
        mixed = [id(v) in self._mixed for v in inputs]
        if not mixes and not any(mixed):
            return None
        if name not in _SUMS:
            inputs = [
                self.guarded(v) if m or mixes and not self.is_fixed(v) else v
                for v, m in zip(inputs, mixed, strict=True)
            ]
        results = run_one(eqn, inputs)
        if mixes or name in _SUMS:
            self._mixed.update((id(value), value) for value in results)
        return results


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


def _select_branch(eqn: JaxprEqn, inputs: list[Any], scope: _Scope) -> list[Any]:
    """Run all branches and select the results of one.

    A branch that is not taken must not have results or derivatives that are infinite:
    with a cotangent of 0, those would make NaN. It gets zeros, and a number between 0
    and 1 where there are poles or large numbers become infinite. Weights and other
    values that no step changes stay as they are, see `_Scope`.
    """
    index, *operands = inputs
    branches = eqn.params["branches"]
    index = jnp.clip(index, 0, len(branches) - 1)
    results = []
    for k, branch in enumerate(branches):
        taken = index == k if scope.taken is None else scope.taken & (index == k)
        inside = _Scope(taken, filter(scope.is_fixed, operands))
        given = [a if inside.is_fixed(a) else inside.guarded(a) for a in operands]
        results.append(inside.run(branch, given))
    if len(branches) == 2:
        return [lax.select_n(index != 0, *pair) for pair in zip(*results, strict=True)]
    found = results[-1]
    for k in reversed(range(len(branches) - 1)):
        pairs = zip(found, results[k], strict=True)
        found = [lax.select_n(index == k, *pair) for pair in pairs]
    return found


def _checkpoint_of_branch(eqn: JaxprEqn, inputs: list[Any], scope: _Scope) -> list[Any]:
    """Run what is under `jax.checkpoint` in a branch, under `jax.checkpoint` again."""
    (jaxpr,) = jaxprs_in_params(eqn.params)
    fixed = [scope.is_fixed(value) for value in inputs]

    def run(taken: Array, *inputs: Any) -> list[Any]:
        inside = _Scope(taken, it.compress(inputs, fixed))
        return inside.run(ClosedJaxpr(jaxpr, ()), inputs)

    return checkpoint_like(eqn, run)(scope.taken, *inputs)


def _guarded(taken: Array, value: Any, safe: float) -> Any:
    aval = jax.typeof(value)
    if not jnp.issubdtype(aval.dtype, jnp.floating) or not isinstance(value, Tracer):
        return value
    return lax.select_n(taken, jnp.full(aval.shape, safe, aval.dtype), value)


def _unrolled(eqn: JaxprEqn, inputs: list[Any], scope: _Scope) -> list[Any]:
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
        scope.fix(list(it.compress(at, map(scope.is_fixed, per_iteration))))
        results = scope.run(params["jaxpr"], [*consts, *carry, *at])
        carry, rows[i] = results[:num_carry], results[num_carry:]
    if count == 0:
        found = [type_of(v) for v in eqn.outvars[num_carry:]]
        return [*carry, *(jnp.zeros(a.shape, a.dtype) for a in found)]
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]
