"""The rules of slicing, reversing, tiling, concatenating and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import register
from ..core.sizes import evaluate, is_symbolic, symbolic_axes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..core.windows import starts_in_range
from ..types.segments import Segments, along, positions


@register("slice", cheap=True)
def _slice(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    *,
    start_indices: tuple[Any, ...],
    limit_indices: tuple[Any, ...],
    strides: tuple[int, ...] | None,
) -> Value:
    strides = strides or (1,) * len(start_indices)
    for axis, new in enumerate(ctx.out_shapes(eqn)[0]):
        part = start_indices[axis], limit_indices[axis], strides[axis]
        if part != (0, x.shape[axis], 1):
            x = slice_axis(ctx, x, axis, new, part[0], part[2])
    return x


@register("split", cheap=True)
def _split(
    ctx: Context, eqn: JaxprEqn, x: Value, *, sizes: tuple[Any, ...], axis: int
) -> list[Value]:
    results, start = [], 0
    for size in sizes:
        results.append(slice_axis(ctx, x, axis, size, start, 1))
        start = start + size
    return results


def slice_axis(
    ctx: Context, x: Value, axis: int, size: Any, start: Any, stride: int
) -> Value:
    """Return `size` elements of `x` along `axis`, from `start` in steps of `stride`."""
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    if isinstance(x, Flat) and axis == x.axis:
        if is_symbolic(size):
            return ctx.take_tokens(
                x, size, lambda s: ctx.size_per_token(start, size) + stride * s.position
            )
        first = ctx.segments(x.dim).offsets
        if is_symbolic(start):
            first = first + evaluate(start, ctx.symbols.values)
        else:
            first = first + start
        tokens = first[:, None] + stride * positions(size)[None]
        taken = jnp.take(x.x, tokens.reshape(-1), axis, mode="clip")
        taken = taken.reshape(*x.x.shape[:axis], *tokens.shape, *x.x.shape[axis + 1 :])
        return Padded(jnp.moveaxis(taken, axis, 0), shape)
    if not any(map(is_symbolic, (x.shape[axis], size, start))):
        limit = start + (size - 1) * stride + 1 if size else start
        if isinstance(x, Flat):
            part = lax.slice_in_dim(x.x, start, limit, stride, axis)
            return Flat(part, shape, x.axis)
        return ctx.unsized(
            lambda a: lax.slice_in_dim(a, start, limit, stride, axis), [x], shape
        )
    index = stride * positions(ctx.max(size))

    def take(sizes: Sizes, a: Array) -> list[Array]:
        return [jnp.take(a, sizes(start) + index, axis, mode="clip")]

    (result,) = ctx.batched(take, [x], [shape], sized=is_symbolic(start))
    return result


@register("rev", cheap=True)
def _rev(
    ctx: Context, eqn: JaxprEqn, x: Value, *, dimensions: tuple[int, ...]
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    ragged = [d for d in dimensions if is_symbolic(shape[d])]
    fixed = tuple(d for d in dimensions if d not in ragged)
    if isinstance(x, Flat):
        if ragged:
            dim = x.dim
            x = ctx.take_tokens(
                x, dim, lambda s: ctx.size_per_token(dim, dim) - 1 - s.position
            )
        return Flat(lax.rev(x.x, fixed), shape, x.axis)

    def reverse(sizes: Sizes, a: Array) -> list[Array]:
        for axis in ragged:
            a = sizes.backwards(a, axis, shape[axis])
        return [lax.rev(a, fixed)]

    (result,) = ctx.batched(reverse, [x], [shape], sized=bool(ragged))
    return result


@register("tile", cheap=True)
def _tile(ctx: Context, eqn: JaxprEqn, x: Value, *, reps: tuple[Any, ...]) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    repeated = [a for a in ragged_axes(x) if reps[a] != 1]
    fixed = [1 if a in repeated else ctx.max(r) for a, r in enumerate(reps)]
    if isinstance(x, Flat) and len(symbolic_axes(shape)) == 1:
        if repeated:
            old, dim = x.dim, shape[x.axis]

            def source(segments: Segments) -> Array:
                return segments.position % jnp.maximum(ctx.size_per_token(old, dim), 1)

            x = ctx.take_tokens(x, dim, source)
        return Flat(jnp.tile(x.x, fixed), shape, x.axis)

    def tile(sizes: Sizes, a: Array) -> list[Array]:
        for axis in repeated:
            index = positions(ctx.max(shape[axis])) % jnp.maximum(
                sizes(x.shape[axis]), 1
            )
            a = jnp.take(a, index, axis, mode="clip")
        return [jnp.tile(a, fixed)]

    (result,) = ctx.batched(tile, [x], [shape], sized=bool(repeated))
    return result


@register("concatenate", cheap=True)
def _concatenate(ctx: Context, eqn: JaxprEqn, *values: Value, dimension: int) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    axes = symbolic_axes(shape)
    if not any(is_symbolic(v.shape[dimension]) for v in values):
        if any(isinstance(v, Flat) for v in values):
            (axis,) = axes
            tokens = [ctx.to_flat(v).x for v in values]
            return Flat(lax.concatenate(tokens, dimension), shape, axis)
        return ctx.unsized(lambda *xs: lax.concatenate(xs, dimension), values, shape)
    if axes == [dimension]:
        return _concatenate_tokens(ctx, values, shape, dimension)
    longest = ctx.max(shape[dimension])

    def join(sizes: Sizes, *arrays: Array) -> list[Array]:
        held = [sizes(v.shape[dimension]) for v in values]
        parts = list(zip(held, [a.shape[dimension] for a in arrays], strict=True))
        index = _index_in_parts(positions(longest), parts)
        whole = lax.concatenate(arrays, dimension)
        return [jnp.take(whole, index, dimension, mode="clip")]

    (result,) = ctx.batched(join, values, [shape])
    return result


def _concatenate_tokens(
    ctx: Context, values: Sequence[Value], shape: tuple[Any, ...], axis: int
) -> Flat:
    """Return one gather from the tokens of all parts, put one after another."""
    dim = shape[axis]
    segments = ctx.segments(dim)
    ids = segments.ids
    parts, starts, tokens = [], [], []
    for value in values:
        size = value.shape[axis]
        if is_symbolic(size):
            flat = ctx.to_flat(value)
            starts.append(ctx.segments(size).offsets[ids])
            tokens.append(jnp.moveaxis(flat.x, axis, 0))
        elif isinstance(value, Shared):
            starts.append(jnp.zeros_like(ids))
            tokens.append(jnp.moveaxis(value.x, axis, 0))
        else:
            starts.append(ids * size)
            each = jnp.moveaxis(ctx.to_padded(value).x, axis + 1, 1)
            tokens.append(lax.collapse(each, 0, 2))
        parts.append((ctx.lengths(size)[ids], tokens[-1].shape[0]))
    index = _index_in_parts(segments.position, parts, starts)
    x = jnp.take(lax.concatenate(tokens, 0), index, 0, mode="clip")
    return Flat(jnp.moveaxis(x, 0, axis), shape, axis)


def _index_in_parts(
    position: Array, parts: Sequence[tuple[Any, int]], starts: Any = None
) -> Array:
    """Return for positions of the whole the index in the parts' arrays, end to end.

    Args:
        position: positions in the concatenation of the parts.
        parts: for each part its size, and the size of its array.
        starts: for each part its first index in its array; None for 0.
    """
    index, end, base = jnp.zeros_like(position), 0, 0
    for i, (length, size) in enumerate(parts):
        start = starts[i] if starts else 0
        index = jnp.where(position >= end, base + start + position - end, index)
        end, base = end + length, base + size
    return index


@register("pad", cheap=True)
def _pad(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    fill: Value,
    *,
    padding_config: tuple[tuple[Any, Any, int], ...],
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    active = [a for a, config in enumerate(padding_config) if config != (0, 0, 0)]
    ragged = [a for a in active if is_symbolic(x.shape[a]) or is_symbolic(shape[a])]
    fixed = [(0, 0, 0) if a in ragged else c for a, c in enumerate(padding_config)]
    axes = symbolic_axes(shape)
    if isinstance(x, Flat) and len(axes) == 1 and ragged in ([], [x.axis]):
        if isinstance(fill, Shared):
            (axis,) = axes
            padded = (*shape[:axis], x.dim, *shape[axis + 1 :])
            x = Flat(lax.pad(x.x, fill.x, fixed), padded, axis)
            if not ragged:
                return x
            return _pad_tokens(ctx, x, fill.x, shape, padding_config[axis])

    def pad(sizes: Sizes, a: Array, fill: Array) -> list[Array]:
        a = lax.pad(a, fill, fixed)
        for axis in ragged:
            low, _, inner = padding_config[axis]
            position = positions(ctx.max(shape[axis])) - sizes(low)
            index, there = _spread(position, inner, sizes(x.shape[axis]))
            if not a.shape[axis]:  # nothing can be taken from it
                a = lax.pad(a, fill, [(i == axis, 0, 0) for i in range(a.ndim)])
            a = jnp.take(a, index, axis, mode="clip")
            a = jnp.where(along(there, axis, a.ndim), a, fill)
        return [a]

    (result,) = ctx.batched(pad, [x, fill], [shape], sized=bool(ragged))
    return result


def _pad_tokens(
    ctx: Context, x: Flat, fill: Array, shape: tuple[Any, ...], config: tuple
) -> Flat:
    old, dim = x.dim, shape[x.axis]
    low, _, inner = config
    position = ctx.segments(dim).position - ctx.size_per_token(low, dim)
    index, there = _spread(position, inner, ctx.size_per_token(old, dim))
    y = ctx.take_tokens(x, dim, lambda _: index)
    return Flat(jnp.where(along(there, x.axis, y.x.ndim), y.x, fill), shape, x.axis)


def _spread(position: Array, inner: int, size: Any) -> tuple[Array, Array]:
    """Return the element at `position`, if `inner` fills are between two, if any."""
    step = int(inner) + 1
    index, inside = starts_in_range(position // step, size, 1)
    return index, inside & (position % step == 0)
