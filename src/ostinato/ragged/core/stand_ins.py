"""Contexts of other examples: parts of a batch, and batches without idle examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..._typing import Array
from ..primitives.constant import constant
from ..primitives.relocate import Sources, relocate
from ..types.segments import along, positions
from .context import Context
from .fill import of_present
from .values import Padded, Shared, Value, ragged_axes


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
        symbols=dataclasses.replace(
            known,
            values=values,
            ranges=ranges,
            totals=totals,
            capacities={},
            present=None,
        ),
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


@dataclasses.dataclass(frozen=True)
class Some:
    """A batch in which all but some examples are absent: they are empty.

    Rules let an example that breaks the promise of `min_length` leave nothing in what
    all examples share, not even 0 times NaN, and absent examples count as such. Tokens
    of the others are concatenated, as ever.

    Attributes:
        around: the context of the batch as it is.
        present: bool `[batch]`, the examples that are there.
        context: the context of the batch of which some are there.
    """

    around: Context
    present: Array
    context: Context

    @classmethod
    def of(cls, ctx: Context, present: Array) -> Some:
        """Keep the examples of `present` that are complete and going in `ctx`."""
        used = ctx.used_examples()
        present = present if used is None else present & used
        known = ctx.symbols
        values = {
            name: jnp.where(present, value, known.ranges[name].low)
            for name, value in known.values.items()
        }
        context = ctx.nested(
            symbols=dataclasses.replace(known, values=values, present=present),
            options=dataclasses.replace(ctx.options, tiers=None),
        )
        return cls(ctx, present, context)

    def __call__(self, value: Value) -> Value:
        """Return `value` in that batch."""
        if isinstance(value, Shared):
            any_present = jnp.any(self.present)
            return dataclasses.replace(value, x=differentiable_if(any_present, value.x))
        if isinstance(value, Padded):
            x = value.x if ragged_axes(value) else of_present(self.present, value.x)
            return dataclasses.replace(value, x=x, filled=False)
        inward, outward = self._sources(value.dim)
        x = relocate(value.x, inward, outward, value.axis)
        x = self.context.fill_unused(x, value.dim, value.axis)
        return dataclasses.replace(value, x=x)

    def back(self, value: Value) -> Value:
        """Return a value of that batch in the batch around it.

        It has no meaning for absent examples.
        """
        if isinstance(value, Padded):
            return dataclasses.replace(value, filled=False)
        if isinstance(value, Shared):
            return value
        inward, outward = self._sources(value.dim)
        return dataclasses.replace(
            value, x=relocate(value.x, outward, inward, value.axis)
        )

    def _sources(self, dim: Any) -> tuple[Sources, Sources]:
        """Return for each token there its place around, and the inverse map."""
        inner, outer = self.context.segments(dim), self.around.segments(dim)
        inward = Sources(outer.offsets[inner.ids] + inner.position, inner.valid)
        there = outer.valid & self.present[outer.ids]
        return inward, Sources(inner.offsets[outer.ids] + outer.position, there)


def differentiable_if(condition: Array, x: Array) -> Array:
    """Return `x`, as a constant where the condition does not hold."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(condition, x, constant(x))
