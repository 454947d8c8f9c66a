"""What a rule knows of the batch, and how it moves values between layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ... import _checks
from ..._rnn.sharding import make_varying
from ..._typing import Array
from ..primitives.constant import constant
from ..primitives.relocate import Places, move
from ..types.segments import Segments, Tail, along, positions, repeated
from . import interpreter, sizes
from .example_sizes import Sizes
from .fill import of_present, or_harmless
from .registry import Refuse
from .symbols import Options, Symbols
from .values import Flat, Padded, Shared, Value, ragged_axes, shape_text


class Context:
    """One batch under `ragged.vmap`: sizes, segments and conversions.

    A `dim` is a size as it stands in the shapes of a jaxpr, an int or symbolic. What
    is derived from lengths is computed once for each trace: a rule that traces a
    function of its own, such as the body of a loop, uses `nested()` inside it.

    Attributes:
        batch: the number of examples, at least 1.
        options: see `ragged.vmap`.
        symbols: what the symbols stand for.
        equations: the one at hand, after those that it stands in.
        going: bool `[batch]`, whose results are used, in a loop that others have left;
            None where all are.
    """

    def __init__(self, batch: int, symbols: Symbols, options: Options):
        self.batch = batch
        self.symbols = symbols
        self.options = options
        self.equations: tuple[JaxprEqn, ...] = ()
        self.going: Array | None = None
        self._known: dict[tuple, Any] = {}

    def nested(self, values: dict[str, Array] | None = None) -> Context:
        """A context for use inside a function that is traced.

        Args:
            values: the symbols' values as they arrive inside, for a function that must
                not close over arrays (`symbols.values` goes in as an argument). None:
                those of this context, with all that is known already.
        """
        symbols = self.symbols
        if values is not None:
            symbols = dataclasses.replace(symbols, values=values)
        inner = Context(self.batch, symbols, self.options)
        inner.equations, inner.going = self.equations, self.going
        if values is None:
            inner._known = dict(self._known)
        return inner

    def evaluate(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """Run an inner jaxpr on values of this context."""
        return interpreter.evaluate(self, jaxpr, values)

    def varying(self, arrays: list[Array]) -> list[Array]:
        """`arrays`, varying over the axes of a `shard_map` that lengths vary over.

        Primitives there want all operands alike, and so do states of loops.
        """
        one = next(iter(self.symbols.values.values()))
        return make_varying([*arrays, one])[:-1]

    # ------------------------------------------------------------------------- sizes

    def lengths(self, dim: Any) -> Array:
        """The size `dim` of each example, int32 `[batch]`."""
        if not sizes.is_symbolic(dim):
            return jnp.full(self.batch, dim, jnp.int32)
        return self._once(("lengths", str(dim)), lambda: self._lengths(dim))

    def _lengths(self, dim: Any) -> Array:
        lengths = sizes.evaluate(dim, self.symbols.values)
        if str(dim) not in self.symbols.capacities:  # those were checked
            lengths = jnp.maximum(lengths, 0)
        return lengths.astype(jnp.int32)

    def max(self, dim: Any) -> int:
        """The largest size that `dim` may have; what padded arrays have."""
        if not sizes.is_symbolic(dim):
            return dim
        key = ("max", str(dim))
        return self._once(key, lambda: sizes.largest(dim, self.symbols.ranges))

    def capacity(self, dim: Any) -> int:
        """The rows of a flat array of that size: at least those of all examples."""
        known, text = self.symbols, str(dim)
        if text in known.capacities:
            return known.capacities[text]

        def most() -> int:
            rows = sizes.most_rows(dim, known.ranges, known.totals, self.batch)
            return max(rows, 1)

        return self._once(("capacity", text), most)

    def at_max(self, param: Any) -> Any:
        """A shape, or any tuple of parameters, with every symbol at its maximum."""
        if isinstance(param, tuple):
            return tuple(self.at_max(p) for p in param)
        return self.max(param) if sizes.is_symbolic(param) else param

    def flat_shape(self, shape: Sequence[Any], axis: int) -> tuple[int, ...]:
        """The shape of a `Flat` array of that shape."""
        return (
            *self.at_max(tuple(shape[:axis])),
            self.capacity(shape[axis]),
            *self.at_max(tuple(shape[axis + 1 :])),
        )

    @staticmethod
    def out_shapes(eqn: JaxprEqn) -> list[tuple[Any, ...]]:
        """The shapes, maybe symbolic, of an equation's results."""
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        return [tuple(aval.shape) for aval in avals]

    def complete(self) -> Array | None:
        """Which examples have `min_length`; None where that is known of all of them."""
        known = self.symbols
        if all(map(_checks.is_concrete, known.values.values())):
            return None
        promised = {k: n for k, n in known.least.items() if n > known.ranges[k].low}
        if not promised:
            return None

        def complete() -> Array:
            enough = [known.values[name] >= least for name, least in promised.items()]
            return jnp.all(jnp.stack(enough), axis=0)

        return self._once(("complete",), complete)

    def of_complete(self, x: Array) -> Array:
        """`x`, `[batch, ...]`, with that of a complete example for those that are not.

        Where nothing is left of an example, a mean is 0 / 0. That result is filled at
        the end; before, its derivative times 0 would be NaN for what all share.
        """
        complete = self.complete()
        return x if complete is None else of_present(complete, x)

    def of_seen(self, value: Value, shapes: Sequence[tuple[Any, ...]]) -> Value:
        """`value`, on its way into results of `shapes`; see `fill.of_present`.

        What an example has of its own is not seen where all of them are empty.
        """
        if not isinstance(value, Padded) or ragged_axes(value):
            return value
        seen = self._seen(shapes)
        x = value.x if seen is None else of_present(seen, value.x)
        return dataclasses.replace(value, x=x)

    def _seen(self, shapes: Sequence[tuple[Any, ...]]) -> Array | None:
        """Which examples have an element in one of `shapes`; None where all have."""
        seen: Any = False
        for shape in shapes:
            there: Any = True
            for axis in sizes.symbolic_axes(shape):
                there &= self._once(
                    ("seen", str(shape[axis])), lambda d=shape[axis]: self._has_any(d)
                )
            seen |= there
            if seen is True:
                return None
        return seen if shapes else None

    def _has_any(self, dim: Any) -> Array | bool:
        """Which examples have a size `dim` of at least 1, True where all have."""
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

    # ---------------------------------------------------------------------- segments

    def segments(self, dim: Any) -> Segments:
        """Which example and position each row has, for flat arrays of that size."""
        return self._once(("segments", str(dim)), lambda: self._segments(dim))

    def _segments(self, dim: Any) -> Segments:
        return Segments.of(self.lengths(dim), self.capacity(dim), self.tail(dim))

    def tail(self, dim: Any) -> Tail:
        """Which rows of flat arrays of that size are none: cheaper than `segments`."""
        key = ("tail", str(dim))
        return self._once(key, lambda: Tail.of(self.lengths(dim), self.capacity(dim)))

    def padded_rows(self, dim: Any) -> Array:
        """For each example and position the flat row, int32 `[batch, max]`.

        In the padding it is the example's last row, for an empty example some other
        example's: use it with a mask wherever that could be seen.
        """

        def rows() -> Array:
            segments = self.segments(dim)
            last = jnp.maximum(self.lengths(dim) - 1, 0)
            position = positions(self.max(dim))
            position = jnp.minimum(position[None], last[:, None])
            return jnp.minimum(segments.offsets[:, None] + position, segments.last)

        return self._once(("padded rows", str(dim)), rows)

    def _places(self, dim: Any) -> tuple[Places, Places]:
        """What flat rows come to each padded one, and the other way round."""

        def places() -> tuple[Places, Places]:
            longest, segments = self.max(dim), self.segments(dim)
            slots = segments.ids * longest + jnp.minimum(segments.position, longest - 1)
            return (
                Places(
                    self.padded_rows(dim).reshape(-1), self._inside(dim).reshape(-1)
                ),
                Places(slots, segments.valid),
            )

        return self._once(("places", str(dim)), places)

    def _inside(self, dim: Any) -> Array:
        """Where padded examples are no padding, bool `[batch, max]`."""

        def inside() -> Array:
            return positions(self.max(dim))[None] < self.lengths(dim)[:, None]

        return self._once(("inside", str(dim)), inside)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # ------------------------------------------------------------------- conversions

    def to_flat(self, value: Value) -> Flat:
        """`value`, which has one symbolic axis, as concatenated rows.

        Raises:
            Refuse: it has no symbolic axis, or several.
        """
        if isinstance(value, Flat):
            return value
        axes = ragged_axes(value)
        if len(axes) != 1:
            raise Refuse(
                f"a value of shape {shape_text(value.shape)} cannot lie in "
                "concatenated rows: that takes exactly one axis of different sizes"
            )
        (axis,) = axes
        dim = value.shape[axis]
        if isinstance(value, Shared):
            x = repeated(value.x, self.segments(dim).position, axis)
            return Flat(x, value.shape, axis)
        padded, flat = self._places(dim)
        x = jnp.moveaxis(value.x, axis + 1, 1)
        x = move(lax.collapse(x, 0, 2), flat, padded)
        return Flat(jnp.moveaxis(x, 0, axis), value.shape, axis)

    def to_padded(self, value: Value) -> Padded:
        """`value` with the batch axis in front and padding that repeats valid rows."""
        if isinstance(value, Padded):
            return value
        if isinstance(value, Shared):
            x = jnp.broadcast_to(value.x, (self.batch, *value.x.shape))
            return Padded(x, value.shape, filled=not ragged_axes(value))
        padded, flat = self._places(value.dim)
        x = move(value.x, padded, flat, value.axis)
        each = (self.batch, self.max(value.dim))
        split = (*x.shape[: value.axis], *each, *x.shape[value.axis + 1 :])
        x = jnp.moveaxis(x.reshape(split), value.axis, 0)
        return Padded(x, value.shape, filled=True)

    def canonical(self, value: Value) -> Padded | Flat:
        """`Flat` for one symbolic axis, `Padded` for none or several.

        The layout then follows from the shape alone, which is what the states of a
        loop and the branches of a condition need.
        """
        if len(ragged_axes(value)) == 1:
            return self.to_flat(value)
        return self.to_padded(value)

    def to_rows(self, value: Value, dim: Any) -> Array:
        """A value without symbolic axes, once for each flat row: `[capacity, ...]`."""
        if isinstance(value, Shared):
            return jnp.broadcast_to(value.x, (self.capacity(dim), *value.x.shape))
        x = or_harmless(self.tail(dim).any_row, self.to_padded(value).x)
        ids = self.segments(dim).ids
        return repeated(x, ids, indices_are_sorted=True)

    def per_row(self, dim: Any, rows_of: Any) -> Any:
        """The value of the size `dim`, maybe negative, for each row of `rows_of`."""
        if not sizes.is_symbolic(dim):
            return int(dim)  # JAX holds some as numpy's, which have a dtype
        values = sizes.evaluate(dim, self.symbols.values)
        return values[self.segments(rows_of).ids]

    def take_rows(self, x: Flat, dim: Any, source: Callable[[Segments], Array]) -> Flat:
        """Other rows of the same examples.

        Args:
            x: where they are taken from.
            dim: the new size.
            source: gives, from the segments of the result, for each of its rows the
                position within the example in `x`.
        """
        segments = self.segments(dim)
        rows = self.segments(x.dim).offsets[segments.ids] + source(segments)
        shape = (*x.shape[: x.axis], dim, *x.shape[x.axis + 1 :])
        return Flat(jnp.take(x.x, rows, x.axis, mode="clip"), shape, x.axis)

    def fill_tail(self, x: Array, dim: Any, axis: int) -> Array:
        """`x` with the last valid row in place of the tail rows, without its gradient.

        Where all examples are empty, and no row is valid, the tail becomes 0.5, or 0
        for other types than floats.
        """
        tail = self.tail(dim)
        row = lax.dynamic_slice_in_dim(x, tail.last, 1, axis)
        row = constant(or_harmless(tail.any_row, row))
        return jnp.where(along(tail.valid, axis, x.ndim), x, row)

    def mask(self, x: Array, axis: int, dim: Any) -> Array:
        """Where padded examples are no padding along `axis` of one example.

        Args:
            x: the array of a `Padded` value.
            axis: of one example's value.
            dim: its size.

        Returns:
            bool, in a shape that broadcasts to `x`.
        """
        inside = self._inside(dim)
        shape = [1] * x.ndim
        shape[0], shape[axis + 1] = inside.shape
        return inside.reshape(shape)

    # --------------------------------------------------------------- padded functions

    def batched(
        self,
        function: Callable[..., Sequence[Array]],
        values: Sequence[Value],
        shapes: Sequence[tuple[Any, ...]],
        *,
        sized: bool = True,
    ) -> list[Value]:
        """Map a function of one padded example over the batch with `jax.vmap`.

        Args:
            function: `function(sizes, *arrays) -> list of arrays`. Symbolic axes of
                the arrays have their largest size; `sizes(dim)` is the example's own,
                and `sizes.mask(x, axis, dim)` tells what is no padding.
            values: whose arrays `function` gets.
            shapes: of the results of one example.
            sized: whether `function` looks at `sizes`. If not, and all `values` are
                `Shared`, so are the results.

        Returns:
            One `Padded` value per shape, or `Shared`.
        """
        values = [self.to_padded(v) if isinstance(v, Flat) else v for v in values]
        values = [self.of_seen(v, shapes) for v in values]
        arrays = [self._without_gradient_of_padding(v) for v in values]
        if not sized and all(isinstance(v, Shared) for v in values):
            results = function(Sizes({}), *arrays)
            return [Shared(x, s) for x, s in zip(results, shapes, strict=True)]
        axes = [0 if isinstance(v, Padded) else None for v in values]
        results = jax.vmap(
            lambda values, *arrays: list(function(Sizes(values), *arrays)),
            in_axes=(0, *axes),
            axis_size=self.batch,
        )(self.symbols.values, *arrays)
        return [Padded(x, s) for x, s in zip(results, shapes, strict=True)]

    def _without_gradient_of_padding(self, value: Value) -> Array:
        """The array of `value`; what comes back for padding, maybe NaN, is dropped.

        Both sides of the `where` are the same, so that nothing is left of it but its
        derivative.
        """
        x, axes = value.x, ragged_axes(value)
        if not axes or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        inside: Any = True
        for axis in axes:
            dim = value.shape[axis]
            if isinstance(value, Shared):
                longest = positions(x.shape[axis]) < jnp.max(self.lengths(dim))
                inside &= along(longest, axis, x.ndim)
            else:
                inside &= self.mask(x, axis, dim)
        return jnp.where(inside, x, constant(x))

    def unsized(
        self,
        function: Callable[..., Array],
        values: Sequence[Value],
        shape: tuple[Any, ...],
    ) -> Value:
        """`batched` for `function(*arrays) -> array`, which does not look at sizes."""
        (result,) = self.batched(
            lambda _, *arrays: [function(*arrays)], values, [shape], sized=False
        )
        return result
