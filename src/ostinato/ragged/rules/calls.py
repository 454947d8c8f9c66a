"""Functions within the function: jit and checkpoint."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context
from ..core.registry import register
from ..core.values import Packing, Value


@register("jit", "closed_call", "core_call", "composite")
def _jit(ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any) -> list[Value]:
    """Inlined: what is around it is compiled as a whole anyway."""
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return ctx.evaluate(body, values)


@register("remat2")
def _checkpoint(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    jaxpr: Any,
    prevent_cse: Any,
    policy: Any,
    differentiated: bool,
) -> list[Value]:
    packing = Packing.of(values)

    def run(*arrays: Array) -> list[Array]:
        results = ctx.nested().evaluate(jaxpr, packing.unpack(arrays))
        kinds.append(Packing.of(results))
        return [v.x for v in results]

    kinds: list[Packing] = []
    run = jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)
    arrays = run(*(v.x for v in values))
    return kinds[-1].unpack(arrays)
