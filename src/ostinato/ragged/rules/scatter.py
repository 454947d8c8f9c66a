"""The rules of writing by index: the scatter family and dynamic_update_slice.

As for reading, an index counts from the first token of an example. An update out of the
example's range is dropped, or moved into the range if the mode says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic
from ..core.values import Flat, Padded, Shared, Value, ragged_axes, with_array
from ..core.windows import as_int32, starts_in_range
from ..types.segments import along, positions
from .gather import with_column

_MODE = lax.GatherScatterMode
# How each primitive combines an element and its update.
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "scatter": lambda old, new: new,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}


@dataclasses.dataclass(frozen=True)
class _Scatter:
    """A scatter into one example.

    Attributes:
        primitive: the primitive to bind.
        dims: its dimension numbers.
        shape: the shape of its operand and its result.
        params: its other parameters.
    """

    primitive: Primitive
    dims: Any
    shape: tuple[Any, ...]
    params: dict[str, Any]

    def __call__(self, x: Array, indices: Array, updates: Array, **dims: Any) -> Array:
        """Bind with other dimension numbers; updates out of range are dropped."""
        params = self.params | {
            "indices_are_sorted": False,
            "mode": _MODE.FILL_OR_DROP,
            "dimension_numbers": self.dims._replace(**dims),
        }
        return self.primitive.bind(x, indices, updates, **params)

    def combine(self, old: Array, new: Array) -> Array:
        """Return elements after the update of `old` by `new`."""
        jaxpr = self.params["update_jaxpr"]
        if self.primitive.name != "scatter" or jaxpr is None:
            return _COMBINE[self.primitive.name](old, new)
        # `x.at[..].apply(f)` is a scatter with `f` in that jaxpr of scalars.
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, self.params["update_consts"]))
        return jnp.vectorize(lambda *scalars: function(*scalars)[0])(old, new)

    @property
    def clips(self) -> bool:
        """Whether an index out of range is moved into it; else it is dropped."""
        return self.params["mode"] == _MODE.CLIP

    def window_size(self, axis: int, updates: Value) -> Any:
        """Return the size of one update along an axis of the operand."""
        if axis in self.dims.inserted_window_dims:
            return 1
        return updates.shape[self.update_axis(axis)]

    def is_whole(self, axis: int, updates: Value) -> bool:
        """Return whether each update has all of the operand's axis."""
        return self.window_size(axis, updates) == self.shape[axis]

    def update_axis(self, axis: int) -> int:
        """Return the axis of the updates for an axis of the operand."""
        skipped = (
            *self.dims.inserted_window_dims,
            *self.dims.operand_batching_dims,
        )
        window = [a for a in range(len(self.shape)) if a not in skipped]
        return self.dims.update_window_dims[window.index(axis)]


@register(*_COMBINE)
def _scatter(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    indices: Value,
    updates: Value,
    *,
    dimension_numbers: Any,
    **params: Any,
) -> Value:
    scatter = _Scatter(eqn.primitive, dimension_numbers, x.shape, params)
    ragged = len(ragged_axes(x)), len(ragged_axes(indices)), len(ragged_axes(updates))
    batched = dimension_numbers.operand_batching_dims
    if not batched:
        flat = (_within_tokens, _window_at, _at_tokens, _into_dense)
        for way in flat if max(ragged) == 1 else (_window_at,):
            result = way(ctx, scatter, x, indices, updates)
            if result is not None:
                return result
    return _into_each(ctx, scatter, x, indices, updates)


def _within_tokens(
    ctx: Context, scatter: _Scatter, x: Value, indices: Value, updates: Value
) -> Value | None:
    """Write the same part of every token, as `x.at[:, 0].set` does."""
    if not ragged_axes(x) or not isinstance(indices, Shared) or ragged_axes(indices):
        return None
    (axis,) = ragged_axes(x)
    touched = scatter.dims.scatter_dims_to_operand_dims
    if axis in touched or not scatter.is_whole(axis, updates):
        return None
    tokens = ctx.to_flat(x)
    y = scatter.primitive.bind(
        tokens.x,
        indices.x,
        ctx.to_flat(updates).x,
        dimension_numbers=scatter.dims,
        **scatter.params,
    )
    return Flat(y, x.shape, axis)


def _window_at(
    ctx: Context, scatter: _Scatter, x: Value, indices: Value, updates: Value
) -> Value | None:
    """Write one window of tokens, as `x.at[0].set` and `x.at[1:].add` do."""
    touched = scatter.dims.scatter_dims_to_operand_dims
    if len(indices.shape) != 1:
        return None
    sized = any(is_symbolic(x.shape[a]) for a in touched)
    if not sized and _partly_written(scatter, updates) is None:
        return None
    for axis in sorted(scatter.dims.inserted_window_dims):
        updates = _with_axis(updates, axis)
    at = as_int32(ctx.to_padded(indices).x)
    zero = Shared(jnp.zeros((), at.dtype), ())
    starts: list[Value] = [zero for _ in x.shape]
    for which, axis in enumerate(touched):
        starts[axis] = Padded(at[:, which], ())
    return _write(ctx, x, updates, starts, scatter.combine, scatter.clips)


