"""The rules of random numbers: those that an example draws by itself."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._compat import draws_from_first
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes, shape_text
from ..types.segments import along, positions


def _each(
    ctx: Context,
    draw: Callable[..., Array],
    values: Sequence[Value],
    shape: tuple[Any, ...],
    from_first: bool,
) -> Value:
    """Map a function of the keys of one padded example over the batch.

    The examples take turns if JAX would draw for all of them `from_first`.
    """
    if not from_first or all(isinstance(v, Shared) for v in values):
        return ctx.unsized(draw, values, shape)
    arrays = [ctx.to_padded(v).x for v in values]
    return Padded(lax.map(lambda arrays: draw(*arrays), arrays), shape)


def _check_prefix_stable(keys: Value, shape: tuple[Any, ...], split: bool) -> None:
    """Raise Unsupported where the first numbers depend on how many are drawn."""
    if not any(map(is_symbolic, shape)):
        return
    if split and not _is_prefix(shape):
        raise Unsupported(
            f"keys of shape {shape_text(shape)} would depend on the padding: only the "
            "leading axis may have different sizes; make them transposed"
        )
    kind = str(jax.random.key_impl(keys.x))
    if (split or "threefry" in kind) and not _is_partitionable():
        raise Unsupported(
            "with jax_threefry_partitionable off, random numbers depend on how many "
            "are drawn; turn it on"
        )


def _is_partitionable() -> bool:
    return getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009


@register("random_bits")
def _bits(
    ctx: Context, eqn: JaxprEqn, keys: Value, *, shape: tuple[Any, ...], **params: Any
) -> Value:
    (full,) = ctx.out_shapes(eqn)

    def bind(keys: Array, *shape: Any) -> Array:
        return eqn.primitive.bind(keys, shape=ctx.at_max(shape), **params)

    from_first = draws_from_first(keys.x)
    if from_first and keys.shape:
        keys = ctx.unsized(lambda keys: keys[(0,) * keys.ndim], [keys], ())
        shape = full
    if isinstance(keys, Flat) and not any(map(is_symbolic, shape)):
        return Flat(bind(keys.x, *shape), full, keys.axis)
    _check_prefix_stable(keys, shape, split=False)
    if _is_prefix(shape):
        return _each(ctx, lambda keys: bind(keys, *shape), [keys], full, from_first)
    most = ctx.at_max(shape)
    count = math.prod(most)
    vectors = (*keys.shape, count)
    bits = _each(ctx, lambda keys: bind(keys, count), [keys], vectors, from_first)

    def in_order(own: Sizes, bits: Array) -> list[Array]:
        """Put the elements of a vector in the order of the example's shape."""
        index = jnp.zeros((), jnp.int32)
        for axis, dim in enumerate(shape):
            index = index * own(dim) + along(positions(most[axis]), axis, len(shape))
        return [jnp.take(bits, index, axis=-1, mode="clip")]

    (result,) = ctx.batched(in_order, [bits], [full])
    return result


def _is_prefix(shape: tuple[Any, ...]) -> bool:
    """Return whether an example's elements come first in the padded array."""
    first = next((i for i, dim in enumerate(shape) if dim != 1), 0)
    return not any(map(is_symbolic, shape[first + 1 :]))


@register("random_split")
def _split(
    ctx: Context, eqn: JaxprEqn, keys: Value, *, shape: tuple[Any, ...]
) -> Value:
    (full,) = ctx.out_shapes(eqn)
    from_first = draws_from_first(keys.x, new_keys=True)
    own = full if from_first else shape  # what is made of one key
    if isinstance(keys, Flat) and not any(map(is_symbolic, own)):
        return Flat(eqn.primitive.bind(keys.x, shape=shape), full, keys.axis)
    _check_prefix_stable(keys, own, split=True)

    def split(keys: Array) -> Array:
        return eqn.primitive.bind(keys, shape=ctx.at_max(shape))

    return _each(ctx, split, [keys], full, from_first)


@register("random_gamma")
def _gamma(ctx: Context, eqn: JaxprEqn, keys: Value, a: Value, **params: Any) -> Value:
    (full,) = ctx.out_shapes(eqn)
    _check_prefix_stable(keys, full, split=True)  # a key for each number
    draw = ft.partial(eqn.primitive.bind, **params)
    return _each(ctx, draw, [keys, a], full, draws_from_first(keys.x, new_keys=True))


@register("random_wrap", "random_unwrap", "random_seed", "random_clone")
def _wrap(ctx: Context, eqn: JaxprEqn, x: Value, **params: Any) -> Value:
    (full,) = ctx.out_shapes(eqn)
    if isinstance(x, Flat):
        return Flat(eqn.primitive.bind(x.x, **params), full, x.axis)
    return ctx.unsized(lambda x: eqn.primitive.bind(x, **params), [x], full)


@register("random_fold_in")
def _fold_in(ctx: Context, eqn: JaxprEqn, keys: Value, data: Value) -> Value:
    (full,) = ctx.out_shapes(eqn)
    ragged = ragged_axes(keys), ragged_axes(data), symbolic_axes(full)
    from_first = draws_from_first(keys.x, new_keys=True)
    if not from_first and [len(axes) for axes in ragged] == [1, 1, 1]:
        keys, data = ctx.to_flat(keys), ctx.to_flat(data)
        return Flat(eqn.primitive.bind(keys.x, data.x), full, keys.axis)
    return _each(ctx, eqn.primitive.bind, [keys, data], full, from_first)


@register("rng_bit_generator")
def _generator(
    ctx: Context, eqn: JaxprEqn, key: Value, *, shape: tuple[Any, ...], **params: Any
) -> list[Value]:
    """Draw for one example after the other, as for the keys that are made of it."""
    shapes = ctx.out_shapes(eqn)
    if any(map(is_symbolic, shape)):
        raise Unsupported("its shape must not depend on the example; use jax.random")

    def draw(key: Array) -> list[Array]:
        return eqn.primitive.bind(key, shape=shape, **params)

    if isinstance(key, Shared):
        return list(map(Shared, draw(key.x), shapes))
    return list(map(Padded, lax.map(draw, ctx.to_padded(key).x), shapes))
