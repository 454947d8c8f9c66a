"""The rules of checks at run time, such as `equinox.error_if`.

Primitives of equinox reduce a condition over all examples, across all `vmap`s, and a
callback under the result raises. Padding and unused capacity must not count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context
from ..core.fill import lowest
from ..core.registry import Unsupported, register
from ..core.sizes import symbolic_axes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..types.segments import along

_IDENTITY = {
    "unvmap_any": lambda _: False,
    "unvmap_all": lambda _: True,
    "unvmap_max": lowest,
}


@register(*_IDENTITY)
def _of_all_examples(ctx: Context, eqn: JaxprEqn, x: Value) -> Value:
    """Reduce over all elements of all examples to one result that all share."""
    if isinstance(x, Shared) and not ragged_axes(x):
        return Shared(eqn.primitive.bind(x.x), ())
    other = jnp.asarray(_IDENTITY[eqn.primitive.name](x.x.dtype), x.x.dtype)
    return Shared(eqn.primitive.bind(jnp.where(_counted(ctx, x), x.x, other)), ())


def _counted(ctx: Context, x: Value) -> Array:
    """Return where elements of used examples are, in a shape that broadcasts."""
    used, ndim = ctx.used_examples(), x.x.ndim
    if isinstance(x, Flat):
        there = ctx.used(x.dim).valid
        if used is not None:
            there &= jnp.take(used, ctx.segments(x.dim).ids)
        return along(there, x.axis, ndim)
    there = ctx.inside(x) if ragged_axes(x) else jnp.ones((1,) * ndim, bool)
    if used is not None and isinstance(x, Padded):
        there &= along(used, 0, ndim)
    return there


@register("pure_callback")
def _callback(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    callback: Any,
    result_avals: Any,
    **params: Any,
) -> list[Value]:
    shapes = ctx.out_shapes(eqn)
    function = getattr(callback, "callback_func", None)
    raises = getattr(function, "__module__", None) == "equinox._errors"
    if not any(symbolic_axes(s) for s in (*shapes, *(v.shape for v in values))):
        bind = eqn.primitive.bind
        params |= {"callback": callback, "result_avals": result_avals}
        return ctx.batched(
            lambda _, *arrays: bind(*arrays, **params), values, shapes, sized=False
        )
    if not raises:
        raise Unsupported("a callback cannot take or give axes of different sizes")
    # It returns nothing, or NaN in the shape that is asked for.
    axes = [symbolic_axes(shape) for shape in shapes]
    structs = [
        jax.ShapeDtypeStruct(
            ctx.flat_shape(shape, a[0])
            if len(a) == 1
            else (ctx.batch, *ctx.at_max(shape)),
            aval.dtype,
        )
        for shape, a, aval in zip(shapes, axes, result_avals, strict=True)
    ]
    arrays = jax.pure_callback(
        lambda *arrays: list(callback(*arrays)), structs, *(v.x for v in values)
    )
    return [
        Flat(x, shape, a[0]) if len(a) == 1 else Padded(x, shape)
        for x, shape, a in zip(arrays, shapes, axes, strict=True)
    ]
