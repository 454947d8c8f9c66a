"""Contexts for a part of a program: other options, or another batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..._typing import Array
from ..primitives.constant import constant
from ..types.segments import along, positions
from .context import Context
from .fill import of_present
from .symbols import Symbols
from .values import Padded, Shared, Value


def nested(ctx: Context, **options: Any) -> Context:
    """`ctx.nested()` with some options changed."""
    inner = ctx.nested()
    inner.options = dataclasses.replace(ctx.options, **options)
    return inner


def among(ctx: Context, going: Array) -> Context:
    """`ctx.nested()` where only the examples of `going`, bool `[batch]`, are used."""
    inner = ctx.nested()
    inner.going = going if ctx.going is None else ctx.going & going
    return inner


def of_sizes(
    ctx: Context,
    batch: int,
    values: dict[str, Array],
    highs: Mapping[str, int] | None = None,
) -> Context:
    """A context of other examples, for a part of the program where all are padded.

    Args:
        ctx: the context around it.
        batch: how many examples.
        values: of each symbol, int32 `[batch]`.
        highs: for some symbols the largest value, where it is less than in `ctx`.
    """
    highs = highs or {}
    ranges = {}
    for name, known in ctx.symbols.ranges.items():
        high = max(highs.get(name, known.high), ctx.symbols.room.get(name, 1))
        high = min(known.high, high)
        ranges[name] = known._replace(low=min(known.low, high), high=high)
    totals = {name: batch * r.high for name, r in ranges.items()}
    options = dataclasses.replace(ctx.options, tiers=None, prefers_rows=False)
    inner = Context(
        batch,
        Symbols(values, ranges, totals, {}, ctx.symbols.least, ctx.symbols.room),
        options,
    )
    inner.equations = ctx.equations
    return inner


@dataclasses.dataclass(frozen=True)
class StandIns:
    """A batch in which examples that have nothing to do are copies of one that has.

    What is computed for such an example is thrown away. Of its own values, a mean of
    no rows say, it may be NaN, and NaN times the 0 that comes back for it would be a
    gradient. Of another example it is what is computed anyway, here without gradient.

    Attributes:
        around: the context of the batch as it is.
        busy: bool `[batch]`, which examples have something to do.
        example: int32 `[batch]`, whose values each example has.
        context: the context of the batch with stand-ins, where all is padded.
    """

    around: Context
    busy: Array
    example: Array
    context: Context

    @classmethod
    def of(cls, ctx: Context, busy: Array) -> StandIns:
        """In place of the examples of `ctx` that are not `busy`."""
        first = jnp.argmax(busy).astype(jnp.int32)
        example = jnp.where(busy, positions(ctx.batch), first)
        values = {k: v[example] for k, v in ctx.symbols.values.items()}
        context = of_sizes(ctx, ctx.batch, values)
        context.going = ctx.going
        return cls(ctx, busy, example, context)

    def __call__(self, value: Value) -> Padded | Shared:
        """`value` in that batch; without gradient where no example is busy."""
        if isinstance(value, Shared):
            any_busy = jnp.any(self.busy)
            return Shared(differentiable_if(any_busy, value.x), value.shape)
        x = self.around.to_padded(value).x
        return Padded(of_present(self.busy, x), value.shape)

    def own(self, x: Array, axis: int = 0) -> Array:
        """`x`, with examples along `axis`, without gradient for the stand-ins."""
        return differentiable_if(along(self.busy, axis, x.ndim), x)


def differentiable_if(condition: Array, x: Array) -> Array:
    """`x`, a constant where the condition does not hold."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(condition, x, constant(x))
