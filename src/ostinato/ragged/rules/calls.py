"""Functions called by the function: jit and checkpoint."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..core.context import Context
from ..core.registry import register
from ..core.values import Value


@register("jit", "closed_call", "core_call", "composite", cheap=True)
def _jit(ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any) -> list[Value]:
    """Inline the body: the program around it is compiled as a whole anyway."""
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
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
