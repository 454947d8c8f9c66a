"""The rules of operations that only move elements.

A flat value stays flat as long as its ragged axis stays whole.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import symbolic_axes
from ..core.values import (
    Flat,
    Padded,
    Shared,
    Value,
    filled_as,
    ragged_axes,
    shape_text,
)
from ..types.segments import along, positions


def _only(ctx: Context, eqn: JaxprEqn) -> tuple[Any, ...]:
    (shape,) = ctx.out_shapes(eqn)
    return shape


# ---------------------------------------------------------- the ragged axis stays whole


@register("iota", cheap=True)
def _iota(ctx: Context, eqn: JaxprEqn, *_: Value, shape: Any, **params: Any) -> Value:
    x = eqn.primitive.bind(shape=ctx.at_max(shape), **params)
    return Shared(x, _only(ctx, eqn))


@register("broadcast_in_dim", cheap=True)
def _broadcast_in_dim(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    *_: Value,
    broadcast_dimensions: tuple[int, ...],
    **params: Any,
) -> Value:
    shape = _only(ctx, eqn)
    to = broadcast_dimensions
    axes = symbolic_axes(shape)
    if len(axes) == 1 and isinstance(x, Flat):
        (axis,) = axes
        full = ctx.flat_shape(shape, axis)
        return Flat(lax.broadcast_in_dim(x.x, full, to), shape, axis)
    own = isinstance(x, Padded) and not ragged_axes(x)
    if len(axes) == 1 and own and ctx.options.prefers_flat:
        (axis,) = axes
        tokens = ctx.per_token(x, shape[axis])
        rest = [b for b in to if b != axis]
        if axis in to:  # of size 1
            tokens = jnp.squeeze(tokens, 1 + to.index(axis))
        # JAX takes dimensions for ascending, without a check.
        tokens = jnp.moveaxis(tokens, 0, sum(b < axis for b in rest))
        full, to = ctx.flat_shape(shape, axis), sorted([axis, *rest])
        return Flat(lax.broadcast_in_dim(tokens, full, to), shape, axis)
    full = ctx.at_max(shape)
    broadcast = ctx.unsized(lambda x: lax.broadcast_in_dim(x, full, to), [x], shape)
    return filled_as(broadcast, x)


@register("transpose", cheap=True)
def _transpose(
    ctx: Context, eqn: JaxprEqn, x: Value, *, permutation: tuple[int, ...]
) -> Value:
    return _transposed(ctx, x, permutation)


def _transposed(ctx: Context, x: Value, permutation: tuple[int, ...]) -> Value:
    shape = tuple(x.shape[i] for i in permutation)
    if isinstance(x, Flat):
        axis = permutation.index(x.axis)
        return Flat(lax.transpose(x.x, permutation), shape, axis)
    result = ctx.unsized(lambda x: lax.transpose(x, permutation), [x], shape)
    return filled_as(result, x)


@register("squeeze", cheap=True)
def _squeeze(
    ctx: Context, eqn: JaxprEqn, x: Value, *, dimensions: tuple[int, ...]
) -> Value:
    shape = _only(ctx, eqn)
    if isinstance(x, Flat):
        axis = x.axis - sum(d < x.axis for d in dimensions)
        return Flat(lax.squeeze(x.x, dimensions), shape, axis)
    result = ctx.unsized(lambda x: lax.squeeze(x, dimensions), [x], shape)
    return filled_as(result, x)


@register("expand_dims", cheap=True)
def _expand_dims(
    ctx: Context, eqn: JaxprEqn, x: Value, *, dimensions: tuple[int, ...]
) -> Value:
    shape = _only(ctx, eqn)
    if isinstance(x, Flat):
        (axis,) = symbolic_axes(shape)
        return Flat(lax.expand_dims(x.x, dimensions), shape, axis)
    result = ctx.unsized(lambda x: lax.expand_dims(x, dimensions), [x], shape)
    return filled_as(result, x)


@register("stack", cheap=True)
def _stack(ctx: Context, eqn: JaxprEqn, *values: Value, axis: int) -> Value:
    shape = _only(ctx, eqn)
    if any(isinstance(v, Flat) for v in values):
        (tokens,) = symbolic_axes(shape)
        return Flat(jnp.stack([ctx.to_flat(v).x for v in values], axis), shape, tokens)
    return ctx.unsized(lambda *xs: jnp.stack(xs, axis), values, shape)


@register("unstack", cheap=True)
def _unstack(ctx: Context, eqn: JaxprEqn, x: Value, *, axis: int) -> list[Value]:
    shapes = ctx.out_shapes(eqn)
    if isinstance(x, Flat):
        tokens = x.axis - (axis < x.axis)
        parts = eqn.primitive.bind(x.x, axis=axis)
        return [Flat(part, s, tokens) for part, s in zip(parts, shapes, strict=True)]
    return ctx.batched(
        lambda _, x: eqn.primitive.bind(x, axis=axis), [x], shapes, sized=False
    )


# ----------------------------------------------------------------------------- reshape


@register("reshape", cheap=True)
def _reshape(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    *,
    dimensions: tuple[int, ...] | None = None,
    **_: Any,
) -> Value:
    shape = _only(ctx, eqn)
    if dimensions is not None:  # the order in which the axes are read
        x = _transposed(ctx, x, dimensions)
    full = ctx.at_max(shape)
    if 0 in full:
        return ctx.unsized(lambda a: a.reshape(full), [x], shape)
    groups = _groups(x.shape, shape)
    if not all(_same_size(*group) for group in groups):
        raise Unsupported(
            f"a reshape from {shape_text(x.shape)} to {shape_text(shape)} must have as "
            "many elements before as after for every example; say what divides a size "
            "by `constraints`"
        )
    in_order = all(_stay_in_order(*group) for group in groups)
    if in_order and isinstance(x, Flat):
        return _reshape_tokens(ctx, x, shape, groups)
    # If a size is halved, the padded size may be odd.
    if in_order and all(_same_size(*ctx.at_max(group)) for group in groups):
        return ctx.unsized(lambda a: a.reshape(full), [x], shape)
    result = _reordered(ctx, x, shape, groups)
    if isinstance(x, Flat) and len(symbolic_axes(shape)) == 1:
        return ctx.to_flat(result)
    return result


Group = tuple[tuple[Any, ...], tuple[Any, ...]]


def _groups(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[Group]:
    """Return the shortest parts of both shapes that have equally many elements."""
    before = [math.prod(old[:i]) for i in range(len(old) + 1)]
    after = [math.prod(new[:j]) for j in range(len(new) + 1)]
    ends = [(0, 0)]
    for i in range(1, len(old) + 1):
        j = next(
            (j for j in range(ends[-1][1], len(after)) if after[j] == before[i]), None
        )
        if j is not None:
            ends.append((i, j))
    ends[-1:] = [(len(old), len(new))]  # sizes of 1 at the end
    if ends[0] != (0, 0):
        ends.insert(0, (0, 0))
    pairs = zip(ends, ends[1:], strict=False)
    return [(old[i:k], new[j:m]) for (i, j), (k, m) in pairs]


def _same_size(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return math.prod(old) == math.prod(new)


def _stay_in_order(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Return whether an example's elements come first before and after a reshape."""
    before, after = symbolic_axes(old), symbolic_axes(new)
    if not before and not after:
        return True
    return (
        len(before) == len(after) == 1
        and math.prod(old[: before[0]]) == math.prod(new[: after[0]]) == 1
    )


