"""The rule of the associative scan: one scan over all tokens of all examples.

It starts again at the first token of each example. Neither tokens nor what the function
closes over have a ragged axis.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from ..._typing import Array
from ..core.context import Context
from ..core.registry import register
from ..core.values import Flat, Shared, Value
from ..primitives.associative_scan import associative_scan_p
from ..primitives.constant import constant
from ..schedule.token_scan import scan_tokens


@register(associative_scan_p)
def _associative_scan(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    jaxpr: Any,
    num_consts: int,
    reverse: bool,
) -> list[Value]:
    consts, elems = values[:num_consts], values[num_consts:]
    dim = elems[0].shape[0]
    shared = [v.x if isinstance(v, Shared) else None for v in consts]
    # The constants of an example are repeated per token, and pass through unchanged.
    own = [ctx.per_token(v, dim) for v in consts if not isinstance(v, Shared)]
    tokens = [ctx.to_flat(v).x for v in elems]
    function = jaxpr_as_fun(jaxpr)

    def join(
        start: Array, own: list[Array], a: list[Array], b: list[Array]
    ) -> list[Array]:
        # Where an example starts, the function gets its token twice, and the result is
        # thrown away. All are constants there: 0 times an infinite derivative is NaN.
        # Arrays that all share are left as they are, or each token would have a copy.
        given = iter(own)
        closed = [
            jnp.where(start, constant(x), x) if x.ndim == 0 else x
            for x in (next(given) if x is None else x for x in shared)
        ]
        before = [jnp.where(start, constant(y), x) for x, y in zip(a, b, strict=True)]
        after = [jnp.where(start, constant(y), y) for y in b]
        results = function(*closed, *before, *after)
        return [jnp.where(start, y, x) for x, y in zip(results, b, strict=True)]

    segments = ctx.segments(dim)
    lengths = ctx.lengths(dim)[segments.ids]
    start = segments.position == (lengths - 1 if reverse else 0)
    start |= ~ctx.used(dim).valid

    def combine(a: Any, b: Any) -> Any:
        (start_a, _, tokens_a), (start_b, own_b, tokens_b) = a, b
        joined = jax.vmap(join)(start_b, own_b, tokens_a, tokens_b)
        return start_a | start_b, own_b, joined

    _, _, results = scan_tokens(combine, (start, own, tokens), reverse)
    return [Flat(y, v.shape, 0) for y, v in zip(results, elems, strict=True)]
