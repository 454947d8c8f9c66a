"""Contexts for a part of a program: other options, or another batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._typing import Array
from .call import Symbols
from .context import Context


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
        batch, Symbols(values, ranges, totals, {}, ctx.symbols.room), options
    )
    inner.equations = ctx.equations
    return inner
