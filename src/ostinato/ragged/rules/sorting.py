"""The rules of sorting: by the number of the example first, then by the keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.fill import last_of_all
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic
from ..core.values import Flat, Value
from ..types.segments import along


@register("sort")
def _sort(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    dimension: int,
    is_stable: bool,
    num_keys: int,
) -> list[Value]:
    shapes = ctx.out_shapes(eqn)
    dim = values[0].shape[dimension]
    flat = any(isinstance(v, Flat) for v in values)
    ragged = is_symbolic(dim)

    def sort(*arrays: Array, keys: int = num_keys) -> list[Array]:
        options = {"dimension": dimension, "is_stable": is_stable}
        return list(lax.sort(arrays, num_keys=keys, **options))

    if flat and not ragged:
        tokens = [ctx.to_flat(v) for v in values]
        results = sort(*(v.x for v in tokens))
        return [
            Flat(y, s, tokens[0].axis) for y, s in zip(results, shapes, strict=True)
        ]
    if flat:
        tokens = [ctx.to_flat(v).x for v in values]
        example = along(ctx.segments(dim).drop_ids, dimension, tokens[0].ndim)
        example = jnp.broadcast_to(example, tokens[0].shape)
        _, *results = sort(example, *tokens, keys=num_keys + 1)
        return [Flat(y, s, dimension) for y, s in zip(results, shapes, strict=True)]
    if not ragged:
        return ctx.batched(lambda _, *xs: sort(*xs), values, shapes, sized=False)

    def with_padding_last(own: Sizes, *arrays: Array) -> list[Array]:
        padding = ~own.mask(arrays[0], dimension, dim)
        padding = jnp.broadcast_to(padding, arrays[0].shape).astype(jnp.int32)
        return sort(padding, *arrays, keys=num_keys + 1)[1:]

    return ctx.batched(with_padding_last, values, shapes)


@register("top_k")
def _top_k(
    ctx: Context, eqn: JaxprEqn, x: Value, *, axis: int, **params: Any
) -> list[Value]:
    shapes = ctx.out_shapes(eqn)
    dim = x.shape[axis]
    if is_symbolic(params["k"]):
        raise Unsupported(
            "k, of jnp.partition the rest of the axis, must not depend on the example; "
            "sort instead"
        )

    def top(a: Array) -> list[Array]:
        return eqn.primitive.bind(a, axis=axis, **params)

    if isinstance(x, Flat) and x.axis != axis:
        return [Flat(y, s, x.axis) for y, s in zip(top(x.x), shapes, strict=True)]
    if not is_symbolic(dim):
        return ctx.batched(lambda _, a: top(a), [x], shapes, sized=False)

    def top_of_own(own: Sizes, a: Array) -> list[Array]:
        return top(
            jnp.where(
                own.mask(a, axis, dim), a, jnp.asarray(last_of_all(a.dtype), a.dtype)
            )
        )

    return ctx.batched(top_of_own, [x], shapes)
