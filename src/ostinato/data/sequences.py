"""Checks of the lengths and of the sequences from which batches are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import _checks


def check_lengths(lengths: Any) -> np.ndarray:
    """Return lengths as int64 `[N]`; check that there are some, none negative."""
    if isinstance(lengths, (list, tuple)):
        for found in filter(_is_sequence, lengths):
            raise TypeError(
                "`lengths` must be the lengths of the sequences, integers, got a "
                f"{type(lengths).__name__} of sequences, such as "
                f"{_checks.describe(found)}; give [len(s) for s in sequences]"
            )
    values = np.asarray(_checks.check_integers("lengths", lengths))
    _checks.check_rank("lengths", values, "N")
    if not values.size:
        raise ValueError("`lengths` must hold at least one length, got none")
    if values.min() < 0:
        at = int(values.argmin())
        raise ValueError(f"`lengths[{at}]` must be at least 0, got {values[at]}")
    most = np.iinfo(np.int64).max
    if values.max() > most:
        at = int(values.argmax())
        raise ValueError(f"`lengths[{at}]` must be at most {most}, got {values[at]}")
    return values.astype(np.int64)


def _is_sequence(x: Any) -> bool:
    """Return whether `x` is a sequence, and not a length."""
    return isinstance(x, (list, tuple, str)) or getattr(x, "ndim", 0) > 0


def check_list(name: str, sequences: Any) -> list[Any]:
    """Return the sequences as a list; check that there is at least one."""
    if not isinstance(sequences, Iterable) or isinstance(sequences, (str, Mapping)):
        raise TypeError(
            f"`{name}` must be a list of arrays [n, ...], got "
            f"{_checks.describe(sequences)}"
        )
    given = list(sequences)
    if not given:
        raise ValueError(f"`{name}` must hold at least one array, got none")
    return given


def check_sequences(name: str, given: list[Any], part: str = "") -> list[np.ndarray]:
    """Return sequences `[n, ...]` as arrays of equal dtype and shape of a step.

    Args:
        name: the name of the argument in errors.
        given: array-likes that differ in their first size alone. An empty list takes
            dtype and shape from the others.
        part: the path in every sequence, such as `['x']`, in errors.
    """
    names = [f"{name}[{i}]{part}" for i in range(len(given))]
    arrays = [_sequence(n, x, name) for n, x in zip(names, given, strict=True)]
    # numpy calls an empty list float64.
    empty = [not hasattr(x, "dtype") and not len(x) for x in given]
    at = empty.index(False) if False in empty else 0
    first = arrays[at]
    nothing = np.zeros((0, *first.shape[1:]), first.dtype)
    arrays = [nothing if e else x for e, x in zip(empty, arrays, strict=True)]
    for own, array in zip(names, arrays, strict=True):
        if array.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"`{own}` must have the shape [n, ...] of `{names[at]}`, "
                f"{list(first.shape)}, up to the first size, got {list(array.shape)}"
            )
        _checks.check_same_dtype(**{names[at]: first, own: array})
    return arrays


def on_host(name: str, array: Any) -> np.ndarray:
    """Return an array of NumPy; raise a TypeError for a tensor that is none."""
    try:
        return np.asarray(array)
    except (RuntimeError, TypeError) as error:
        if not _checks.is_tensor(array):
            raise
        raise TypeError(
            f"`{name}` must be an array, got a tensor that NumPy cannot hold: {error}"
        ) from error


def _sequence(name: str, sequence: Any, among: str) -> np.ndarray:
    """Return one sequence as an array; check that it has steps."""
    _checks.check_unmasked(name, sequence)
    try:
        array = on_host(name, sequence)
    except ValueError:
        raise TypeError(
            f"`{name}` must be an array [n, ...], got {_checks.describe(sequence)}, "
            "whose parts differ in shape"
        ) from None
    if isinstance(sequence, tuple) and any(getattr(x, "ndim", 0) for x in sequence):
        raise TypeError(
            f"`{name}` must be an array [n, ...], got a tuple of {len(sequence)} "
            "arrays; give those of inputs and those of targets one after the other, or "
            "np.stack steps"
        )
    if array.ndim == 0:
        raise TypeError(
            f"`{name}` must be an array [n, ...], got {_checks.describe(sequence)}; "
            f"np.array({among}) makes one sequence of a list of numbers"
        )
    return array