def _partly_written(scatter: _Scatter, updates: Value) -> int | None:
    """Return an axis of which a window has a part whose size depends on the example."""
    for axis in range(len(scatter.shape)):
        if axis not in scatter.dims.operand_batching_dims:
            size = scatter.window_size(axis, updates)
            if is_symbolic(size) and not scatter.is_whole(axis, updates):
                return axis
    return None


def _with_axis(value: Value, axis: int) -> Value:
    """Return `value` with an axis of size 1."""
    shape = (*value.shape[:axis], 1, *value.shape[axis:])
    if isinstance(value, Flat):
        return Flat(
            jnp.expand_dims(value.x, axis), shape, value.axis + (axis <= value.axis)
        )
    first = int(isinstance(value, Padded))
    return type(value)(jnp.expand_dims(value.x, axis + first), shape)


def _at_tokens(
    ctx: Context, scatter: _Scatter, x: Value, indices: Value, updates: Value
) -> Value | None:
    """Write single tokens, as `x.at[i].add` and `x.at[i, j].max` do."""
    touched = scatter.dims.scatter_dims_to_operand_dims
    if not ragged_axes(x) or scatter.clips:
        return None
    (axis,) = ragged_axes(x)
    if axis not in touched or axis not in scatter.dims.inserted_window_dims:
        return None
    which = touched.index(axis)
    tokens = ctx.to_flat(x)
    dims = {}
    if ragged_axes(indices):
        indices, updates = ctx.to_flat(indices), ctx.to_flat(updates)
        segments = ctx.segments(indices.dim)
        example = along(segments.ids, indices.axis, indices.x.ndim - 1)
        real = along(segments.valid, indices.axis, indices.x.ndim - 1)
    elif ragged_axes(updates):
        return None
    else:
        indices, updates = ctx.to_padded(indices), ctx.to_padded(updates)
        example, real = along(jnp.arange(ctx.batch), 0, indices.x.ndim - 1), True
        windows = scatter.dims.update_window_dims
        dims = {"update_window_dims": tuple(a + 1 for a in windows)}
    index = as_int32(indices.x)
    lengths = jnp.take(ctx.lengths(tokens.dim), example)
    token, inside = starts_in_range(index[..., which], lengths, 1)
    first = jnp.take(ctx.segments(tokens.dim).offsets, example)
    token = jnp.where(real & inside, first + token, tokens.x.shape[axis])
    index = with_column(index, which, token)
    return Flat(scatter(tokens.x, index, updates.x, **dims), x.shape, axis)


def _into_dense(
    ctx: Context, scatter: _Scatter, x: Value, indices: Value, updates: Value
) -> Value | None:
    """Write tokens into a dense array, as `jax.ops.segment_sum` does."""
    if ragged_axes(x) or not ragged_axes(indices) or scatter.clips:
        return None
    if not ragged_axes(updates):
        return None
    indices, updates = ctx.to_flat(indices), ctx.to_flat(updates)
    # The example becomes one more component of the index, out of range for the unused
    # capacity, which is dropped.
    ids = ctx.segments(indices.dim).drop_ids
    ids = along(ids, indices.axis, indices.x.ndim)
    ids = jnp.broadcast_to(ids, (*indices.x.shape[:-1], 1))
    index = jnp.concatenate([ids, as_int32(indices.x)], axis=-1)
    y = scatter(
        ctx.to_padded(x).x,
        index,
        updates.x,
        inserted_window_dims=_after_first(scatter.dims.inserted_window_dims),
        scatter_dims_to_operand_dims=_after_first(
            scatter.dims.scatter_dims_to_operand_dims
        ),
    )
    return Padded(y, x.shape)


def _after_first(axes: Sequence[int]) -> tuple[int, ...]:
    return (0, *(a + 1 for a in axes))


