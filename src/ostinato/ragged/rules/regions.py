"""The rule of regions, parts of a program with several ragged axes: tier by tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ... import _checks
from ..core.context import Context
from ..core.regions import Region, region_p
from ..core.registry import register
from ..core.sizes import symbol_names
from ..core.stand_ins import differentiable_if
from ..core.values import Shared, Value
from ..schedule.tiered import TieredBatch
from ..schedule.tiers import Tiers, always_fit, fit


@register(region_p)
def _region(ctx: Context, eqn: JaxprEqn, *values: Value, region: Region) -> list[Value]:
    name = _tiered_symbol(ctx, region)
    if name is None or all(isinstance(v, Shared) for v in values):
        return _as_one(ctx, region, values)
    tiers: Tiers = ctx.options.tiers[name]
    known = ctx.symbols
    sizes = known.values[name]
    if _checks.is_concrete(sizes) and not fit(tiers, sizes):
        return _as_one(ctx, region, values)
    batch = TieredBatch(ctx, name, tiers)
    always = always_fit(tiers, known.totals[name], known.ranges[name].high)
    if always or _checks.is_concrete(sizes):
        return batch.run(region, values)
    fits = batch.fits()

    # If the lengths do not fit, examples in tiers are cut: their results are not used.
    constants = [dataclasses.replace(v, x=differentiable_if(fits, v.x)) for v in values]
    results = batch.run(region, constants)

    # The values that it would save for its gradient would be zeros if the lengths fit.
    @jax.checkpoint
    def padded(values: list[Value]) -> list[Value]:
        inner = ctx.nested()
        return [inner.canonical(v) for v in _as_one(inner, region, values)]

    return lax.cond(
        fits,
        lambda in_tiers, _: in_tiers,
        lambda _, given: padded(given),
        results,
        list(values),
    )


def _tiered_symbol(ctx: Context, region: Region) -> str | None:
    """Return the symbol with tiers that most axes of the region's values depend on."""
    names = [
        name
        for eqn in region.eqns
        for variable in eqn.outvars
        for dim in _shape(variable)
        for name in symbol_names(dim)
        if name in ctx.options.tiers
    ]
    return max(dict.fromkeys(names), key=names.count, default=None)


def _shape(variable: Any) -> tuple[Any, ...]:
    return getattr(variable.aval, "shape", ())


def _as_one(ctx: Context, region: Region, values: Sequence[Value]) -> list[Value]:
    options = dataclasses.replace(ctx.options, tiers=None)
    return ctx.nested(options=options).evaluate(region, values)
