"""The rule of linear recurrences: one run over the tokens of all examples.

It starts again at the first token of each example, and needs no padded copy. Calls that
it does not fit, such as those with lengths of their own, run on padded examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._linear import advantages, filter_primitive, lowering, primitive
from ..._linear.call import Recurrence, multiply
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic
from ..core.values import Flat, Padded, Shared, Value
from ..types.segments import along


@register(
    primitive.linear_p, primitive.linear_tangent_p, primitive.linear_bwd_p, cheap=True
)
def _linear(
    ctx: Context, eqn: JaxprEqn, *values: Value, call: Recurrence
) -> list[Value]:
    shape = values[1].shape
    steps, batch = shape[call.time_axis], shape[call.batch_axis]
    units = any(map(is_symbolic, shape[2:]))
    before = eqn.primitive is primitive.linear_p and not call.after
    if before and is_symbolic(steps) and not is_symbolic(batch) and not units:
        if not call.has_lengths:
            return _on_tokens(ctx, eqn, call, *values)
    if is_symbolic(batch) and not is_symbolic(steps) and not units:
        if not (call.shares(values[0], call.batch_axis) and _differs(values[0])):
            return _on_flat_batch(ctx, eqn, call, values)
    return _on_padded(ctx, eqn, call, values, steps, batch)


def _differs(value: Value) -> bool:
    return not isinstance(value, Shared)


def _on_tokens(
    ctx: Context,
    eqn: JaxprEqn,
    call: Recurrence,
    a: Value,
    b: Value,
    h_0: Value,
    resets: Value | None = None,
) -> list[Value]:
    """Run the examples one after another, with resets between them."""
    axis, dim = call.time_axis, b.shape[call.time_axis]
    segments, lengths = ctx.segments(dim), ctx.lengths(dim)
    x = ctx.to_flat(b).x
    if is_symbolic(a.shape[axis]):
        factors = ctx.to_flat(a).x
    elif isinstance(a, Shared):
        factors = a.x
    else:  # constant in each example
        factors = jnp.moveaxis(jnp.squeeze(ctx.per_token(a, dim), 1 + axis), 0, axis)
    last = lengths[segments.ids] - 1
    starts = segments.position == (last if call.reverse else 0)
    starts = jnp.broadcast_to(along(starts, axis, 2), x.shape[:2])
    begins = starts | along(~ctx.used(dim).valid, axis, 2)
    if resets is not None:  # one at the first token forgets the initial state
        given = ctx.to_flat(resets).x
        starts, begins = starts & ~given, begins | given
    start = jnp.moveaxis(ctx.per_token(h_0, dim), 0, axis)
    first = jnp.broadcast_to(jnp.expand_dims(starts, range(2, x.ndim)), x.shape)
    # Replaced before they are multiplied: a factor that a reset hides may be NaN.
    used = jnp.expand_dims(starts, range(2, factors.ndim))
    seen = jnp.where(used, factors, jnp.zeros((), factors.dtype))
    x = x + jnp.where(first, multiply(call, seen, start), jnp.zeros((), x.dtype))
    one = dataclasses.replace(call, has_resets=True)
    zeros = jnp.zeros((x.shape[call.batch_axis], *x.shape[2:]), x.dtype)
    h, _ = primitive.run(one, factors, x, zeros, begins)
    at = segments.offsets + (0 if call.reverse else jnp.maximum(lengths - 1, 0))
    h_n = jnp.moveaxis(jnp.take(h, at, axis, mode="clip"), axis, 0)
    empty = along(lengths == 0, 0, h_n.ndim)
    h_n = jnp.where(empty & jnp.ones(h_n.shape, bool), ctx.to_padded(h_0).x, h_n)
    h_shape, n_shape = ctx.out_shapes(eqn)
    return [Flat(h, h_shape, axis), Padded(h_n, n_shape)]


def _on_flat_batch(
    ctx: Context, eqn: JaxprEqn, call: Recurrence, values: Sequence[Value]
) -> list[Value]:
    """Run examples of different batch sizes: all their sequences are one batch."""
    inward, outward = lowering.kinds(eqn.primitive, call)
    leaves = [
        v.x if kind == "a" and call.shares(v, call.batch_axis) else ctx.to_flat(v).x
        for kind, v in zip(inward, values, strict=True)
    ]
    outs = eqn.primitive.bind(*leaves, call=call)
    return [
        Flat(x, shape, lowering.batch_axis(kind, call))
        for x, shape, kind in zip(outs, ctx.out_shapes(eqn), outward, strict=True)
    ]


def _on_padded(
    ctx: Context,
    eqn: JaxprEqn,
    call: Recurrence,
    values: Sequence[Value],
    steps: Any,
    batch: Any,
) -> list[Value]:
    """Run padded examples, whose lengths mask the padding."""
    sized = is_symbolic(steps) or is_symbolic(batch)
    masked = dataclasses.replace(call, has_lengths=True) if sized else call
    count = len(lowering.kinds(eqn.primitive, call)[0]) - (
        call.has_lengths + call.has_resets
    )
    outward = lowering.kinds(eqn.primitive, call)[1]

    def one(sizes: Sizes, *leaves: Array) -> list[Array]:
        operands, masks = leaves[:count], leaves[count:]
        if sized:
            lengths, resets = call.masks(masks)
            if lengths is None:
                lengths = jnp.full(ctx.max(batch), ctx.max(steps), jnp.int32)
            lengths = jnp.minimum(lengths, sizes(steps))
            lengths = jnp.where(sizes.mask(lengths, 0, batch), lengths, 0)
            masks = [m for m in (lengths, resets) if m is not None]
        outs = eqn.primitive.bind(*operands, *masks, call=masked)
        return [
            sizes.repeat_last(x, call.time_axis, steps) if kind == "s" else x
            for x, kind in zip(outs, outward, strict=True)
        ]

    return ctx.batched(one, values, ctx.out_shapes(eqn), sized=sized)


@register(filter_primitive.filter_p, cheap=True)
def _filter(ctx: Context, eqn: JaxprEqn, *values: Value, reverse: bool) -> list[Value]:
    """Run padded examples, whose lengths mask the padding."""
    channels, steps = values[2].shape
    if any(is_symbolic(size) for value in values[:2] for size in value.shape[1:]):
        raise Unsupported("the number of coefficients must be the same everywhere")

    def one(sizes: Sizes, b: Array, a: Array, x: Array, *given: Array) -> list[Array]:
        lengths = jnp.full(ctx.max(channels), ctx.max(steps), jnp.int32)
        lengths = jnp.minimum(given[0] if given else lengths, sizes(steps))
        x = sizes.cleared(x, values[2].shape)
        y = eqn.primitive.bind(b, a, x, lengths, reverse=reverse)
        return [sizes.repeat_last(y, 1, steps)]

    return ctx.batched(one, values, ctx.out_shapes(eqn))


@register(advantages.gae_p, cheap=True)
def _gae(
    ctx: Context, eqn: JaxprEqn, *values: Value, time_major: bool, present: Any
) -> list[Value]:
    """Run padded examples, whose lengths mask the padding."""
    axis = 0 if time_major else 1
    shape = values[0].shape
    steps, batch = shape[axis], shape[1 - axis]

    def one(sizes: Sizes, *operands: Array) -> list[Array]:
        lengths = jnp.full(ctx.max(batch), ctx.max(steps), jnp.int32)
        if present[2]:
            operands, lengths = operands[:-1], operands[-1]
        lengths = jnp.minimum(lengths, sizes(steps))
        lengths = jnp.where(sizes.mask(lengths, 0, batch), lengths, 0)
        return eqn.primitive.bind(
            *operands, lengths, time_major=time_major, present=(*present[:2], True)
        )

    return ctx.batched(one, values, ctx.out_shapes(eqn))
