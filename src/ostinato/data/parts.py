"""The class `Parts`: what the sequences of a batch consist of, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .. import _checks
from .sequences import check_list, check_sequences, on_host


class Parts:
    """The sequences of one batch: one array each, or a tuple or dict of parts.

    A part is an array `[n, ...]` or a number; all arrays of a sequence have the same n.

    Args:
        name: the name of the argument in errors.
        sequences: at least one sequence, all with the same parts.

    Attributes:
        lengths: the number of steps of every sequence.

    Raises:
        TypeError: a sequence is neither an array nor such a tuple or dict, or the
            dtypes of a part differ.
        ValueError: the parts differ, arrays of one sequence in their lengths, or a part
            in more than its first size.
    """

    lengths: list[int]

    def __init__(self, name: str, sequences: Any) -> None:
        given = check_list(name, sequences)
        flat = [tree_flatten_with_path(x, is_leaf=_is_part) for x in given]
        (leaves, self._structure), *_ = flat
        for i, (_, structure) in enumerate(flat):
            if structure != self._structure:
                raise ValueError(
                    f"`{name}[{i}]` must have the parts of `{name}[0]`, "
                    f"{self._structure}, got {structure}"
                )
        self._arrays: dict[int, list[np.ndarray]] = {}
        self._numbers: dict[int, np.ndarray] = {}
        first = ""
        for k, (path, _) in enumerate(leaves):
            part, column = keystr(path), [leaves[k][1] for leaves, _ in flat]
            if path and all(map(_is_number, column)):
                self._numbers[k] = _stack(name, column, part)
                continue
            arrays = self._arrays[k] = check_sequences(name, column, part)
            if len(self._arrays) == 1:
                self.lengths, first = [len(array) for array in arrays], part
            for i, (array, length) in enumerate(zip(arrays, self.lengths, strict=True)):
                if len(array) != length:
                    raise ValueError(
                        f"`{name}[{i}]{part}` must have as many steps as "
                        f"`{name}[{i}]{first}`, {length}, got {len(array)}; collate "
                        "what has lengths of its own in a call of its own"
                    )
        if not self._arrays:
            raise ValueError(f"`{name}[0]` must hold an array [n, ...], got none")

    def batch(
        self, count: int, join: Callable[[list[np.ndarray]], np.ndarray]
    ) -> tuple[Any, np.ndarray]:
        """Make the batch: all sequences in the structure of one, and their lengths.

        Args:
            count: the number of sequences that the batch has space for; numbers and
                lengths of those that are missing are 0.
            join: makes one array of the arrays of a part.
        """
        joined = {k: join(arrays) for k, arrays in self._arrays.items()}
        joined |= {k: _fill(numbers, count) for k, numbers in self._numbers.items()}
        batch = jax.tree.unflatten(self._structure, [joined[k] for k in sorted(joined)])
        return batch, _fill(np.array(self.lengths, np.int32), count)


def _is_part(x: Any) -> bool:
    """Return whether `x` is a part, and no tuple or dict of parts.

    A tuple without any array is a sequence of steps.
    """
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return all(_is_part(y) and not getattr(y, "ndim", 0) for y in x)
    return not isinstance(x, (tuple, Mapping))


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex)) or getattr(x, "ndim", None) == 0


def _stack(name: str, numbers: list[Any], part: str) -> np.ndarray:
    """Return one number of every sequence as an array."""
    names = [f"{name}[{i}]{part}" for i in range(len(numbers))]
    arrays = [on_host(n, x) for n, x in zip(names, numbers, strict=True)]
    for own, array in zip(names, arrays, strict=True):
        _checks.check_same_dtype(**{names[0]: arrays[0], own: array})
    return np.stack(arrays)


def _fill(values: np.ndarray, count: int) -> np.ndarray:
    """Return `values` and zeros, `[count]`."""
    filled = np.zeros(count, values.dtype)
    filled[: len(values)] = values
    return filled
