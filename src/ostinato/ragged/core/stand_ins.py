"""Contexts of other examples: parts of a batch, and batches without idle examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from ..._typing import Array
from ..primitives.constant import constant
from ..types.segments import along, positions
from .context import Context
from .fill import of_present
from .symbols import Symbols
from .values import Padded, Shared, Value


def with_sizes(
    ctx: Context,
    batch: int,
    values: dict[str, Array],
    highs: Mapping[str, int] | None = None,
) -> Context:
    """Return a context of other examples, for a part of the program that is all padded.

    Args:
        ctx: the context around that part.
        batch: the number of examples.
        values: for each symbol its values, int32 `[batch]`.
        highs: for some symbols the largest value, where it is less than in `ctx`.
    """
    highs = highs or {}
    known = ctx.symbols
    ranges = {}
    for name, r in known.ranges.items():
        high = max(highs.get(name, r.high), known.min_padded.get(name, 1))
        high = min(r.high, high)
        ranges[name] = r._replace(low=min(r.low, high), high=high)
    totals = {name: batch * r.high for name, r in ranges.items()}
    return ctx.nested(
        batch=batch,
        symbols=Symbols(values, ranges, totals, {}, known.least, known.min_padded),
        options=dataclasses.replace(ctx.options, tiers=None, prefers_flat=False),
        going=None,
    )


@dataclasses.dataclass(frozen=True)
class StandIns:
    """A batch in which each idle example is replaced by a copy of a busy one.

    The results of an idle example are thrown away. Computed of its own values, of which
    a mean of no tokens may be one, they may be NaN, and NaN times the cotangent 0 would
    be a NaN gradient. The results of a copy are computed anyway, here without gradient.

    Attributes:
        around: the context of the batch as it is.
        busy: bool `[batch]`, the examples that have something to do.
        example: int32 `[batch]`, the example whose values each example has.
        context: the context of the batch with stand-ins, where all values are padded.
    """

    around: Context
    busy: Array
    example: Array
    context: Context

    @classmethod
    def of(cls, ctx: Context, busy: Array) -> StandIns:
        """Replace the examples of `ctx` that are not `busy`."""
        first = jnp.argmax(busy).astype(jnp.int32)
        example = jnp.where(busy, positions(ctx.batch), first)
        values = {
            name: jnp.take(sizes, example, mode="clip")
            for name, sizes in ctx.symbols.values.items()
        }
        context = with_sizes(ctx, ctx.batch, values).nested(going=ctx.going)
        return cls(ctx, busy, example, context)

    def __call__(self, value: Value) -> Padded | Shared:
        """Return `value` in that batch, without gradient where no example is busy."""
        if isinstance(value, Shared):
            any_busy = jnp.any(self.busy)
            return Shared(differentiable_if(any_busy, value.x), value.shape)
        x = self.around.to_padded(value).x
        return Padded(of_present(self.busy, x), value.shape)

    def own(self, x: Array, axis: int = 0) -> Array:
        """Return `x`, examples along `axis`, without gradient for the stand-ins."""
        return differentiable_if(along(self.busy, axis, x.ndim), x)


def differentiable_if(condition: Array, x: Array) -> Array:
    """Return `x`, as a constant where the condition does not hold."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(condition, x, constant(x))
