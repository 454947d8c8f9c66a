"""Regions with several ragged axes, tier by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..context import Context
from ..layouts import Flat, Packing, Padded, Shared, Value, ragged_axes
from ..regions import Region, region_p
from ..registry import register
from ..segments import positions
from ..sizes import symbolic_axes, symbols
from ..subset import nested, of_sizes
from ..tiers import Tiers, always_fit


@register(region_p)
def _region(ctx: Context, eqn: JaxprEqn, *values: Value, region: Region) -> list[Value]:
    name = _tiered_symbol(ctx, region)
    if name is None or all(isinstance(v, Shared) for v in values):
        return _as_one(ctx, region, values)
    tiers: Tiers = ctx.options.tiers[name]
    known = ctx.symbols
    batch = _Tiered(ctx, name, tiers)
    if always_fit(tiers, known.totals[name], known.ranges[name].high):
        return batch.run(region, values)
    packing, found = Packing.of(values), []

    def in_tiers(arrays: list[Array]) -> list[Array]:
        inner = _Tiered(ctx.nested(), name, tiers)
        results = inner.run(region, packing.unpack(arrays))
        found.append(Packing.of(results))
        return [v.x for v in results]

    def padded(arrays: list[Array]) -> list[Array]:
        inner = ctx.nested()
        results = _as_one(inner, region, packing.unpack(arrays))
        return [inner.canonical(v).x for v in results]

    # What the padded run would save for its gradient would be zeros of its full size
    # wherever the tiers run: it saves nothing but its arguments.
    padded = jax.checkpoint(padded)
    arrays = lax.cond(batch.fits(), in_tiers, padded, [v.x for v in values])
    return found[-1].unpack(arrays)


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


class _Tiered:
    """A batch in tiers: its examples in descending order, cut into parts."""

    def __init__(self, ctx: Context, name: str, tiers: Tiers):
        self.ctx, self.tiers = ctx, tiers
        sizes = ctx.symbols.values[name]
        self.order = jnp.argsort(sizes, descending=True).astype(jnp.int32)
        self.sizes = jnp.take(sizes, self.order)
        values = {k: jnp.take(v, self.order) for k, v in ctx.symbols.values.items()}
        self.contexts = [
            of_sizes(ctx, count, {k: v[part] for k, v in values.items()}, {name: high})
            for part, (count, high) in zip(self._parts(), tiers, strict=True)
        ]
        self._rows: dict[str, Array] = {}

    def _parts(self, *widths: int) -> list[slice]:
        """Where each tier is, if each of its examples is so wide."""
        parts, start = [], 0
        for i, (count, _) in enumerate(self.tiers):
            stop = start + count * (widths[i] if widths else 1)
            parts.append(slice(start, stop))
            start = stop
        return parts

    def fits(self) -> Array:
        """Whether no example is longer than its tier."""
        first = jnp.array([part.start for part in self._parts()])
        highs = jnp.array([high for _, high in self.tiers], jnp.int32)
        return jnp.all(jnp.take(self.sizes, first) <= highs)

    def run(self, region: Region, values: Sequence[Value]) -> list[Value]:
        """The results of all tiers, in canonical layouts."""
        given = [self._split(v) for v in values]
        results = [
            inner.evaluate(region, [parts[i] for parts in given])
            for i, inner in enumerate(self.contexts)
        ]
        place = jnp.argsort(self.order).astype(jnp.int32)
        return [self._join(parts, place) for parts in zip(*results, strict=True)]

    # ------------------------------------------------------------------ into the tiers

    def _split(self, value: Value) -> list[Value]:
        """The part of each tier."""
        if isinstance(value, Flat):
            return self._split_rows(value)
        if isinstance(value, Shared):
            return [
                Shared(self._cut(inner, value.x, value.shape, 0), value.shape)
                for inner in self.contexts
            ]
        x = jnp.take(value.x, self.order, 0)
        return [
            Padded(self._cut(inner, x[part], value.shape, 1), value.shape)
            for inner, part in zip(self.contexts, self._parts(), strict=True)
        ]

    def _cut(self, inner: Context, x: Array, shape: tuple[Any, ...], at: int) -> Array:
        for axis in symbolic_axes(shape):
            x = lax.slice_in_dim(x, 0, inner.max(shape[axis]), axis=axis + at)
        return x

    def _split_rows(self, value: Flat) -> list[Value]:
        dim, axis = value.dim, value.axis
        rows = jnp.moveaxis(value.x, axis, 0)
        rows = jnp.take(rows, self._rows_of(dim), 0, mode="clip")
        most = [inner.max(dim) for inner in self.contexts]
        parts = []
        for inner, part in zip(self.contexts, self._parts(*most), strict=True):
            shape = (inner.batch, inner.max(dim), *rows.shape[1:])
            x = rows[part].reshape(shape)
            parts.append(Padded(jnp.moveaxis(x, 1, axis + 1), value.shape))
        return parts

    def _rows_of(self, dim: Any) -> Array:
        """For all elements of all tiers the flat row, the last one in the padding."""
        if str(dim) not in self._rows:
            first = jnp.take(self.ctx.segments(dim).offsets, self.order)
            last = jnp.maximum(jnp.take(self.ctx.lengths(dim), self.order) - 1, 0)
            rows = []
            for inner, part in zip(self.contexts, self._parts(), strict=True):
                position = positions(inner.max(dim))
                position = jnp.minimum(position[None], last[part][:, None])
                rows.append((first[part][:, None] + position).reshape(-1))
            known = self.ctx.tail(dim).last
            self._rows[str(dim)] = jnp.minimum(jnp.concatenate(rows), known)
        return self._rows[str(dim)]

    # ----------------------------------------------------------------- and out of them

    def _join(self, parts: Sequence[Value], place: Array) -> Value:
        """One value of the whole batch; `place` is where each example stands."""
        shape = parts[0].shape
        arrays = [
            inner.to_padded(v).x for inner, v in zip(self.contexts, parts, strict=True)
        ]
        if len(ragged_axes(parts[0])) == 1:
            return self._join_rows(arrays, shape, place)
        if ragged_axes(parts[0]):
            arrays = [
                self._lengthen(inner, x, shape)
                for inner, x in zip(self.contexts, arrays, strict=True)
            ]
        return Padded(jnp.take(jnp.concatenate(arrays), place, 0), shape)

    def _lengthen(self, inner: Context, x: Array, shape: tuple[Any, ...]) -> Array:
        missing = [self.ctx.max(d) - inner.max(d) for d in shape]
        return jnp.pad(x, [(0, 0), *((0, rows) for rows in missing)], mode="edge")

    def _join_rows(
        self, arrays: list[Array], shape: tuple[Any, ...], place: Array
    ) -> Flat:
        (axis,) = symbolic_axes(shape)
        dim = shape[axis]
        arrays = [jnp.moveaxis(x, axis + 1, 1) for x in arrays]
        most = [x.shape[1] for x in arrays]
        firsts = [
            part.start + inner_most * positions(count)
            for part, inner_most, (count, _) in zip(
                self._parts(*most), most, self.tiers, strict=True
            )
        ]
        first = jnp.take(jnp.concatenate(firsts), place)
        segments = self.ctx.segments(dim)
        rows = jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in arrays])
        index = jnp.take(first, segments.ids) + segments.position
        x = jnp.take(rows, index, 0, mode="clip")
        return Flat(jnp.moveaxis(x, 0, axis), shape, axis)
