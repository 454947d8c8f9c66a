"""Errors of `RaggedArray` name the argument."""

import jax.numpy as jnp
import numpy as np
import pytest

from ostinato import ragged
from ostinato.ragged import RaggedArray

WIDTH = 2


ROWS = np.zeros((9, WIDTH))


ERRORS = {
    "too many tokens": (
        lambda: RaggedArray(ROWS, [4, 6]),
        ValueError,
        "`lengths` must sum to at most the 9 rows of the capacity, got 10",
    ),
    "too long": (
        lambda: RaggedArray(ROWS, [1, 5], max_length=4),
        ValueError,
        r"0\.\.max_length = 0\.\.4, got 5 in example 1",
    ),
    "beyond int32": (
        lambda: RaggedArray(ROWS, np.array([2**32 + 3, 1]), max_length=5),
        ValueError,
        r"`lengths` must lie in 0\.\.max_length = 0\.\.5, got 2147483647 in example 0",
    ),
    "beyond int32, unsigned": (
        lambda: RaggedArray(ROWS, np.array([2**32 - 1, 1], np.uint32), max_length=5),
        ValueError,
        r"0\.\.max_length = 0\.\.5, got 2147483647 in example 0",
    ),
    "beyond int32, of JAX": (
        lambda: RaggedArray(ROWS, jnp.array([2**32 + 3, 1]), max_length=5),
        ValueError,
        r"0\.\.max_length = 0\.\.5, got 2147483647 in example 0",
    ),
    "beyond int32, padded": (
        lambda: RaggedArray.from_padded(ROWS[None], np.array([2**32 + 3])),
        ValueError,
        r"0\.\.max_length = 0\.\.9, got 2147483647 in example 0",
    ),
    "negative": (lambda: RaggedArray(ROWS, [1, -2]), ValueError, "got -2 in example 1"),
    "lengths of floats": (
        lambda: RaggedArray(ROWS, [1.0]),
        TypeError,
        "`lengths` must hold integers",
    ),
    "rank of lengths": (
        lambda: RaggedArray(ROWS, [[1]]),
        ValueError,
        r"`lengths` must have shape \[batch\]",
    ),
    "no array": (lambda: RaggedArray("abc", [1]), TypeError, "`data` must be an array"),
    "no axis": (
        lambda: RaggedArray(ROWS, [1], axis=2),
        ValueError,
        "`axis` must be one of 2 axes, got 2",
    ),
    "axis of another type": (
        lambda: RaggedArray(ROWS, [1], axis=True),
        TypeError,
        "`axis` must be an integer",
    ),
    "no name": (lambda: RaggedArray(ROWS, [1], dim=""), TypeError, "`dim` must be"),
    "max_length 0": (
        lambda: RaggedArray(ROWS, [0], max_length=0),
        ValueError,
        "`max_length` must be at least 1",
    ),
    "other widths": (
        lambda: RaggedArray.from_list([ROWS, ROWS[:, :1]]),
        ValueError,
        r"`arrays\[1\]` must have the shape of `arrays\[0\]`",
    ),
    "other dtypes": (
        lambda: RaggedArray.from_list([ROWS, ROWS.astype(int)]),
        TypeError,
        r"`arrays\[1\]` must have the dtype",
    ),
    "lists": (
        lambda: RaggedArray.from_list([[1, 2], [3]]),
        TypeError,
        r"`arrays\[0\]` must be an array, got list \[1, 2\]; jnp.array makes one",
    ),
    "capacity below the tokens": (
        lambda: RaggedArray.from_list([ROWS], capacity=8),
        ValueError,
        "`capacity` must hold all 9 rows, got 8",
    ),
    "longer than the padding": (
        lambda: RaggedArray.from_padded(ROWS[None], [10]),
        ValueError,
        "got 10 in example 0",
    ),
    "lengths of another batch": (
        lambda: RaggedArray.from_padded(ROWS[None], [1, 2]),
        ValueError,
        r"`lengths` must have shape \(batch\) = \(1,\)",
    ),
    "splits that begin later": (
        lambda: RaggedArray.from_row_splits(ROWS, [1, 2]),
        ValueError,
        "`row_splits` must begin with 0, got 1",
    ),
    "no splits": (
        lambda: RaggedArray.from_row_splits(ROWS, []),
        ValueError,
        "`row_splits` must have",
    ),
    "splits that descend": (
        lambda: RaggedArray.from_row_splits(ROWS, [0, 3, 2]),
        ValueError,
        "got -1 in example 1",
    ),
    "ids that descend": (
        lambda: RaggedArray.from_segment_ids(ROWS[:3], [0, 2, 1]),
        ValueError,
        "`segment_ids` must be 0 or more and ascend",
    ),
    "rows of another number": (
        lambda: RaggedArray(ROWS, [1]).with_data(ROWS[:8]),
        ValueError,
        r"`data` must have 9 rows on axis 0, got shape \[8, 2\]",
    ),
    "octave": (
        lambda: ragged.round_capacity(3, per_octave=3),
        ValueError,
        "`per_octave` must be a power of two",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
