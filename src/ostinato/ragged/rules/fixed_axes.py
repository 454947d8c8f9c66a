"""The rules of transforms and factorizations over axes of fixed size.

They work on the last axes of their operands, which must not be ragged, and are mapped
over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context
from ..core.registry import Unsupported, register
from ..core.sizes import symbolic_axes
from ..core.values import Flat, Value, ragged_axes

_TRAILING = {
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu_pivots_to_permutation": (1,),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}
"""The number of last axes of each operand that a primitive works on."""


@register(*_TRAILING)
def _factor(
    ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any
) -> Sequence[Value]:
    return over_leading(ctx, eqn, values, _TRAILING[eqn.primitive.name], params)


@register("fft")
def _fft(
    ctx: Context, eqn: JaxprEqn, x: Value, *, fft_lengths: Any, **params: Any
) -> Sequence[Value]:
    params = {**params, "fft_lengths": fft_lengths}
    return over_leading(ctx, eqn, [x], [len(fft_lengths)], params)


def over_leading(
    ctx: Context,
    eqn: JaxprEqn,
    values: Sequence[Value],
    trailing: Sequence[int],
    params: dict[str, Any],
) -> Sequence[Value]:
    """Return the results of a primitive that is mapped over all but the last axes.

    Args:
        ctx: the context of the equation.
        eqn: an equation of the primitive.
        values: its operands.
        trailing: for each operand the number of last axes that the primitive works on.
        params: the parameters of the primitive.

    Raises:
        Unsupported: one of these axes is ragged.
    """
    own = [v.shape[len(v.shape) - k :] for v, k in zip(values, trailing, strict=True)]
    if any(map(symbolic_axes, own)):
        raise Unsupported(
            f"the {max(trailing)} last axes of its operands must not depend on the "
            "example; the page on ragged.vmap has a table of what to write instead"
        )

    def bind(*arrays: Array) -> Sequence[Array]:
        results = eqn.primitive.bind(*arrays, **params)
        return results if eqn.primitive.multiple_results else [results]

    shapes = ctx.out_shapes(eqn)
    tokens = on_tokens(ctx, values, bind, shapes)
    if tokens is not None:
        return tokens
    return ctx.batched(lambda _, *xs: list(bind(*xs)), values, shapes, sized=False)


def on_tokens(
    ctx: Context,
    values: Sequence[Value],
    bind: Any,
    shapes: Sequence[tuple[Any, ...]],
) -> list[Value] | None:
    """Return the results on concatenated tokens, None where no value is flat.

    The ragged axis must be one that `bind` maps over. No gradient is let through for
    the unused capacity, of the results or of the operands: the gradient of a
    factorization may be NaN even for a cotangent of 0.
    """
    axes = {tuple(ragged_axes(v)) for v in values}
    if not any(isinstance(v, Flat) for v in values) or len(axes) != 1:
        return None
    ((axis,),) = axes
    tokens = [ctx.to_flat(v) for v in values]
    dim = tokens[0].dim
    results = bind(*(ctx.fill_unused(v.x, dim, axis) for v in tokens))
    return [
        Flat(ctx.fill_unused(y, dim, axis), shape, axis)
        for y, shape in zip(results, shapes, strict=True)
    ]
