"""Checks of the sizes of one call against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..types.array import RaggedArray
from ..types.checks import host, require
from .sizes import evaluate, holds


def check_dim(x: Any, arrays: list[RaggedArray], min_length: int) -> Any:
    """Return `x`; check the lengths of all arrays of one dim name.

    They must be equal, in range, and fit the capacity. `x` is as in `require`.
    """
    first = arrays[0]
    name, lengths = first.dim, host(first.lengths)
    max_length = min(a.max_length for a in arrays)
    capacity = min(a.capacity for a in arrays)
    for other in arrays[1:]:
        if other.lengths is not first.lengths:
            message = (
                f"arrays of the ragged dim {name!r} must have equal lengths; give one "
                "of them another `dim`"
            )
            x = require(x, {message: lengths == host(other.lengths)})
    in_range = f"the lengths of {name!r} must lie in 0..max_length = 0..{max_length}"
    enough = (
        f"the lengths of {name!r} must be at least `min_length` = {min_length}; for "
        "shorter examples give ragged.vmap a smaller one, by a dict for this dim alone"
    )
    fit = f"the lengths of {name!r} must sum to at most the capacity, {capacity} tokens"
    return require(
        x,
        {
            in_range: (lengths >= 0) & (lengths <= max_length),
            enough: lengths >= min_length,
            fit: lengths.sum() <= capacity,
        },
    )


def check_derived(x: Any, name: str, lengths: Any, base: Mapping[str, Any]) -> Any:
    """Return `x`; check that sizes named `n + 1` and the like are what the name says.

    Args:
        x: as in `require`.
        name: the name.
        lengths: the sizes.
        base: those that they are named after.
    """
    want = evaluate(name, {n: host(value) for n, value in base.items()})
    message = (
        f"the lengths of {name!r} must be what its name says of those of "
        f"{', '.join(map(repr, base))}; give one of the arrays another `dim`"
    )
    return require(x, {message: host(lengths) == want})


def check_constraint(x: Any, constraint: str, lengths: Mapping[str, Any]) -> Any:
    """Return `x`; check that all examples satisfy one of the `constraints`.

    Args:
        x: as in `require`.
        constraint: the one of `ragged.vmap`.
        lengths: those of all dims.
    """
    found = holds(constraint, {name: host(value) for name, value in lengths.items()})
    return require(
        x, {f"the constraint {constraint!r} must hold for every example": found}
    )
