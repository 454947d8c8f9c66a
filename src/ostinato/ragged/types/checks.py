"""Checks of lengths: at once where they are concrete, under checkify where not."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from ... import _checks
from ..._typing import Array


def check_axis(axis: Any, ndim: int) -> int:
    """Return `axis` of an array of `ndim` axes, not negative."""
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"`axis` must be an integer, got {_checks.describe(axis)}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"`axis` must be one of {ndim} axes, got {axis}")
    return int(axis) % ndim


def check_lengths(lengths: Any, name: str = "lengths") -> Array:
    """Return lengths as int32 `[batch]`."""
    lengths = _checks.check_integers(name, lengths)
    _checks.check_rank(name, lengths, "batch")
    return _checks.as_int32(lengths)


def check_fit(lengths: Any, capacity: int, max_length: int) -> None:
    """Raise ValueError where lengths do not fit; check traced ones at run time."""
    if not _checks.is_concrete(lengths):
        check_traced(
            (lengths >= 0) & (lengths <= max_length),
            f"`lengths` must lie in 0..max_length = 0..{max_length}",
        )
        check_traced(
            lengths.sum() <= capacity,
            f"`lengths` must sum to at most the {capacity} rows of the capacity",
        )
        return
    values = np.asarray(lengths)
    wrong = np.flatnonzero((values < 0) | (values > max_length))
    if wrong.size:
        raise ValueError(
            f"`lengths` must lie in 0..max_length = 0..{max_length}, got "
            f"{values[wrong[0]]} in example {wrong[0]}"
        )
    total = int(values.sum(dtype=np.int64))
    if total > capacity:
        raise ValueError(
            f"`lengths` must sum to at most the {capacity} rows of the capacity, "
            f"got {total}"
        )


def check_traced(condition: Array, message: str) -> None:
    """Check a traced condition at run time, where the caller is under checkify."""
    checkify.debug_check(jnp.all(condition), message)


def check_known(kind: str, lengths: Any) -> np.ndarray:
    """Return concrete lengths as an array of numpy; raise TypeError for traced ones."""
    if not _checks.is_concrete(lengths):
        raise TypeError(
            f"the examples of a {kind} of traced lengths have no sizes yet; under jit "
            "use ragged.vmap, or padded arrays and a mask"
        )
    return np.asarray(lengths)


def check_index(index: Any, batch: int) -> int:
    """Return the index of one of `batch` examples, not negative."""
    try:
        example = operator.index(index)
    except TypeError:
        raise TypeError(
            f"the index of an example must be an integer, got {_checks.describe(index)}"
        ) from None
    if not -batch <= example < batch:
        raise IndexError(f"no example {example} in a batch of {batch}")
    return example % batch


def is_readable(x: Any) -> bool:
    """Return whether the value of `x` is known, and lies in this process."""
    return _checks.is_concrete(x) and getattr(x, "is_fully_addressable", True)


def host(lengths: Any) -> Any:
    """Return lengths as an array of numpy, or as they are where they are traced."""
    return np.asarray(lengths) if is_readable(lengths) else lengths


def require(condition: Any, message: str) -> None:
    """Raise ValueError where a condition is False; check a traced one at run time."""
    if not is_readable(condition):
        check_traced(condition, message)
    elif not np.all(condition):
        where = np.flatnonzero(~np.asarray(condition))
        raise ValueError(
            f"{message}"
            + (f"; not so in example {where[0]}" if np.ndim(condition) else "")
        )
