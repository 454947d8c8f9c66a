"""The rules of random numbers: those that an example draws by itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Flat, Shared, Value, ragged_axes, shape_text
from ..types.segments import along, positions


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
    if not split and "rbg" in kind and not isinstance(keys, Shared):
        raise Unsupported(
            f"keys of the kind {kind!r} draw for all examples from the first one's "
            "key; use threefry keys, or one key that all examples share"
        )


def _is_partitionable() -> bool:
    return getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009


@register("random_bits")
def _bits(
    ctx: Context, eqn: JaxprEqn, keys: Value, *, shape: tuple[Any, ...], **params: Any
) -> Value:
    (full,) = ctx.out_shapes(eqn)
    if isinstance(keys, Flat) and not any(map(is_symbolic, shape)):
        bits = eqn.primitive.bind(keys.x, shape=shape, **params)
        return Flat(bits, full, keys.axis)
    _check_prefix_stable(keys, shape, split=False)
    if _is_prefix(shape):
        most = ctx.at_max(shape)
        return ctx.unsized(
            lambda keys: eqn.primitive.bind(keys, shape=most, **params), [keys], full
        )

    def draw(own: Sizes, keys: Array) -> list[Array]:
        """Draw a vector, and put its elements in the order of the example's shape."""
        most = ctx.at_max(shape)
        bits = eqn.primitive.bind(keys, shape=(math.prod(most),), **params)
        index = jnp.zeros((), jnp.int32)
        for axis, dim in enumerate(shape):
            index = index * own(dim) + along(positions(most[axis]), axis, len(shape))
        return [jnp.take(bits, index, axis=-1, mode="clip")]

    (result,) = ctx.batched(draw, [keys], [full])
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
    if isinstance(keys, Flat) and not any(map(is_symbolic, shape)):
        return Flat(eqn.primitive.bind(keys.x, shape=shape), full, keys.axis)
    _check_prefix_stable(keys, shape, split=True)

    def split(keys: Array) -> Array:
        return eqn.primitive.bind(keys, shape=ctx.at_max(shape))

    return ctx.unsized(split, [keys], full)


@register("random_gamma")
def _gamma(ctx: Context, eqn: JaxprEqn, keys: Value, a: Value, **params: Any) -> Value:
    (full,) = ctx.out_shapes(eqn)
    _check_prefix_stable(keys, full, split=True)  # a key for each number
    return ctx.unsized(lambda *xs: eqn.primitive.bind(*xs, **params), [keys, a], full)


@register("random_wrap", "random_unwrap", "random_seed")
def _wrap(ctx: Context, eqn: JaxprEqn, x: Value, **params: Any) -> Value:
    (full,) = ctx.out_shapes(eqn)
    if isinstance(x, Flat):
        return Flat(eqn.primitive.bind(x.x, **params), full, x.axis)
    return ctx.unsized(lambda x: eqn.primitive.bind(x, **params), [x], full)


@register("random_fold_in")
def _fold_in(ctx: Context, eqn: JaxprEqn, keys: Value, data: Value) -> Value:
    (full,) = ctx.out_shapes(eqn)
    if (
        len(ragged_axes(keys))
        == len(ragged_axes(data))
        == len(symbolic_axes(full))
        == 1
    ):
        keys, data = ctx.to_flat(keys), ctx.to_flat(data)
        return Flat(eqn.primitive.bind(keys.x, data.x), full, keys.axis)
    return ctx.unsized(eqn.primitive.bind, [keys, data], full)