def _reordered(
    ctx: Context, x: Value, shape: tuple[Any, ...], groups: list[Group]
) -> Value:
    """Return a reshaped value, each element moved within the padded array."""

    def take(own: Sizes, a: Array) -> list[Array]:
        done = 0
        for old, new in groups:
            before, after = ctx.at_max(old), ctx.at_max(new)
            ahead, rest = a.shape[:done], a.shape[done + len(old) :]
            a = a.reshape(*ahead, math.prod(before), *rest)
            if symbolic_axes(old) or symbolic_axes(new):
                index = _index_before(own, before, old, after, new)
                a = jnp.take(a, index, done, mode="clip")
            a = a.reshape(*ahead, *after, *rest)
            done += len(new)
        return [a]

    (result,) = ctx.batched(take, [x], [shape])
    return filled_as(result, x)


def _index_before(
    own: Sizes,
    before: tuple[int, ...],
    old: tuple[Any, ...],
    after: tuple[int, ...],
    new: tuple[Any, ...],
) -> Array:
    """Return for each element of a group of axes its index before the reshape.

    Past the end of the example, along any axis, it is that of the last element.
    """
    # Numbers of elements in the example, in row-major order.
    number = jnp.zeros((1,) * len(after), jnp.int32)
    for axis, (most, dim) in enumerate(zip(after, new, strict=True)):
        size = jnp.maximum(own(dim), 1)
        position = jnp.minimum(positions(most), size - 1)
        number = number * size + along(position, axis, len(after))
    number = number.reshape(-1)
    index, stride = jnp.zeros_like(number), 1
    for most, dim in zip(reversed(before), reversed(old), strict=True):
        size = jnp.maximum(own(dim), 1)
        index += number % size * stride
        number //= size
        stride *= most
    return index


def _reshape_tokens(
    ctx: Context, x: Flat, shape: tuple[Any, ...], groups: list[Group]
) -> Flat:
    (axis,) = symbolic_axes(shape)
    dim = shape[axis]
    if dim == x.dim:
        return Flat(x.x.reshape(ctx.flat_shape(shape, axis)), shape, axis)
    # Tokens of another width: they come to the front, with the axes they merge with.
    which = next(i for i, (old, _) in enumerate(groups) if symbolic_axes(old))
    old_rest = len(groups[which][0]) - 1 - symbolic_axes(groups[which][0])[0]
    new_rest = len(groups[which][1]) - 1 - symbolic_axes(groups[which][1])[0]
    merged = list(range(x.axis, x.axis + old_rest + 1))
    tokens = jnp.moveaxis(x.x, merged, list(range(old_rest + 1)))
    others = (*shape[:axis], *shape[axis + new_rest + 1 :])
    width = math.prod(shape[axis + 1 : axis + new_rest + 1])
    tokens = lax.collapse(tokens, 0, old_rest + 1)
    tokens = _first(tokens, ctx.capacity(dim) * width)
    tokens = tokens.reshape(ctx.capacity(dim), width, *others)
    tokens = ctx.fill_unused(tokens, dim, 0)
    tokens = tokens.reshape(
        ctx.capacity(dim), *shape[axis + 1 : axis + new_rest + 1], *others
    )
    split = list(range(axis, axis + new_rest + 1))
    return Flat(jnp.moveaxis(tokens, list(range(new_rest + 1)), split), shape, axis)


def _first(x: Array, count: int) -> Array:
    """Return the first `count` tokens, with zeros if `x` has fewer."""
    missing = count - x.shape[0]
    if missing > 0:
        x = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
    return x[:count]
