"""Regions with several ragged axes, tier by tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from ... import _checks
from ..._typing import Array
from ..core.context import Context
from ..core.regions import Region, region_p
from ..core.registry import register
from ..core.sizes import symbols
from ..core.subset import differentiable_if, nested
from ..core.values import Packing, Shared, Value
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
    packing, fits = Packing.of(values), batch.fits()

    # Where the lengths do not fit, examples in tiers are cut: nothing comes of them.
    constants = [dataclasses.replace(v, x=differentiable_if(fits, v.x)) for v in values]
    results = batch.run(region, constants)

    # What it would save for its gradient would be zeros wherever the lengths fit.
    @jax.checkpoint
    def padded(arrays: list[Array]) -> list[Array]:
        inner = ctx.nested()
        results = _as_one(inner, region, packing.unpack(arrays))
        return [inner.canonical(v).x for v in results]

    arrays = lax.cond(
        fits,
        lambda in_tiers, _: in_tiers,
        lambda _, given: padded(given),
        [v.x for v in results],
        [v.x for v in values],
    )
    return Packing.of(results).unpack(arrays)


def _tiered_symbol(ctx: Context, region: Region) -> str | None:
    """The symbol with tiers that most axes of the region's values depend on."""
    names = [
        name
        for eqn in region.eqns
        for variable in eqn.outvars
        for dim in _shape(variable)
        for name in symbols(dim)
        if name in ctx.options.tiers
    ]
    return max(dict.fromkeys(names), key=names.count, default=None)


def _shape(variable: Any) -> tuple[Any, ...]:
    return getattr(variable.aval, "shape", ())


def _as_one(ctx: Context, region: Region, values: Sequence[Value]) -> list[Value]:
    return nested(ctx, tiers=None).evaluate(region, values)
