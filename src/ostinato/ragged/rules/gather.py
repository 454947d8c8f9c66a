"""The rules of reading by index: gather and dynamic_slice.

An index counts from the first token of an example, and is out of range past its last
one; the mode of the gather holds for each example by itself. An empty example has no
token to read; it reads some finite number, and since it is shorter than `min_length`,
`ragged.vmap` fills its results.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.fill import fill_value
from ..core.registry import register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..core.windows import as_int32, starts_in_range
from ..primitives.constant import constant
from ..types.segments import along, positions


@dataclasses.dataclass(frozen=True)
class _Gather:
    """A gather from one example.

    Attributes:
        primitive: the primitive to bind.
        dims: its dimension numbers.
        sizes: its slice sizes, maybe symbolic.
        shape: the shape of its result.
        params: its other parameters.
    """

    primitive: Primitive
    dims: Any
    sizes: tuple[Any, ...]
    shape: tuple[Any, ...]
    params: dict[str, Any]

    def __call__(self, x: Array, indices: Array, sizes: tuple[int, ...]) -> Array:
        params = self.params | {"indices_are_sorted": False, "unique_indices": False}
        return self.primitive.bind(
            x, indices, dimension_numbers=self.dims, slice_sizes=sizes, **params
        )

    @property
    def fills(self) -> bool:
        """Whether an index out of range reads a fill value, not the nearest element."""
        return self.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

    def out_of_range(self, y: Array, inside: Array) -> Array:
        """Return `y`, changed as the mode says where the index is out of range.

        Args:
            y: a result; where the index is out of range it is that of the nearest one.
            inside: bool, in the shape of the indices without their last axis.
        """
        if self.params["mode"] == lax.GatherScatterMode.CLIP:
            return y
        shape = [1] * len(self.shape)
        for axis, size in zip(self.batch_axes, inside.shape, strict=True):
            shape[axis] = size
        inside = inside.reshape(shape)
        if not self.fills:  # as in JAX, without gradient
            return jnp.where(inside, y, constant(y))
        given = self.params.get("fill_value")
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            return jnp.where(inside, y, _key_of(y, given))
        fill = fill_value(y.dtype) if given is None else given
        return jnp.where(inside, y, jnp.asarray(fill, y.dtype))

    def is_whole(self, axis: int, dim: Any) -> bool:
        """Return whether each slice has all of the operand's axis."""
        return self.sizes[axis] == dim and axis not in self.dims.start_index_map

    @property
    def batch_axes(self) -> list[int]:
        """The axes of the result that come from those of the indices."""
        return [a for a in range(len(self.shape)) if a not in self.dims.offset_dims]


def _key_of(keys: Array, word: Any) -> Array:
    """Return a key of the kind of `keys` that has the same number in all words."""
    like = jax.eval_shape(jax.random.key_data, keys)
    words = jnp.full(like.shape[keys.ndim :], word, like.dtype)
    return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(keys)))