def _into_each(
    ctx: Context, scatter: _Scatter, x: Value, indices: Value, updates: Value
) -> Value:
    """Write into each padded example by itself."""
    touched = scatter.dims.scatter_dims_to_operand_dims
    axis = _partly_written(scatter, updates)
    if axis is not None:
        size = scatter.window_size(axis, updates)
        raise Unsupported(
            f"it writes windows of {size} into an axis of {x.shape[axis]} at several "
            "places; the size of such windows must not depend on the example"
        )
    ragged = [a for a, dim in enumerate(indices.shape[:-1]) if is_symbolic(dim)]
    sized = bool(ragged) or any(is_symbolic(x.shape[a]) for a in touched)

    def write(own: Sizes, a: Array, index: Array, new: Array) -> list[Array]:
        index = as_int32(index)
        inside: Any = True
        for which, axis in enumerate(touched):
            start, fits = starts_in_range(
                index[..., which],
                own(x.shape[axis]),
                own(scatter.window_size(axis, updates)),
            )
            index = with_column(index, which, start)
            if not scatter.clips:
                inside &= fits
        for axis in ragged:
            dim = indices.shape[axis]
            inside &= own.mask(index[..., 0], axis, dim)
        inside = jnp.broadcast_to(inside, index.shape[:-1])
        index = jnp.where(inside[..., None], index, jnp.iinfo(jnp.int32).max)
        return [scatter(a, index, new)]

    (y,) = ctx.batched(write, [x, indices, updates], [x.shape], sized=sized)
    return y


# ------------------------------------------------------------------------ one window


@register("dynamic_update_slice")
def _dynamic_update_slice(
    ctx: Context, eqn: JaxprEqn, x: Value, update: Value, *starts: Value
) -> Value:
    at = [with_array(start, as_int32(start.x)) for start in starts]
    return _write(ctx, x, update, at, _COMBINE["scatter"], True)


def _write(
    ctx: Context,
    x: Value,
    updates: Value,
    starts: Sequence[Value],
    combine: Callable[[Array, Array], Array],
    clips: bool,
) -> Value:
    """Write `updates` into one window of each example.

    Args:
        ctx: the context of the batch.
        x: the value to write into.
        updates: the updates, of the same rank.
        starts: the first position of the window along each axis, int32.
        combine: returns the result of old and new elements.
        clips: whether a window out of range is moved into it; else it is dropped.
    """
    if 0 in ctx.at_max(updates.shape):
        return x
    ragged = ragged_axes(x)
    if len(ragged) == 1:
        others = [a for a in range(len(x.shape)) if a not in ragged]
        if all(updates.shape[a] == x.shape[a] for a in others):
            start = ctx.to_padded(starts[ragged[0]]).x
            if not clips:  # a window as large as its axis must begin at 0
                for axis in others:
                    fits = ctx.to_padded(starts[axis]).x == 0
                    start = jnp.where(fits, start, -1)
            return _write_tokens(ctx, x, updates, start, combine, clips)

    def write(own: Sizes, old: Array, new: Array, *starts: Array) -> list[Array]:
        inside: Any = True
        for axis, start in enumerate(starts):
            size = own(updates.shape[axis])
            start, fits = starts_in_range(start, own(x.shape[axis]), size)
            if not clips:
                inside &= fits
            relative = positions(old.shape[axis]) - start
            new = jnp.take(new, relative, axis, mode="clip")
            inside &= along((relative >= 0) & (relative < size), axis, old.ndim)
        return [_combined(combine, inside, old, new)]

    (y,) = ctx.batched(write, [x, updates, *starts], [x.shape])
    return y


def _write_tokens(
    ctx: Context,
    x: Value,
    updates: Value,
    start: Array,
    combine: Callable[[Array, Array], Array],
    clips: bool,
) -> Flat:
    """Write into a window that covers every axis but the ragged one."""
    tokens = ctx.to_flat(x)
    axis = tokens.axis
    segments, dim = ctx.segments(tokens.dim), updates.shape[axis]
    sizes = ctx.lengths(dim)
    start, fits = starts_in_range(start, ctx.lengths(tokens.dim), sizes)
    relative = segments.position - start[segments.ids]
    size = sizes[segments.ids]
    relative, inside = starts_in_range(relative, size, 1)
    if not clips:
        inside &= fits[segments.ids]
    if is_symbolic(dim):
        source = ctx.to_flat(updates)
        token = ctx.segments(dim).offsets[segments.ids] + relative
        new = jnp.take(source.x, token, axis, mode="clip")
    else:
        source = jnp.moveaxis(ctx.to_padded(updates).x, axis + 1, 1)
        token = segments.ids * dim + relative
        new = jnp.take(lax.collapse(source, 0, 2), token, 0, mode="clip")
        new = jnp.moveaxis(new, 0, axis)
    inside = along(inside, axis, new.ndim)
    return Flat(_combined(combine, inside, tokens.x, new), x.shape, axis)


def _combined(
    combine: Callable[[Array, Array], Array], inside: Array, old: Array, new: Array
) -> Array:
    """Return old elements, combined with new ones inside.

    New elements outside are replaced before they are multiplied: the derivative of a
    product that is thrown away would be 0 times inf.
    """
    new = jnp.where(inside, new, jnp.ones((), new.dtype))
    return jnp.where(inside, combine(old, new), old)
