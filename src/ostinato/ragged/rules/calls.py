"""Functions called by the function: jit and checkpoint."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ... import _compat
from ..core.context import Context
from ..core.registry import Unsupported, register
from ..core.values import Value


@register("jit", "closed_call", "core_call", "composite", cheap=True)
def _jit(ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any) -> list[Value]:
    """Inline the body: the program around it is compiled as a whole anyway."""
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return ctx.evaluate(body, values)


@register("call_hi_primitive", cheap=True)
def _whole_operation(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list:
    """Run what an operation of JAX 0.12 is made of."""
    body = _compat.written_out(eqn)
    if body is None:
        kind = type(eqn.params["_prim"]).__name__
        raise Unsupported(f"it has no rule for {kind}; use other operations")
    return ctx.evaluate(body, values)


@register("remat2", cheap=True)
def _checkpoint(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    jaxpr: Any,
    prevent_cse: Any,
    policy: Any,
    differentiated: bool,
) -> list[Value]:
    def run(*values: Value) -> list[Value]:
        return ctx.nested().evaluate(jaxpr, values)

    return jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)(*values)