@register("gather")
def _gather(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    indices: Value,
    *,
    dimension_numbers: Any,
    slice_sizes: tuple[Any, ...],
    **params: Any,
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    gather = _Gather(eqn.primitive, dimension_numbers, slice_sizes, shape, params)
    if len(symbolic_axes(shape)) <= 1 and len(ragged_axes(x)) <= 1:
        for way in (_from_table, _within_tokens, _own_token, _window_at, _by_token):
            result = way(ctx, gather, x, indices)
            if result is not None:
                return result
    return _from_each(ctx, gather, x, indices)


def _from_table(
    ctx: Context, gather: _Gather, x: Value, indices: Value
) -> Value | None:
    """Read tokens of indices from a dense array that all share: an embedding."""
    if ragged_axes(x) or not isinstance(x, Shared) or not isinstance(indices, Flat):
        return None
    (axis,) = symbolic_axes(gather.shape)
    return Flat(gather(x.x, indices.x, gather.sizes), gather.shape, axis)


def _within_tokens(
    ctx: Context, gather: _Gather, x: Value, indices: Value
) -> Value | None:
    """Read the same part of every token, as `x[:, 0]` does."""
    if not isinstance(x, Flat) or not gather.is_whole(x.axis, x.dim):
        return None
    if not isinstance(indices, Shared) or ragged_axes(indices):
        return None
    (axis,) = symbolic_axes(gather.shape)
    sizes = ctx.flat_shape(gather.sizes, x.axis)
    return Flat(gather(x.x, indices.x, sizes), gather.shape, axis)


def _own_token(ctx: Context, gather: _Gather, x: Value, indices: Value) -> Value | None:
    """Read from each token by its own index, as `take_along_axis(x, i, 1)` does."""
    if not isinstance(x, Flat) or x.axis not in gather.dims.operand_batching_dims:
        return None
    if len(ragged_axes(indices)) != 1:
        return None
    (axis,) = symbolic_axes(gather.shape)
    tokens = ctx.to_flat(indices)
    return Flat(gather(x.x, tokens.x, gather.sizes), gather.shape, axis)


def _window_at(ctx: Context, gather: _Gather, x: Value, indices: Value) -> Value | None:
    """Read consecutive tokens, as `x[1:]` does."""
    dims = gather.dims
    if not isinstance(x, Flat) or dims.start_index_map != (x.axis,):
        return None
    if dims.collapsed_slice_dims or len(indices.shape) != 1:
        return None
    if any(gather.sizes[a] != d for a, d in enumerate(x.shape) if a != x.axis):
        return None
    if gather.fills:
        return None
    start = as_int32(ctx.to_padded(indices).x[:, 0])
    return read_window(ctx, x, start, gather.shape)


def _by_token(ctx: Context, gather: _Gather, x: Value, indices: Value) -> Value | None:
    """Read single tokens from the flat array, as `x[i]` and `x[i, j]` do."""
    dims = gather.dims
    if not isinstance(x, Flat) or x.axis not in dims.start_index_map:
        return None
    if gather.sizes[x.axis] != 1 or dims.operand_batching_dims:
        return None
    if any(map(is_symbolic, gather.sizes)):  # a window of another axis
        return None
    which = dims.start_index_map.index(x.axis)
    if not ragged_axes(indices):
        indices = ctx.to_padded(indices)
        ids, at = positions(ctx.batch), 0
    else:
        indices = ctx.to_flat(indices)
        ids, at = ctx.segments(indices.dim).ids, indices.axis
    lengths, first = ctx.lengths(x.dim), ctx.segments(x.dim).offsets
    most = x.x.shape[x.axis] - 1
    index, inside = _token_index(indices.x, ids, at, lengths, first, which, most)

    def read(index: Array, inside: Array) -> Array:
        return gather.out_of_range(gather(x.x, index, gather.sizes), inside)

    if isinstance(indices, Padded):
        return Padded(jax.vmap(read)(index, inside), gather.shape)
    (axis,) = symbolic_axes(gather.shape)
    return Flat(read(index, inside), gather.shape, axis)


@ft.partial(jax.jit, static_argnums=(2, 5, 6), inline=True)
def _token_index(
    index: Array,
    ids: Array,
    at: int,
    lengths: Array,
    first: Array,
    which: int,
    most: int,
) -> tuple[Array, Array]:
    """Return indices of the flat array, and where they were in range.

    Args:
        index: indices of one example's array, `[..., k]`.
        ids: the example of each index.
        at: the axis of `index` along which examples lie.
        lengths: `[batch]`, the sizes of the axis of the tokens.
        first: `[batch]`, the first token of each example.
        which: the component that is a position in an example.
        most: the largest token.
    """
    index = as_int32(index)
    example = along(ids, at, index.ndim - 1)
    lengths = jnp.take(lengths, example)
    token, inside = starts_in_range(index[..., which], lengths, 1)
    token = jnp.minimum(jnp.take(first, example) + token, most)
    return with_column(index, which, token), inside


def with_column(indices: Array, which: int, column: Array) -> Array:
    """Return `indices`, `[..., k]`, with another component `which`."""
    parts = [indices[..., :which], column[..., None], indices[..., which + 1 :]]
    return jnp.concatenate(parts, axis=-1)


def _from_each(ctx: Context, gather: _Gather, x: Value, indices: Value) -> Value:
    """Read from each padded example by itself."""
    sizes = ctx.at_max(gather.sizes)
    touched = [
        (which, axis)
        for which, axis in enumerate(gather.dims.start_index_map)
        if _has_own_range(x, axis, gather.sizes[axis])
    ]

    def read(own: Sizes, a: Array, index: Array) -> list[Array]:
        if not touched:
            return [gather(a, index, sizes)]
        index = as_int32(index)
        inside: Any = True
        for which, axis in touched:
            start, fits = starts_in_range(
                index[..., which], own(x.shape[axis]), own(gather.sizes[axis])
            )
            inside &= fits
            index = with_column(index, which, start)
            if is_symbolic(gather.sizes[axis]):
                a = _longer(a, axis, sizes[axis])
        return [gather.out_of_range(gather(a, index, sizes), inside)]

    sized = bool(touched)
    (y,) = ctx.batched(read, [x, indices], [gather.shape], sized=sized)
    return y


def _longer(x: Array, axis: int, tokens: int) -> Array:
    """Return `x` with its last element repeated, so that no slice in range is moved."""
    widths = [(0, tokens if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge") if x.shape[axis] else x


# ----------------------------------------------------------------------- dynamic_slice


@register("dynamic_slice")
def _dynamic_slice(
    ctx: Context,
    eqn: JaxprEqn,
    x: Value,
    *starts: Value,
    slice_sizes: tuple[Any, ...],
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    cut = [a for a, dim in enumerate(x.shape) if slice_sizes[a] != dim]
    if isinstance(x, Flat) and cut == [x.axis]:
        start = as_int32(ctx.to_padded(starts[x.axis]).x)
        return read_window(ctx, x, start, shape)
    fixed = not any(is_symbolic(slice_sizes[a]) for a in cut)
    if isinstance(x, Flat) and x.axis not in cut and fixed and _all_shared(starts):
        zero = jnp.int32(0)
        at = [zero if a == x.axis else _start(s.x) for a, s in enumerate(starts)]
        sizes = ctx.flat_shape(slice_sizes, x.axis)
        return Flat(lax.dynamic_slice(x.x, at, sizes), shape, x.axis)
    sizes = ctx.at_max(slice_sizes)
    own_range = [a for a in range(len(shape)) if _has_own_range(x, a, slice_sizes[a])]

    def read(own: Sizes, a: Array, *starts: Array) -> list[Array]:
        at = [_start(start) for start in starts]
        for axis in own_range:
            at[axis], _ = starts_in_range(
                at[axis], own(x.shape[axis]), own(slice_sizes[axis])
            )
            if axis in cut and is_symbolic(slice_sizes[axis]):
                a = _longer(a, axis, sizes[axis])
        return [lax.dynamic_slice(a, at, sizes)]

    (y,) = ctx.batched(read, [x, *starts], [shape], sized=bool(own_range))
    return y


def _start(start: Array) -> Array:
    """Return a start as int32, at least 0: JAX counts others from the end once more."""
    return jnp.maximum(as_int32(start), 0)


def _has_own_range(x: Value, axis: int, size: Any) -> bool:
    """Return whether the last start of a slice along `axis` differs between examples.

    It does in a table of fixed size, too, if the size of the slice depends on the
    example.
    """
    return is_symbolic(x.shape[axis]) or is_symbolic(size)


def _all_shared(values: Sequence[Value]) -> bool:
    return all(isinstance(v, Shared) for v in values)


def read_window(ctx: Context, x: Flat, start: Array, shape: tuple[Any, ...]) -> Value:
    """Return consecutive tokens of each example, moved into its range.

    Args:
        ctx: the context of the batch.
        x: the value to read along its ragged axis.
        start: int32 `[batch]`, the first position.
        shape: the shape of the result, with the number of tokens at `x.axis`.
    """
    dim = shape[x.axis]
    start, _ = starts_in_range(start, ctx.lengths(x.dim), ctx.lengths(dim))
    first = ctx.segments(x.dim).offsets + start
    if is_symbolic(dim):
        segments = ctx.segments(dim)
        tokens = first[segments.ids] + segments.position
        return Flat(jnp.take(x.x, tokens, x.axis, mode="clip"), shape, x.axis)
    tokens = first[:, None] + positions(dim)[None]
    y = jnp.take(x.x, tokens, x.axis, mode="clip")
    return Padded(jnp.moveaxis(y, x.axis, 0), shape)
