"""Checks of the sizes of one call against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..types.array import RaggedArray
from ..types.checks import host, require
from .sizes import evaluate, holds


def check_dim(arrays: list[RaggedArray], min_length: int) -> None:
    """Check the lengths of all arrays of one dim name.

    They must be in range, equal, and fit the capacity.
    """
    first = arrays[0]
    name, lengths = first.dim, host(first.lengths)
    max_length = min(a.max_length for a in arrays)
    capacity = min(a.capacity for a in arrays)
    for other in arrays[1:]:
        if other.lengths is not first.lengths:
            require(
                lengths == host(other.lengths),
                f"arrays of the ragged dim {name!r} must have equal lengths; give one "
                "of them another `dim`",
            )
    require(
        (lengths >= 0) & (lengths <= max_length),
        f"the lengths of {name!r} must lie in 0..max_length = 0..{max_length}",
    )
    require(
        lengths >= min_length,
        f"the lengths of {name!r} must be at least `min_length` = {min_length}; for "
        "shorter examples give ragged.vmap a smaller `min_length`",
    )
    require(
        lengths.sum() <= capacity,
        f"the lengths of {name!r} must sum to at most the capacity, {capacity} rows",
    )


def check_derived(name: str, lengths: Any, base: Mapping[str, Any]) -> None:
    """Check that sizes named after others, such as `n + 1`, are what the name says."""
    want = evaluate(name, {n: host(value) for n, value in base.items()})
    require(
        host(lengths) == want,
        f"the lengths of {name!r} must be what its name says of those of "
        f"{', '.join(map(repr, base))}; give one of the arrays another `dim`",
    )


def check_constraint(constraint: str, lengths: Mapping[str, Any]) -> None:
    """Check that all examples satisfy one of the `constraints` of `ragged.vmap`."""
    require(
        holds(constraint, {name: host(value) for name, value in lengths.items()}),
        f"the constraint {constraint!r} must hold for every example",
    )
