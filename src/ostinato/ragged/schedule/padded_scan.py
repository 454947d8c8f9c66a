"""The padded scan: all examples side by side, for the steps of the longest example.

An example that is done starts over at its first step and keeps its state: the body
computes there only what it has computed before, so that no other NaN comes up, neither
forward nor backward. An example without steps runs on the values of another example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._typing import Array
from ..core.context import Context
from ..core.sizes import symbolic_axes
from ..core.stand_ins import StandIns
from ..core.values import Flat, Padded, Shared, Value
from ..types.segments import along, positions
from .scan import Scan, tokens_of_steps


def run(
    ctx: Context,
    scan: Scan,
    consts: Sequence[Value],
    init: Sequence[Value],
    xs: Sequence[Value],
) -> list[Value]:
    """Return all results of `scan`, of all examples."""
    lengths = ctx.lengths(scan.length)
    batch = StandIns.of(ctx, lengths > 0)
    lengths = jnp.take(lengths, batch.example, mode="clip")
    t = positions(ctx.max(scan.length))[:, None]
    valid = (t < lengths[None]) & batch.busy[None]
    first = jnp.maximum(lengths - 1, 0)[None] if scan.reverse else 0
    position = jnp.where(valid, t, first)
    # Values that every step needs as a whole are padded once, before the loop.
    consts = list(map(batch, consts))
    before = [ctx.to_padded(v) for v in init]
    starts = list(map(batch, before))

    def step(
        carry: list[Array], at: tuple[Array, list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        going, x = at
        inner = batch.context.among(going)
        states = [
            Padded(_select(going, c, s.x), s.shape)
            for c, s in zip(carry, starts, strict=True)
        ]
        slices = [Padded(a, v.shape[1:]) for a, v in zip(x, xs, strict=True)]
        results = inner.evaluate(scan.jaxpr, [*consts, *states, *slices])
        arrays = [inner.to_padded(v).x for v in results]
        new = [
            _select(going, a, c)
            for a, c in zip(arrays[: scan.num_carry], carry, strict=True)
        ]
        return new, arrays[scan.num_carry :]

    carry, ys = lax.scan(
        step,
        [v.x for v in before],
        (valid, [_time_first(batch, v, position) for v in xs]),
        reverse=scan.reverse,
        unroll=scan.unroll,
    )
    states = [Padded(c, v.shape) for c, v in zip(carry, before, strict=True)]
    shapes = scan.shapes[scan.num_carry :]
    return states + [_output(ctx, *pair) for pair in zip(ys, shapes, strict=True)]


def _time_first(batch: StandIns, value: Value, position: Array) -> Array:
    """Return `[T, batch, ...]`, at each step the token `position`, `[T, batch]`."""
    ctx = batch.around
    if isinstance(value, Shared):
        return batch.own(jnp.take(value.x, position, 0), 1)
    if isinstance(value, Padded):
        return batch.own(value.x[batch.example[None], position], 1)
    segments = ctx.segments(value.dim)
    first = segments.offsets[batch.example][None]
    tokens = jnp.minimum(first + position, segments.last)
    return batch.own(jnp.take(value.x, tokens, 0), 1)


def _select(condition: Array, a: Array, b: Array) -> Array:
    return jnp.where(along(condition, 0, a.ndim), a, b)


def _output(ctx: Context, y: Array, shape: tuple[Any, ...]) -> Value:
    if len(symbolic_axes(shape)) > 1:
        return Padded(jnp.moveaxis(y, 0, 1), shape)
    return Flat(tokens_of_steps(ctx, y, shape[0]), shape, 0)
