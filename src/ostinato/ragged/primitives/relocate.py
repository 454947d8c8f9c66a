"""`relocate`: elements go to other places, each valid element to one place.

The derivative of a gather is a scatter that adds up, since an element may have gone to
several places. Here each valid element goes to one place, so that the derivative is a
gather again, which is quicker to run and to compile.
"""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._typing import Array
from ..types.checks import check_padded
from ..types.segments import along, positions
from .constant import constant


class Sources(NamedTuple):
    """The element that comes to each place of a result.

    Attributes:
        element: int32 `[places]`, an element of the operand.
        valid: bool `[places]`, False where the element only fills the place.
    """

    element: Array
    valid: Array


@ft.partial(jax.jit, static_argnums=3, inline=True)
def relocate(x: Array, sources: Sources, inverse: Sources, axis: int = 0) -> Array:
    """Return the elements `sources.element` of `x` along `axis`.

    Elements that only fill a place are constants.

    Args:
        x: the operand.
        sources: the element for each place; each is valid in one place at most.
        inverse: for each element of `x` the place where it is valid, if there is one.
        axis: of `x` and of the result.
    """
    taken = jnp.take(x, sources.element, axis, mode="clip")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return taken
    moved = relocate_p.bind(x, *sources, *inverse, axis=axis)
    return jnp.where(along(sources.valid, axis, x.ndim), moved, constant(taken))


def _zero_elsewhere(
    x: Array, index: Array, valid: Array, *_: Array, axis: int
) -> Array:
    taken = jnp.take(x, index, axis, mode="clip")
    return jnp.where(along(valid, axis, x.ndim), taken, jnp.zeros((), x.dtype))


def _abstract_eval(x: Any, element: Any, *_: Any, axis: int) -> Any:
    return x.update(shape=(*x.shape[:axis], *element.shape, *x.shape[axis + 1 :]))


def _jvp(tangent: Array, _: Array, *maps: Array, axis: int) -> Array:
    return relocate_p.bind(tangent, *maps, axis=axis)


def _transpose(cotangent: Any, x: Any, *maps: Array, axis: int) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval), *[None] * 4]
    sources, inverse = maps[:2], maps[2:]
    return [relocate_p.bind(cotangent, *inverse, *sources, axis=axis), *[None] * 4]


def _batch(arrays: Any, axes: Any, *, axis: int) -> tuple[Array, int]:
    if all(at is None for at in axes[1:]):
        x = jnp.moveaxis(arrays[0], axes[0], 0)
        return relocate_p.bind(x, *arrays[1:], axis=axis + 1), 0
    # The maps differ: the elements of all operands are put one after another.
    mapped = zip(arrays, axes, strict=True)
    size = next(a.shape[at] for a, at in mapped if at is not None)
    x, *maps = (
        jnp.broadcast_to(a, (size, *a.shape)) if at is None else jnp.moveaxis(a, at, 0)
        for a, at in zip(arrays, axes, strict=True)
    )
    x = jnp.moveaxis(x, axis + 1, 1)
    sources, inverse = Sources(*maps[:2]), Sources(*maps[2:])
    elements, places = x.shape[1], sources.element.shape[1]
    merged = *_merged(sources, elements), *_merged(inverse, places)
    y = relocate_p.bind(lax.collapse(x, 0, 2), *merged, axis=0)
    return jnp.moveaxis(y.reshape(size, places, *x.shape[2:]), 1, axis + 1), 0


def _merged(sources: Sources, elements: int) -> Sources:
    """Merge `[batch, places]` into one map, for operands put one after another."""
    check_padded(sources.element.shape[0], elements)
    first = elements * positions(sources.element.shape[0])[:, None]
    element = jnp.clip(sources.element, 0, max(elements - 1, 0)) + first
    return Sources(element.reshape(-1), sources.valid.reshape(-1))


relocate_p = Primitive("ragged_relocate")
relocate_p.def_impl(_zero_elsewhere)
relocate_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(
    relocate_p, mlir.lower_fun(_zero_elsewhere, multiple_results=False)
)
ad.defjvp(relocate_p, _jvp, None, None, None, None)
ad.primitive_transposes[relocate_p] = _transpose
batching.primitive_batchers[relocate_p] = _batch
