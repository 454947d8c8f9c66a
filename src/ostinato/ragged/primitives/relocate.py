"""Rows that go to other places, each to one, and whose derivative comes straight back.

The derivative of a gather adds up what comes back, in a scatter, as a row may have gone
to several places. Here it is a gather again, which is quicker to run and to compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._typing import Array
from ..types.segments import along, positions
from .constant import constant


class Places(NamedTuple):
    """What comes to each of a number of places.

    Attributes:
        row: int32 `[places]`, a row.
        valid: bool `[places]`, False where that row is only there to fill the place.
    """

    row: Array
    valid: Array


def move(x: Array, to: Places, back: Places, axis: int = 0) -> Array:
    """The rows `to.row` of `x`; those that only fill a place are constants.

    Args:
        x: rows on `axis`.
        to: what comes to each place; each row is valid in one place at most.
        back: for each row of `x` the place where it is valid, if there is one.
        axis: of `x` and of the result.
    """
    rows = jnp.take(x, to.row, axis, mode="clip")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return rows
    moved = move_p.bind(x, *to, *back, axis=axis)
    return jnp.where(along(to.valid, axis, x.ndim), moved, constant(rows))


def _zero_elsewhere(x: Array, row: Array, valid: Array, *_: Array, axis: int) -> Array:
    rows = jnp.take(x, row, axis, mode="clip")
    return jnp.where(along(valid, axis, x.ndim), rows, jnp.zeros((), x.dtype))


def _abstract(x: Any, row: Any, *_: Any, axis: int) -> Any:
    return x.update(shape=(*x.shape[:axis], *row.shape, *x.shape[axis + 1 :]))


def _jvp(tangent: Array, _: Array, *places: Array, axis: int) -> Array:
    return move_p.bind(tangent, *places, axis=axis)


def _transpose(cotangent: Any, x: Any, *places: Array, axis: int) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval), *[None] * 4]
    to, back = places[:2], places[2:]
    return [move_p.bind(cotangent, *back, *to, axis=axis), *[None] * 4]


def _batch(arrays: Any, axes: Any, *, axis: int) -> tuple[Array, int]:
    if all(at is None for at in axes[1:]):
        x = jnp.moveaxis(arrays[0], axes[0], 0)
        return move_p.bind(x, *arrays[1:], axis=axis + 1), 0
    # Places differ: the rows of all lie one after another.
    mapped = zip(arrays, axes, strict=True)
    size = next(a.shape[at] for a, at in mapped if at is not None)
    x, *places = (
        jnp.broadcast_to(a, (size, *a.shape)) if at is None else jnp.moveaxis(a, at, 0)
        for a, at in zip(arrays, axes, strict=True)
    )
    x = jnp.moveaxis(x, axis + 1, 1)
    to, back = Places(*places[:2]), Places(*places[2:])
    rows, count = x.shape[1], to.row.shape[1]
    merged = *_merged(to, rows), *_merged(back, count)
    y = move_p.bind(lax.collapse(x, 0, 2), *merged, axis=0)
    return jnp.moveaxis(y.reshape(size, count, *x.shape[2:]), 1, axis + 1), 0


def _merged(places: Places, rows: int) -> Places:
    """`[batch, places]` as one, of rows that lie one after another."""
    first = rows * positions(places.row.shape[0])[:, None]
    row = jnp.clip(places.row, 0, max(rows - 1, 0)) + first
    return Places(row.reshape(-1), places.valid.reshape(-1))


move_p = Primitive("ragged_move")
move_p.def_impl(_zero_elsewhere)
move_p.def_abstract_eval(_abstract)
mlir.register_lowering(move_p, mlir.lower_fun(_zero_elsewhere, multiple_results=False))
ad.defjvp(move_p, _jvp, None, None, None, None)
ad.primitive_transposes[move_p] = _transpose
batching.primitive_batchers[move_p] = _batch
