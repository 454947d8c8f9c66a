"""`Conversions`: values of a batch from one layout to another."""

from __future__ import annotations

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._typing import Array
from ..primitives.constant import constant
from ..primitives.relocate import Sources, relocate
from ..types.segments import (
    Segments,
    UsedCapacity,
    along,
    positions,
    repeat_per_token,
    safe_fill,
    take_repeated,
)
from .batch_sizes import BatchSizes
from .fill import of_present
from .registry import Unsupported
from .values import Flat, Padded, Shared, Value, ragged_axes, shape_text


@dataclasses.dataclass(frozen=True, eq=False)
class Conversions(BatchSizes):
    """The sizes of a batch, and the conversions of its values between layouts."""

    def to_flat(self, value: Value) -> Flat:
        """Return `value`, which has one symbolic axis, as concatenated tokens.

        Raises:
            Unsupported: it has no symbolic axis, or several.
        """
        if isinstance(value, Flat):
            return value
        axes = ragged_axes(value)
        if len(axes) != 1:
            raise Unsupported(
                f"a value of shape {shape_text(value.shape)} cannot lie in "
                "concatenated tokens: that takes exactly one axis of different sizes"
            )
        (axis,) = axes
        dim = value.shape[axis]
        if isinstance(value, Shared):
            x = take_repeated(value.x, self.segments(dim).position, axis)
            return Flat(x, value.shape, axis)
        to_padded, to_flat = self._sources(dim)
        return Flat(_flat(value.x, to_flat, to_padded, axis), value.shape, axis)

    def to_padded(self, value: Value) -> Padded:
        """Return `value` with a batch axis in front; padding repeats valid tokens."""
        if isinstance(value, Padded):
            return value
        if isinstance(value, Shared):
            x = jnp.broadcast_to(value.x, (self.batch, *value.x.shape))
            return Padded(x, value.shape, filled=not ragged_axes(value))
        to_padded, to_flat = self._sources(value.dim)
        x = _padded(value.x, to_padded, to_flat, value.axis, self.batch)
        there = self.is_positive(value.dim)
        if not isinstance(there, bool) and jnp.issubdtype(x.dtype, jnp.inexact):
            # An empty example got a token of another one, and 0 times inf is NaN.
            x = safe_fill(along(there, 0, x.ndim), x)
        return Padded(x, value.shape, filled=True)

    def canonical(self, value: Value) -> Padded | Flat:
        """Return `value` as `Flat` if it has one symbolic axis, else as `Padded`.

        The layout then follows from the shape alone, as the states of a loop and the
        branches of a condition need it.
        """
        if len(ragged_axes(value)) == 1:
            return self.to_flat(value)
        return self.to_padded(value)

    def per_token(self, value: Value, dim: Any) -> Array:
        """Return a value without symbolic axes once for each token of the size `dim`.

        Returns:
            `[capacity, ...]`.
        """
        if isinstance(value, Shared):
            return jnp.broadcast_to(value.x, (self.capacity(dim), *value.x.shape))
        x = safe_fill(self.used(dim).any_token, self.to_padded(value).x)
        return repeat_per_token(x, self.segments(dim))

    def take_tokens(
        self, x: Flat, dim: Any, source: Callable[[Segments], Array]
    ) -> Flat:
        """Return other tokens of the same examples.

        Args:
            x: the value that they are taken from.
            dim: the new size.
            source: returns, from the segments of the result, for each of its tokens the
                position in the example of `x`.
        """
        segments, offsets = self.segments(dim), self.segments(x.dim).offsets
        tokens = _taken(x.x, offsets, segments.ids, source(segments), x.axis)
        shape = (*x.shape[: x.axis], dim, *x.shape[x.axis + 1 :])
        return Flat(tokens, shape, x.axis)

    def fill_unused(self, x: Array, dim: Any, axis: int) -> Array:
        """Return `x` with the last valid token, a constant, in the unused capacity.

        Where all examples are empty, and no token is valid, it becomes 0.5, or 0 for
        other dtypes than floats.
        """
        return _fill_unused(x, self.used(dim), axis)

    def of_complete(self, x: Array) -> Array:
        """Return `x`, `[batch, ...]`, incomplete examples filled from a complete one.

        Of an example without tokens a mean is 0 / 0. That result is filled at the end;
        before, its derivative times 0 would be NaN for values that all examples share.
        """
        complete = self.complete()
        return x if complete is None else of_present(complete, x)

    def of_nonempty(self, value: Value, shapes: Sequence[tuple[Any, ...]]) -> Value:
        """Return `value` on its way into results of `shapes`; see `fill.of_present`.

        The value of an example is not looked at where all of its results are empty.
        """
        if not isinstance(value, Padded) or ragged_axes(value):
            return value
        nonempty = self._nonempty(shapes)
        x = value.x if nonempty is None else of_present(nonempty, value.x)
        return dataclasses.replace(value, x=x)

    def inside(self, value: Value) -> Array:
        """Return where a padded or shared value with symbolic axes is not padding.

        In a shared value these are the places that any example has.

        Returns:
            bool, in a shape that broadcasts to the array of `value`.
        """
        axes, ndim = ragged_axes(value), value.x.ndim
        dims = [value.shape[axis] for axis in axes]
        if isinstance(value, Padded):
            masks = [self.mask(value.x, *pair) for pair in zip(axes, dims, strict=True)]
        elif len(set(map(str, dims))) > 1:
            return self.cached(
                ("inside any", str(value.shape)),
                lambda: self.inside(Padded(value.x[None], value.shape)).any(0),
            )
        else:
            longest = jnp.max(self.lengths(dims[0]))
            here = positions(self.max(dims[0])) < longest
            masks = [along(here, axis, ndim) for axis in axes]
        return ft.reduce(operator.and_, masks)

    def _without_gradient_of_padding(self, value: Value) -> Array:
        """Return the array of `value`; the cotangent of padding, maybe NaN, is dropped.

        Both sides of the `where` are the same, so that only its derivative differs from
        the identity.
        """
        x = value.x
        if not ragged_axes(value) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(self.inside(value), x, constant(x))


# Compiled as a whole where no trace is around them, and inlined in traces.


@ft.partial(jax.jit, static_argnums=2, inline=True)
def _fill_unused(x: Array, used: UsedCapacity, axis: int) -> Array:
    token = lax.dynamic_slice_in_dim(x, used.last, 1, axis)
    token = constant(safe_fill(used.any_token, token))
    return jnp.where(along(used.valid, axis, x.ndim), x, token)


@ft.partial(jax.jit, static_argnums=4, inline=True)
def _taken(x: Array, offsets: Array, ids: Array, position: Array, axis: int) -> Array:
    return jnp.take(x, offsets[ids] + position, axis, mode="clip")


@ft.partial(jax.jit, static_argnums=3, inline=True)
def _flat(x: Array, to_flat: Sources, to_padded: Sources, axis: int) -> Array:
    x = lax.collapse(jnp.moveaxis(x, axis + 1, 1), 0, 2)
    return jnp.moveaxis(relocate(x, to_flat, to_padded), 0, axis)


@ft.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _padded(
    x: Array, to_padded: Sources, to_flat: Sources, axis: int, batch: int
) -> Array:
    x = relocate(x, to_padded, to_flat, axis)
    each = batch, x.shape[axis] // batch
    x = x.reshape(*x.shape[:axis], *each, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
