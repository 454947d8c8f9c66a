"""The rules of reductions and running reductions."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..._rnn.accumulation import accumulation_dtype
from ..._step.maxima import at_stored, once
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.fill import highest, lowest
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Flat, Padded, Shared, Value, filled_as, is_filled
from ..schedule.token_scan import scan_tokens
from ..types.segments import Segments, along, positions, sum_per_example


def _all_bits(dtype: Any) -> Any:
    return True if dtype == jnp.bool_ else np.invert(np.zeros((), dtype))


class _Reduction(NamedTuple):
    """The identity of a reduction, and a function that reduces flat tokens.

    The function is `(x, segments, batch)` of `x`, `[tokens, other, ...]`, and reduces
    the other axis, too. None if there is no function that has a derivative.
    `of_inside(x, inside, axes)` reduces padded floats without the identity; None if
    that is in nobody's way.
    """

    identity: Callable[[Any], Any]
    over_tokens: Callable[[Array, Segments, int], Array] | None = None
    of_inside: Callable[[Array, Array, tuple[int, ...]], Array] | None = None


def _sum_tokens(x: Array, segments: Segments, batch: int) -> Array:
    sums = jnp.sum(x, 1, dtype=accumulation_dtype(x.dtype))
    return sum_per_example(sums, segments, batch).astype(x.dtype)


def _any_token(x: Array, segments: Segments, batch: int) -> Array:
    return _largest(jnp.any(x, 1).astype(jnp.int8), segments.drop_ids, batch) > 0


def _all_tokens(x: Array, segments: Segments, batch: int) -> Array:
    return ~_any_token(~x, segments, batch)


def _min_tokens(x: Array, segments: Segments, batch: int) -> Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return -_max_tokens(-x, segments, batch)
    least = lax.reduce_min(x, [1])
    return jax.ops.segment_min(least, segments.drop_ids, batch, indices_are_sorted=True)


@ft.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _max_tokens(x: Array, segments: Segments, batch: int) -> Array:
    return _largest(lax.reduce_max(x, [1]), segments.drop_ids, batch)


@_max_tokens.defjvp
def _max_tokens_jvp(batch: int, primals: Any, tangents: Any) -> Any:
    """Return the derivative: all largest elements have an equal share, as in JAX."""
    x, segments = once(primals[0]), primals[1]
    y = _max_tokens(x, segments, batch)
    largest = x == y[segments.ids][:, None]
    count = _sum_tokens(largest.astype(x.dtype), segments, batch)
    count = jnp.where((count == 0) & ~jnp.isnan(y), 1, count)  # no token
    return y, _sum_tokens(
        largest.astype(x.dtype) * tangents[0], segments, batch
    ) / count


@ft.partial(jax.jit, static_argnums=2, inline=True)
def _largest(x: Array, ids: Array, batch: int) -> Array:
    return jax.ops.segment_max(x, ids, batch, indices_are_sorted=True)


@ft.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _extreme(x: Array, inside: Array, axes: tuple[int, ...], largest: bool) -> Array:
    """Return the largest or least of the elements inside, infinite if there is none.

    Only those inside have a share of the derivative, even if all are infinite.
    """
    if largest:
        return lax.reduce_max(jnp.where(inside, x, -jnp.inf), axes)
    return lax.reduce_min(jnp.where(inside, x, jnp.inf), axes)


@_extreme.defjvp
def _extreme_jvp(
    axes: tuple[int, ...], largest: bool, primals: Any, tangents: Any
) -> Any:
    x, inside = once(primals[0]), primals[1]
    y = _extreme(x, inside, axes, largest)
    of_y = jnp.expand_dims(y, axes)
    equal = inside & ((x == of_y) | jnp.isnan(of_y))
    count = jnp.maximum(jnp.sum(equal, axes, dtype=x.dtype), 1)
    count = jnp.where(jnp.isnan(y), jnp.nan, count)  # as in JAX
    return y, jnp.sum(jnp.where(equal, tangents[0], 0), axes) / count


_REDUCTIONS = {
    "reduce_sum": _Reduction(lambda _: 0, _sum_tokens),
    "reduce_max": _Reduction(lowest, _max_tokens, ft.partial(_extreme, largest=True)),
    "reduce_min": _Reduction(highest, _min_tokens, ft.partial(_extreme, largest=False)),
    "reduce_or": _Reduction(lambda _: 0, _any_token),
    "reduce_and": _Reduction(_all_bits, _all_tokens),
    "reduce_prod": _Reduction(lambda _: 1),  # a segmented product has no derivative
    "reduce_xor": _Reduction(lambda _: 0),
}


@register(*_REDUCTIONS, cheap=True)
def _reduce(
    ctx: Context, eqn: JaxprEqn, x: Value, *, axes: tuple[int, ...], **params: Any
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    reduction = _REDUCTIONS[eqn.primitive.name]
    is_float = jnp.issubdtype(x.x.dtype, jnp.floating)
    of_inside = reduction.of_inside if is_float else None  # of extremes

    def bind(x: Array, axes: tuple[int, ...]) -> Array:
        if not axes:
            return x
        run = ft.partial(eqn.primitive.bind, axes=axes, **params)
        return run(x) if of_inside is None else at_stored(run, x)

    if isinstance(x, Flat):
        axis = x.axis - sum(a < x.axis for a in axes)
        if x.axis not in axes:
            return Flat(bind(x.x, axes), shape, axis)
        bitwise = eqn.primitive.name in ("reduce_or", "reduce_and")
        if reduction.over_tokens and not (bitwise and x.x.dtype != jnp.bool_):
            others = [a for a in axes if a != x.axis]
            tokens = jnp.moveaxis(x.x, (x.axis, *others), range(len(axes)))
            width = math.prod(tokens.shape[1 : len(axes)])
            tokens = tokens.reshape(tokens.shape[0], width, *tokens.shape[len(axes) :])
            segments = ctx.segments(x.dim)
            return Padded(reduction.over_tokens(tokens, segments, ctx.batch), shape)
    return masked(ctx, bind, x, axes, shape, reduction.identity, of_inside)


def masked(
    ctx: Context,
    bind: Callable[[Array, tuple[int, ...]], Array],
    x: Value,
    axes: tuple[int, ...],
    shape: tuple[Any, ...],
    identity: Callable[[Any], Any],
    of_inside: Callable[[Array, Array, tuple[int, ...]], Array] | None = None,
) -> Value:
    """Return `bind(x, axes)` of each padded example, with the identity as padding.

    `of_inside(x, inside, axes)` takes its place, where padding has no identity.
    """
    ragged = [a for a in axes if is_symbolic(x.shape[a])]
    # A mask leaves the identity in the padding of its own axis, if that stays, and -inf
    # - -inf after it would be NaN. If values depend on positions, it may leave it in
    # the padding of other axes, too.
    staying = ragged if len(shape) == len(x.shape) else []
    uncovered = staying if is_filled(x) or not ragged else symbolic_axes(shape)

    def reduce(sizes: Sizes, a: Array) -> list[Array]:
        inside: Any = True
        for axis in ragged:
            size = reduced_size(sizes, x.shape[axis], shape)
            inside &= along(positions(a.shape[axis]) < size, axis, a.ndim)
        if ragged and of_inside is not None:
            result = of_inside(a, jnp.broadcast_to(inside, a.shape), axes)
        else:
            fill = jnp.asarray(identity(a.dtype), a.dtype)
            result = bind(jnp.where(inside, a, fill) if ragged else a, axes)
        for axis in uncovered:
            result = sizes.repeat_last(result, axis, shape[axis])
        return [result]

    (result,) = ctx.batched(reduce, [x], [shape], sized=bool(ragged))
    return filled_as(result, x)


def reduced_size(sizes: Sizes, dim: Any, shape: tuple[Any, ...]) -> Array:
    """Return the size of a reduced axis, at least 1 where the result is empty.

    An empty result is all padding; a reduction of no elements would put its value,
    which may be 0 / 0, into that padding.
    """
    size = sizes(dim)
    for axis in symbolic_axes(shape):
        size = jnp.where(sizes(shape[axis]) <= 0, jnp.maximum(size, 1), size)
    return size


@register("argmax", "argmin", cheap=True)
def _arg(
    ctx: Context, eqn: JaxprEqn, x: Value, *, axes: tuple[int, ...], index_dtype: Any
) -> Value:
    (shape,) = ctx.out_shapes(eqn)

    def bind(x: Array, axes: tuple[int, ...]) -> Array:
        return eqn.primitive.bind(x, axes=axes, index_dtype=index_dtype)

    if isinstance(x, Flat) and x.axis not in axes:
        axis = x.axis - sum(a < x.axis for a in axes)
        return Flat(bind(x.x, axes), shape, axis)
    identity = lowest if eqn.primitive.name == "argmax" else highest
    return masked(ctx, bind, x, axes, shape, identity)


# ------------------------------------------------------------------ running reductions

_RUNNING = {
    "cumsum": (jnp.add, lambda _: 0),
    "cumprod": (jnp.multiply, lambda _: 1),
    "cummax": (jnp.maximum, lowest),
    "cummin": (jnp.minimum, highest),
    "cumlogsumexp": (jnp.logaddexp, lowest),
}


@register(*_RUNNING, cheap=True)
def _cumulative(
    ctx: Context, eqn: JaxprEqn, x: Value, *, axis: int, reverse: bool
) -> Value:
    (shape,) = ctx.out_shapes(eqn)
    combine, identity = _RUNNING[eqn.primitive.name]

    def bind(x: Array, axes: tuple[int, ...]) -> Array:
        return eqn.primitive.bind(x, axis=axes[0], reverse=reverse)

    if isinstance(x, Flat) and axis == x.axis:
        return _running(ctx, x, combine, reverse)
    if isinstance(x, Flat):
        return Flat(bind(x.x, (axis,)), shape, x.axis)
    name = eqn.primitive.name
    if not reverse and name != "cumprod":
        # Padding comes last. A product might grow there until it is infinite.
        return ctx.unsized(lambda a: bind(a, (axis,)), [x], shape)
    if reverse and name in ("cummax", "cummin"):
        # Padding would come first, and tie with elements that are infinite.
        def from_own_end(sizes: Sizes, a: Array) -> list[Array]:
            a = sizes.backwards(a, axis, x.shape[axis])
            y = eqn.primitive.bind(a, axis=axis, reverse=False)
            return [sizes.backwards(y, axis, x.shape[axis])]

        (result,) = ctx.batched(from_own_end, [x], [shape])
        return filled_as(result, x)
    return masked(ctx, bind, x, (axis,), shape, identity)


def _running(
    ctx: Context,
    x: Flat,
    combine: Callable[[Array, Array], Array],
    reverse: bool,
) -> Flat:
    """Scan over all tokens at once, starting again at the first one of each example."""
    lengths, segments = ctx.lengths(x.dim), ctx.segments(x.dim)
    tokens = _scan_tokens(x.x, lengths, segments, combine, x.axis, reverse)
    return Flat(tokens, x.shape, x.axis)


@ft.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _scan_tokens(
    x: Array,
    lengths: Array,
    segments: Segments,
    combine: Callable[[Array, Array], Array],
    axis: int,
    reverse: bool,
) -> Array:
    start = lengths[segments.ids] - 1 if reverse else 0
    starts = (segments.position == start) | ~segments.valid
    tokens = jnp.moveaxis(x, axis, 0)
    starts = along(starts, 0, tokens.ndim)
    one = jnp.ones((), tokens.dtype)

    def join(a: tuple, b: tuple) -> tuple:
        (starts_a, tokens_a), (starts_b, tokens_b) = a, b
        # Replaced before they are combined: other examples get no gradient.
        both = (jnp.where(starts_b, one, tokens) for tokens in (tokens_a, tokens_b))
        return starts_a | starts_b, jnp.where(starts_b, tokens_b, combine(*both))

    _, tokens = scan_tokens(join, (starts, tokens), reverse)
    return jnp.moveaxis(tokens, 0, axis)


@register("reduce")
def _general_reduce(
    ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any
) -> list[Value]:
    """Reduce arrays with a function of the program; padding has its initial values.

    XLA, too, lets these take part any number of times. The second half of `values` are
    the initial ones.
    """
    count = len(values) // 2
    if not all(isinstance(start, Shared) for start in values[count:]):
        raise Unsupported("its initial values must be the same for all examples")
    params = eqn.primitive.get_bind_params(params)

    def reduce(own: Sizes, *arrays: Array) -> list[Array]:
        starts = arrays[count:]
        xs = [
            own.cleared(a, x.shape, start)
            for a, x, start in zip(arrays, values, starts, strict=False)
        ]
        return eqn.primitive.bind(*xs, *starts, **params)

    return ctx.batched(reduce, values, ctx.out_shapes(eqn))
