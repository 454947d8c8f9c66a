"""The arrays that functions inside of a step close over, as constants of the step.

JAX keeps the arrays of a function under `jit` with that function, where nobody sees
that they are the same at every step, and inlining it would bring them to light late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from .._compat import scan_counts
from .._rnn.sharding import make_varying
from .jaxprs import CHECKPOINTS, evaluate, is_literal, run_checkpoint, type_of

_MADE_ANEW = CHECKPOINTS | {"cond", "jit", "scan"}
"""Operations out of which constants are taken. A loop over a `while` keeps its own, and
so do functions with derivatives of their own."""


def with_all_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr whose constants are also those of functions under `jit` in it.

    Such functions are inlined if any of them closes over an array.
    """
    if not any(map(_hides_constants, closed.jaxpr.eqns)):
        return closed
    return jax.make_jaxpr(_function(closed))(*closed.in_avals)


def _hides_constants(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name not in _MADE_ANEW:
        return False
    if name == "jit" and eqn.params["jaxpr"].consts:
        return True
    inner = (e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return any(map(_hides_constants, inner))


def _made_anew(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any] | None:
    """Return the results of an operation that hides constants; None for all others.

    JAX itself makes operands of the arrays that the functions of a new one close over.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "jit" or not _hides_constants(eqn):
        return None  # what is under `jit` is inlined
    inputs = make_varying(
        [
            jnp.asarray(x, type_of(v).dtype) if is_literal(v) else x
            for x, v in zip(inputs, eqn.invars, strict=True)
        ]
    )
    if name == "cond":
        branches = [_function(branch) for branch in params["branches"]]
        return list(lax.switch(inputs[0], branches, *inputs[1:]))
    if name == "scan":
        return _scan(eqn, inputs)
    return run_checkpoint(eqn, inputs, _made_anew)


def _function(closed: ClosedJaxpr) -> Any:
    return lambda *given: evaluate(closed, given, _made_anew)


def _scan(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    consts, rest = inputs[:num_consts], inputs[num_consts:]
    run = _function(params["jaxpr"])

    def body(carry: list[Any], at: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(*consts, *carry, *at)
        return results[:num_carry], results[num_carry:]

    carry, rows = lax.scan(
        body,
        list(rest[:num_carry]),
        list(rest[num_carry:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *rows]
