"""Random choices of cells: whether there are any to draw, and all of them drawn."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax

from .. import _checks
from .._recurrent.protocol import Cell
from .._typing import Array
from .stack import Bidirectional
from .wrappers import Dropout, Zoneout

AnyCell = TypeVar("AnyCell", bound=Cell)


def sample(cell: AnyCell, key: Array, batch: int) -> AnyCell:
    """Return a cell with new random choices of every wrapper in it, for training.

    `Dropout.sample` and `Zoneout.sample` draw those of one wrapper and leave cells
    inside of it as they are; this draws all: of wrappers in wrappers, in `Stack`, in
    `Bidirectional` and in `Attention`. Choices that are drawn already are kept.

    Args:
        cell: a cell; one without random choices is returned as it is.
        key: a PRNG key, a new one for every batch.
        batch: the number of sequences.

    Returns:
        The cell, for `recurrent_net` and its `initial_state`; parameters stay the same.

    Raises:
        TypeError: `cell` is no cell, or `key` is no PRNG key.
        ValueError: `batch` is negative.

    Holds under every JAX transformation; draw inside of the function that is
    transformed or compiled.
    """
    if not isinstance(cell, Cell):
        raise TypeError(
            f"`cell` must be a cell of ostinato.cells, got {_checks.describe(cell)}"
        )
    return _drawn(cell, _checks.check_key(key), _checks.check_batch(batch))


def is_random(cell: Any) -> bool:
    """Return whether a cell has wrappers whose random choices are yet to be drawn."""
    if isinstance(cell, tuple):
        return any(map(is_random, cell))
    if isinstance(cell, Dropout) and cell.masks is None:
        if cell.inputs or cell.states or cell.outputs:
            return True
    if isinstance(cell, Zoneout) and cell.key is None and (cell.h_rate or cell.c_rate):
        return True
    return any(map(is_random, _inner(cell).values()))


def _drawn(cell: Any, key: Array, batch: Any) -> Any:
    if not is_random(cell):
        return cell
    if isinstance(cell, tuple):
        keys = jax.random.split(key, len(cell))
        return tuple(_drawn(c, k, batch) for c, k in zip(cell, keys, strict=True))
    inner = _inner(cell)
    own, *keys = jax.random.split(key, len(inner) + 1)
    drawn = {
        name: _drawn(part, k, batch)
        for k, (name, part) in zip(keys, inner.items(), strict=True)
    }
    cell = dataclasses.replace(cell, **drawn)
    if isinstance(cell, Dropout) and cell.masks is None:
        return cell.sample(own, batch)
    if isinstance(cell, Zoneout) and cell.key is None:
        return cell.sample(own)
    return cell


def _inner(cell: Any) -> dict[str, Any]:
    """Return the fields of a cell that are cells, or tuples of cells."""
    if isinstance(cell, Bidirectional):
        return cell.both._asdict()  # None stands for a second cell like the first
    fields = dataclasses.fields(cell) if dataclasses.is_dataclass(cell) else ()
    values = {field.name: getattr(cell, field.name) for field in fields}
    return {name: value for name, value in values.items() if _is_cell(value)}


def _is_cell(value: Any) -> bool:
    if type(value) is tuple:
        return all(isinstance(part, Cell) for part in value)
    return isinstance(value, Cell)
