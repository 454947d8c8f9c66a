"""The rules of convolutions and pooling.

Past its end an example is padded as the operation itself pads, with zeros or with the
identity, so that every window sees what it would see in that example alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.fill import highest, lowest
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Flat, Padded, Value, ragged_axes
from ..types.segments import along, positions


def _flat_if_possible(ctx: Context, value: Value) -> Value:
    """Return a value with one ragged axis as tokens, without windows in the padding."""
    if isinstance(value, Padded) and len(ragged_axes(value)) == 1:
        return ctx.to_flat(value)
    return value


# ------------------------------------------------------------------------- convolution


@register("conv_general_dilated")
def _conv(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    kernel: Value,
    *,
    dimension_numbers: Any,
    padding: Sequence[tuple[Any, Any]],
    **params: Any,
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    spatial = dimension_numbers.lhs_spec[2:]
    if ragged_axes(kernel):
        raise Unsupported(
            "the kernel must not have an axis of different sizes, which it also has in "
            "the derivative by the kernel; take that outside of ragged.vmap"
        )
    if any(is_symbolic(x.shape[a]) for a in dimension_numbers.lhs_spec[1:2]):
        raise Unsupported("the features must not be an axis of different sizes")
    if isinstance(x, Flat) and x.axis == dimension_numbers.lhs_spec[0]:
        if params["batch_group_count"] != 1:
            raise Unsupported("groups of rows must not depend on the example")
        if not isinstance(kernel, Padded):
            y = eqn.primitive.bind(
                x.x,
                kernel.x,
                dimension_numbers=dimension_numbers,
                padding=padding,
                **params,
            )
            return Flat(y, shape, dimension_numbers.out_spec[0])
    ragged = ragged_axes(x)
    dilation = params["lhs_dilation"]

    def convolve(own: Sizes, a: Array, k: Array) -> list[Array]:
        a = own.cleared(a, x.shape)
        pads = []
        for i, (axis, pair) in enumerate(zip(spatial, padding, strict=True)):
            a, pair = _fixed_padding(ctx, own, a, axis, pair, dilation[i], 0)
            pads.append(pair)
        return [
            eqn.primitive.bind(
                a, k, dimension_numbers=dimension_numbers, padding=tuple(pads), **params
            )
        ]

    def cut(own: Sizes, a: Array, k: Array) -> list[Array]:
        return [_cut(ctx, y, shape) for y in convolve(own, a, k)]

    (y,) = ctx.batched(cut, [x, kernel], [shape], sized=bool(ragged))
    return _flat_if_possible(ctx, y)


def _fixed_padding(
    ctx: Context,
    own: Sizes,
    x: Array,
    axis: int,
    pair: tuple[Any, Any],
    dilation: int,
    fill: Any,
) -> tuple[Array, tuple[int, int]]:
    """Return `x` and the padding of one axis, without symbols.

    Padding that depends on the example, as `SAME` with a stride does, becomes part of
    the array: the array is padded by the largest amount that any example needs, and the
    elements of each example are shifted to where its own padding ends.
    """
    low, high = pair
    if not (is_symbolic(low) or is_symbolic(high)):
        return x, (low, high)
    if dilation != 1:
        raise Unsupported(
            "padding that depends on the example's size cannot go with a dilation of "
            "the input; pad the input yourself"
        )
    before, after = _most(ctx, low), _most(ctx, high)
    index = positions(before + x.shape[axis] + after) - own(low)
    inside = (index >= 0) & (index < x.shape[axis])
    shifted = jnp.take(x, index, axis, mode="clip")
    inside = along(inside, axis, x.ndim)
    return jnp.where(inside, shifted, jnp.asarray(fill, x.dtype)), (0, 0)


def _most(ctx: Context, amount: Any) -> int:
    return max(ctx.max(amount), 0)


def _cut(ctx: Context, y: Array, shape: tuple[Any, ...]) -> Array:
    """Return `y` with its ragged axes at their largest size."""
    for axis in symbolic_axes(shape):
        size = ctx.max(shape[axis])
        missing = size - y.shape[axis]
        if missing > 0:
            widths = [(0, missing if a == axis else 0) for a in range(y.ndim)]
            y = jnp.pad(y, widths, mode="edge")
        y = lax.slice_in_dim(y, 0, size, axis=axis)
    return y


# ----------------------------------------------------------------------------- pooling

_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "reduce_window_sum": lambda dtype: 0,
    "reduce_window_max": lowest,
    "reduce_window_min": highest,
}


@register(*_IDENTITY)
def _pool(
    ctx: Context, eqn: JaxprEqn, x: Value, *, padding: Any, **params: Any
) -> Sequence[Value]:
    if isinstance(x, Flat) and _untouched(x.axis, padding, params):
        (shape,) = ctx.out_shapes(eqn)
        y = eqn.primitive.bind(x.x, padding=padding, **params)
        return [Flat(y, shape, x.axis)]
    fill = _IDENTITY[eqn.primitive.name](x.x.dtype)
    return _pooled(ctx, eqn, [x], [fill], padding, params)


@register("reduce_window")
def _general_pool(
    ctx: Context, eqn: JaxprEqn, *values: Value, padding: Any, **params: Any
) -> Sequence[Value]:
    """Pool one array or several at once; the second half of `values` are starts."""
    half = len(values) // 2
    return _pooled(ctx, eqn, values[:half], values[half:], padding, params)


@register("select_and_gather_add")
def _tangent_of_max_pool(
    ctx: Context, eqn: JaxprEqn, dx: Value, x: Value, *, padding: Any, **params: Any
) -> Sequence[Value]:
    fill = _extreme(params)(x.x.dtype)
    return _pooled(ctx, eqn, [dx, x], [0, fill], padding, params)


def _extreme(params: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function to the element that loses against all others."""
    return lowest if params["select_prim"].name == "ge" else highest


