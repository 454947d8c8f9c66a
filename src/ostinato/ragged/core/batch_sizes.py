"""`BatchSizes`: the sizes of all examples of a batch, and what follows from them."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _checks
from ..._rnn.sharding import make_varying
from ..._typing import Array
from ..primitives.relocate import Sources
from ..types.checks import check_padded
from ..types.segments import Segments, UsedCapacity, is_inside, positions
from . import sizes
from .symbols import Symbols


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSizes:
    """The sizes of a batch: lengths, capacities, segments and masks.

    A `dim` is a size as it stands in the shapes of a jaxpr, an int or symbolic. Arrays
    that are computed from lengths are cached, so that a trace holds each of them once.

    Attributes:
        batch: the number of examples, at least 1.
        symbols: the values that the symbols stand for.
    """

    batch: int
    symbols: Symbols
    _cache: dict[tuple, Any] = dataclasses.field(
        default_factory=dict, kw_only=True, repr=False
    )

    def cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed for the first call with `key` alone."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def varying(self, arrays: list[Array]) -> list[Array]:
        """Return `arrays`, varying over the axes of a `shard_map` as lengths do.

        Primitives there take operands that vary alike, and so do states of loops.
        """
        one = next(iter(self.symbols.values.values()))
        return make_varying([*arrays, one])[:-1]

    # ----------------------------------------------------------------------- lengths

    def lengths(self, dim: Any) -> Array:
        """Return the size `dim` of each example, int32 `[batch]`."""
        if not sizes.is_symbolic(dim):
            return jnp.full(self.batch, dim, jnp.int32)
        return self.cached(("lengths", str(dim)), lambda: self._lengths(dim))

    def _lengths(self, dim: Any) -> Array:
        lengths = sizes.evaluate(dim, self.symbols.values)
        if str(dim) not in self.symbols.capacities:  # those were checked
            lengths = jnp.maximum(lengths, 0)
        return lengths.astype(jnp.int32)

    def size_per_token(self, dim: Any, tokens_of: Any) -> Any:
        """Return the size `dim`, maybe negative, for each token of size `tokens_of`."""
        if not sizes.is_symbolic(dim):
            return int(dim)  # JAX holds some as numpy's, which have a dtype
        values = sizes.evaluate(dim, self.symbols.values)
        return jnp.take(values, self.segments(tokens_of).ids, mode="clip")

    # ------------------------------------------------------------------ static sizes

    def max(self, dim: Any) -> int:
        """Return the largest size that `dim` may have, which padded arrays have."""
        if not sizes.is_symbolic(dim):
            return dim
        key = ("max", str(dim))
        return self.cached(key, lambda: sizes.largest(dim, self.symbols.ranges))

    def capacity(self, dim: Any) -> int:
        """Return the tokens of a flat array of that size, at least those there are."""
        known, text = self.symbols, str(dim)
        if text in known.capacities:
            return known.capacities[text]

        def most() -> int:
            tokens = sizes.most_tokens(dim, known.ranges, known.totals, self.batch)
            return max(tokens, 1)

        return self.cached(("capacity", text), most)

    def at_max(self, param: Any) -> Any:
        """Return a shape, or another tuple, with each symbol at its maximum."""
        if isinstance(param, tuple):
            return tuple(self.at_max(p) for p in param)
        return self.max(param) if sizes.is_symbolic(param) else param

    def flat_shape(self, shape: Sequence[Any], axis: int) -> tuple[int, ...]:
        """Return the shape of the array of a `Flat` value of that shape."""
        return (
            *self.at_max(tuple(shape[:axis])),
            self.capacity(shape[axis]),
            *self.at_max(tuple(shape[axis + 1 :])),
        )

    # ---------------------------------------------------------------------- segments

    def segments(self, dim: Any) -> Segments:
        """Return the example and the position of each token of a flat array."""
        return self.cached(("segments", str(dim)), lambda: self._segments(dim))

    def _segments(self, dim: Any) -> Segments:
        return Segments.of(self.lengths(dim), self.capacity(dim), self.used(dim))

    def used(self, dim: Any) -> UsedCapacity:
        """Return the used part of flat arrays' capacity: cheaper than `segments`."""
        return self.cached(
            ("used", str(dim)),
            lambda: UsedCapacity.of(self.lengths(dim), self.capacity(dim)),
        )

    def padded_tokens(self, dim: Any) -> Array:
        """Return for each example and position the token, int32 `[batch, max]`.

        In the padding it is the example's last token, and for an empty example a token
        of another one: use it with a mask wherever that could be seen, be it by a
        gradient.
        """

        def tokens() -> Array:
            return _padded_tokens(self.segments(dim), self.lengths(dim), self.max(dim))

        return self.cached(("padded tokens", str(dim)), tokens)

    def _sources(self, dim: Any) -> tuple[Sources, Sources]:
        """Return the token of each padded element, and the inverse map."""

        def sources() -> tuple[Sources, Sources]:
            check_padded(self.batch, self.max(dim))
            tokens, inside = self.padded_tokens(dim), self._inside(dim)
            elements = _padded_elements(self.segments(dim), self.max(dim))
            return Sources(tokens.reshape(-1), inside.reshape(-1)), elements

        return self.cached(("sources", str(dim)), sources)

    # ------------------------------------------------------------------------- masks

    def mask(self, x: Array, axis: int, dim: Any) -> Array:
        """Return where padded examples are not padding along `axis` of one example.

        Args:
            x: the array of a `Padded` value.
            axis: the axis of one example's value.
            dim: its size.

        Returns:
            bool, in a shape that broadcasts to `x`.
        """
        inside = self._inside(dim)
        shape = [1] * x.ndim
        shape[0], shape[axis + 1] = inside.shape
        return inside.reshape(shape)

    def _inside(self, dim: Any) -> Array:
        """Return where padded examples are not padding, bool `[batch, max]`."""

        def inside() -> Array:
            return is_inside(self.lengths(dim), self.max(dim))

        return self.cached(("inside", str(dim)), inside)

    def complete(self) -> Array | None:
        """Return which examples have `min_length`, None where all are known to.

        Lengths that are traced may break the promise.
        """
        known = self.symbols
        if known.present is not None:
            return known.present
        if all(map(_checks.is_concrete, known.values.values())):
            return None
        promised = {k: n for k, n in known.least.items() if n > known.ranges[k].low}
        promised |= known.least_derived
        if not promised:
            return None

        def complete() -> Array:
            values = {dim: sizes.evaluate(dim, known.values) for dim in promised}
            enough = [values[dim] >= least for dim, least in promised.items()]
            return jnp.all(jnp.stack(enough), axis=0)

        return self.cached(("complete",), complete)

    def _nonempty(self, shapes: Sequence[tuple[Any, ...]]) -> Array | None:
        """Return which examples have an element in one of `shapes`, None for all."""
        some: Any = False
        for shape in shapes:
            there: Any = True
            for axis in sizes.symbolic_axes(shape):
                there &= self.cached(
                    ("nonempty", str(shape[axis])),
                    lambda d=shape[axis]: self.is_positive(d),
                )
            some |= there
            if some is True:
                return None
        return some if shapes else None

    def is_positive(self, dim: Any) -> Array | bool:
        """Return which examples have a size `dim` of at least 1, True for all."""
        known = self.symbols
        least = {
            name: r._replace(low=min(max(r.low, known.least[name]), r.high))
            for name, r in known.ranges.items()
        }
        if sizes.smallest(dim, least) > 0:
            return True
        there = self.lengths(dim) > 0
        if _checks.is_concrete(there) and bool(np.all(there)):
            return True
        return there


# Compiled as a whole where no trace is around them, and inlined in traces.


@ft.partial(jax.jit, static_argnums=2, inline=True)
def _padded_tokens(segments: Segments, lengths: Array, longest: int) -> Array:
    last = jnp.maximum(lengths - 1, 0)
    position = jnp.minimum(positions(longest)[None], last[:, None])
    return jnp.minimum(segments.offsets[:, None] + position, segments.last)


@ft.partial(jax.jit, static_argnums=1, inline=True)
def _padded_elements(segments: Segments, longest: int) -> Sources:
    """Return for each token its element of padded examples, put one after another."""
    position = jnp.minimum(segments.position, longest - 1)
    return Sources(segments.ids * longest + position, segments.valid)
