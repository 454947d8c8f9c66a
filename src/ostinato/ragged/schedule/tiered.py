"""A batch in tiers, which runs a part of a program on each tier by itself."""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._typing import Array
from ..core.context import Context
from ..core.regions import Region
from ..core.sizes import symbolic_axes
from ..core.stand_ins import with_sizes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..primitives.relocate import Sources, relocate
from ..schedule.tiers import Tiers
from ..types.segments import descending, positions


class TieredBatch:
    """A batch in tiers: its examples in descending order, cut into groups.

    Attributes:
        ctx: the context of the batch as it is.
        tiers: the tiers, `(count, max)` each.
        order: int32 `[batch]`, the examples, the longest first.
        rank: int32 `[batch]`, the rank of each example in that order.
        contexts: the context of each tier.
    """

    def __init__(self, ctx: Context, name: str, tiers: Tiers):
        self.ctx, self.tiers = ctx, tiers
        sizes = ctx.symbols.values[name]
        self.order, self.rank = descending(sizes)
        self.sizes = self._sort(sizes)
        values = {k: self._sort(v) for k, v in ctx.symbols.values.items()}
        self.contexts = [
            with_sizes(
                ctx, count, {k: v[part] for k, v in values.items()}, {name: high}
            )
            for part, (count, high) in zip(self._parts(), tiers, strict=True)
        ]
        if ctx.going is not None:
            going = self._sort(ctx.going)
            self.contexts = [
                inner.nested(going=going[part])
                for inner, part in zip(self.contexts, self._parts(), strict=True)
            ]
        everywhere = jnp.ones(ctx.batch, bool)
        self._sorted = Sources(self.order, everywhere)
        self._unsorted = Sources(self.rank, everywhere)
        self._cache: dict[str, tuple[Sources, Sources]] = {}

    def _parts(self, *widths: int) -> list[slice]:
        """Return the slice of each tier, if each of its examples is so wide."""
        parts, start = [], 0
        for i, (count, _) in enumerate(self.tiers):
            stop = start + count * (widths[i] if widths else 1)
            parts.append(slice(start, stop))
            start = stop
        return parts

    def fits(self) -> Array:
        """Return whether no example is longer than its tier."""
        return ft.reduce(
            operator.and_,
            [
                self.sizes[part.start] <= high
                for part, (_, high) in zip(self._parts(), self.tiers, strict=True)
            ],
        )

    def run(self, region: Region, values: Sequence[Value]) -> list[Value]:
        """Return the results of all tiers, in canonical layouts."""
        given = [self._split(v) for v in values]
        results = [
            inner.evaluate(region, [parts[i] for parts in given])
            for i, inner in enumerate(self.contexts)
        ]
        return [self._join(parts) for parts in zip(*results, strict=True)]

    # ------------------------------------------------------------------ into the tiers

    def _split(self, value: Value) -> list[Value]:
        """Return the part of each tier."""
        if isinstance(value, Flat):
            return self._split_tokens(value)
        if isinstance(value, Shared):
            return [
                Shared(self._cut(inner, value.x, value.shape, 0), value.shape)
                for inner in self.contexts
            ]
        x = relocate(value.x, self._sorted, self._unsorted)
        return [
            Padded(self._cut(inner, x[part], value.shape, 1), value.shape, value.filled)
            for inner, part in zip(self.contexts, self._parts(), strict=True)
        ]

    def _cut(self, inner: Context, x: Array, shape: tuple[Any, ...], at: int) -> Array:
        for axis in symbolic_axes(shape):
            x = lax.slice_in_dim(x, 0, inner.max(shape[axis]), axis=axis + at)
        return x

    def _split_tokens(self, value: Flat) -> list[Value]:
        dim, axis = value.dim, value.axis
        most = [inner.max(dim) for inner in self.contexts]
        tokens = jnp.moveaxis(value.x, axis, 0)
        (token, inside), (slot, valid) = self._maps(dim)
        parts = []
        for inner, part in zip(self.contexts, self._parts(*most), strict=True):
            here = valid & (slot >= part.start) & (slot < part.stop)
            to, back = (
                Sources(token[part], inside[part]),
                Sources(slot - part.start, here),
            )
            x = relocate(tokens, to, back)
            x = x.reshape(inner.batch, inner.max(dim), *x.shape[1:])
            x = jnp.moveaxis(x, 1, axis + 1)
            parts.append(Padded(x, value.shape, filled=True))
        return parts

    def _maps(self, dim: Any) -> tuple[Sources, Sources]:
        """Return the token of each element of all tiers, and the inverse map."""
        if str(dim) not in self._cache:
            self._cache[str(dim)] = self._in_tiers(dim), self._in_tokens(dim)
        return self._cache[str(dim)]

    def _in_tiers(self, dim: Any) -> Sources:
        """Return the token of each element, in the padding the example's last token."""
        segments = self.ctx.segments(dim)
        first = self._sort(segments.offsets)
        size = self._sort(self.ctx.lengths(dim))
        tokens, inside = [], []
        for inner, part in zip(self.contexts, self._parts(), strict=True):
            position, sizes = positions(inner.max(dim))[None], size[part][:, None]
            last = jnp.maximum(sizes - 1, 0)
            token = first[part][:, None] + jnp.minimum(position, last)
            tokens.append(token.reshape(-1))
            inside.append((position < sizes).reshape(-1))
        token = jnp.minimum(jnp.concatenate(tokens), segments.last)
        return Sources(token, jnp.concatenate(inside))

    def _in_tokens(self, dim: Any) -> Sources:
        """Return for each token the element that it becomes."""
        most = [inner.max(dim) for inner in self.contexts]
        firsts = [
            part.start + each * positions(count)
            for part, each, (count, _) in zip(
                self._parts(*most), most, self.tiers, strict=True
            )
        ]
        segments = self.ctx.segments(dim)
        first = jnp.take(jnp.concatenate(firsts), self.rank, mode="clip")
        token = jnp.take(first, segments.ids, mode="clip") + segments.position
        return Sources(token, segments.valid)

    def _sort(self, x: Array) -> Array:
        return jnp.take(x, self.order, mode="clip")

    # ----------------------------------------------------------------- and out of them

    def _join(self, parts: Sequence[Value]) -> Value:
        """Return one value of the whole batch."""
        shape = parts[0].shape
        arrays = [
            inner.to_padded(v).x for inner, v in zip(self.contexts, parts, strict=True)
        ]
        if len(ragged_axes(parts[0])) == 1:
            return self._join_tokens(arrays, shape)
        if ragged_axes(parts[0]):
            arrays = [
                self._lengthen(inner, x, shape)
                for inner, x in zip(self.contexts, arrays, strict=True)
            ]
        x = relocate(jnp.concatenate(arrays), self._unsorted, self._sorted)
        return Padded(x, shape)

    def _lengthen(self, inner: Context, x: Array, shape: tuple[Any, ...]) -> Array:
        missing = [self.ctx.max(d) - inner.max(d) for d in shape]
        return jnp.pad(x, [(0, 0), *((0, tokens) for tokens in missing)], mode="edge")

    def _join_tokens(self, arrays: list[Array], shape: tuple[Any, ...]) -> Flat:
        (axis,) = symbolic_axes(shape)
        dim = shape[axis]
        arrays = [jnp.moveaxis(x, axis + 1, 1) for x in arrays]
        tokens = jnp.concatenate([lax.collapse(x, 0, 2) for x in arrays])
        in_tiers, in_tokens = self._maps(dim)
        x = relocate(tokens, in_tokens, in_tiers)
        return Flat(jnp.moveaxis(x, 0, axis), shape, axis)