def _pooled(
    ctx: Context,
    eqn: JaxprEqn,
    xs: Sequence[Value],
    fills: Sequence[Any],
    padding: Sequence[tuple[Any, Any]],
    params: dict[str, Any],
) -> Sequence[Value]:
    """Pool over windows; past its end an example has a fill in each of `xs`.

    Fills are numbers, or values that the primitive takes after `xs`.
    """
    shapes = ctx.out_shapes(eqn)
    dilation = params["base_dilation"]
    bind_params = eqn.primitive.get_bind_params(params)
    starts = [fill for fill in fills if isinstance(fill, Value)]

    def pool(own: Sizes, *arrays: Array) -> list[Array]:
        tokens, given = arrays[: len(xs)], arrays[len(xs) :]
        filled: list[Array] = []
        pads: list[tuple[int, int]] = []  # the same for all
        for a, x, fill in zip(tokens, xs, given or fills, strict=True):
            fill = jnp.asarray(fill, a.dtype)
            a, pads = own.cleared(a, x.shape, fill), []
            for axis, pair in enumerate(padding):
                a, pair = _fixed_padding(ctx, own, a, axis, pair, dilation[axis], fill)
                pads.append(pair)
            filled.append(a)
        results = eqn.primitive.bind(
            *filled, *given, padding=tuple(pads), **bind_params
        )
        results = results if eqn.primitive.multiple_results else [results]
        return [_cut(ctx, y, s) for y, s in zip(results, shapes, strict=True)]

    sized = any(map(ragged_axes, xs))
    results = ctx.batched(pool, [*xs, *starts], shapes, sized=sized)
    return [_flat_if_possible(ctx, y) for y in results]


def _untouched(axis: int, padding: Any, params: dict[str, Any]) -> bool:
    """Return whether every window covers one element of that axis."""
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    ones = all(params[name][axis] == 1 for name in names if name in params)
    return ones and tuple(padding[axis]) == (0, 0)


@register("select_and_scatter_add")
def _gradient_of_max_pool(
    ctx: Context, eqn: JaxprEqn, source: Value, x: Value, *, padding: Any, **params: Any
) -> Value:
    """Add to the winner of each window; windows past an example's end add zero."""
    (shape,) = ctx.out_shapes(eqn)
    if any(is_symbolic(amount) for pair in padding for amount in pair):
        raise Unsupported(
            "its padding depends on the example's size; pad the input yourself, or "
            "take the gradient outside of ragged.vmap"
        )
    fill = _extreme(params)(x.x.dtype)

    def scatter(own: Sizes, source_x: Array, a: Array) -> list[Array]:
        source_x = own.cleared(source_x, source.shape)
        a = own.cleared(a, x.shape, fill)
        return [eqn.primitive.bind(source_x, a, padding=padding, **params)]

    (y,) = ctx.batched(scatter, [source, x], [shape])
    return _flat_if_possible(ctx, y)
