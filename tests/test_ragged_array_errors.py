"""Errors of `RaggedArray` name the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ostinato import ragged
from ostinato.ragged import RaggedArray

WIDTH = 2


ROWS = np.zeros((9, WIDTH))


def padded(dtype, fill):
    """Pad two rows of a dtype, one of them empty."""
    return RaggedArray(np.zeros(1, dtype), [1, 0]).to_padded(fill)


def batch_of_keys():
    return RaggedArray(jax.random.split(jax.random.key(0), 2), [2])


ERRORS = {
    "too many tokens": (
        lambda: RaggedArray(ROWS, [4, 6]),
        ValueError,
        "`lengths` must sum to at most the capacity, 9 tokens, got 10",
    ),
    "too long": (
        lambda: RaggedArray(ROWS, [1, 5], max_length=4),
        ValueError,
        r"0\.\.max_length = 0\.\.4, got 5 in example 1",
    ),
    "beyond int32": (
        lambda: RaggedArray(ROWS, np.array([2**32 + 3, 1]), max_length=5),
        ValueError,
        r"`lengths` must lie in 0\.\.max_length = 0\.\.5, got 4294967299 in example 0",
    ),
    "beyond int32, unsigned": (
        lambda: RaggedArray(ROWS, np.array([2**32 - 1, 1], np.uint32), max_length=5),
        ValueError,
        r"0\.\.max_length = 0\.\.5, got 4294967295 in example 0",
    ),
    "beyond int32, of JAX": (
        lambda: RaggedArray(ROWS, jnp.array([2**32 + 3, 1]), max_length=5),
        ValueError,
        r"0\.\.max_length = 0\.\.5, got 4294967299 in example 0",
    ),
    "beyond int32, padded": (
        lambda: RaggedArray.from_padded(ROWS[None], np.array([2**32 + 3])),
        ValueError,
        r"0\.\.max_length = 0\.\.9, got 4294967299 in example 0",
    ),
    "beyond int32, in sum": (
        lambda: RaggedArray(ROWS, [2**32 + 1, 2**62]),
        ValueError,
        "the capacity, 9 tokens, got 4611686022722355201",
    ),
    "beyond int32 and negative": (
        lambda: RaggedArray(ROWS, [2**32 + 1, -1]),
        ValueError,
        r"0\.\.max_length = 0\.\.4294967297, got -1 in example 1",
    ),
    "splits beyond int32": (
        lambda: RaggedArray.from_row_splits(ROWS, [0, 2, 2**32 + 1]),
        ValueError,
        "the capacity, 9 tokens, got 4294967297",
    ),
    "splits beyond int32, of JAX": (
        lambda: RaggedArray.from_row_splits(ROWS, jnp.array([0, 2, 2**32 + 1])),
        ValueError,
        "the capacity, 9 tokens, got 4294967297",
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
        "`capacity` must hold all 9 tokens, got 8",
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
    "ids of fewer rows": (
        lambda: RaggedArray.from_segment_ids(ROWS[:3], [0, 0]),
        ValueError,
        r"`segment_ids` must have shape \(capacity\) = \(3,\), got \(2,\)",
    ),
    "ids of more rows": (
        lambda: RaggedArray.from_segment_ids(ROWS[:3], [0, 0, 1, 1]),
        ValueError,
        r"`segment_ids` must have shape \(capacity\) = \(3,\), got \(4,\)",
    ),
    "ids of another axis": (
        lambda: RaggedArray.from_segment_ids(ROWS, [0] * 9, axis=1),
        ValueError,
        r"`segment_ids` must have shape \(capacity\) = \(2,\), got \(9,\)",
    ),
    "ids of fewer rows, traced": (
        lambda: jax.jit(
            lambda ids: RaggedArray.from_segment_ids(ROWS[:3], ids, num_segments=1)
        )(np.zeros(2, int)),
        ValueError,
        r"`segment_ids` must have shape \(capacity\) = \(3,\), got \(2,\)",
    ),
    "index True": (
        lambda: RaggedArray(ROWS, [4, 5])[True],
        TypeError,
        "the index of an example must be an integer, got bool True",
    ),
    "index True of numpy": (
        lambda: RaggedArray(ROWS, [4, 5])[np.True_],
        TypeError,
        "the index of an example must be an integer, got bool",
    ),
    "in": (
        lambda: 1.0 in RaggedArray(ROWS, [4, 5]),
        TypeError,
        "`in` does not look into a RaggedArray, whose examples are arrays",
    ),
    "in padded": (
        lambda: 1.0 in ragged.PaddedRagged(ROWS, (np.zeros(9, int),), ((0, "n"),)),
        TypeError,
        "`in` does not look into a PaddedRagged, whose examples are arrays",
    ),
    "half into integers": (
        lambda: padded(np.int32, 0.5),
        ValueError,
        "`fill` must be a number that int32 holds, got 0.5",
    ),
    "half of JAX into integers": (
        lambda: padded(np.int32, jnp.asarray(0.5)),
        ValueError,
        "`fill` must be a number that int32 holds, got 0.5",
    ),
    "NaN into integers": (
        lambda: padded(np.int32, np.nan),
        ValueError,
        "`fill` must be a number that int32 holds, got nan",
    ),
    "infinity into bools": (
        lambda: padded(np.bool_, np.inf),
        ValueError,
        "`fill` must be a number that bool holds, got inf",
    ),
    "beyond integers": (
        lambda: padded(np.uint8, 256),
        ValueError,
        "`fill` must be a number that uint8 holds, got 256",
    ),
    "beyond all integers": (
        lambda: padded(np.int64, 2**70),
        ValueError,
        "`fill` must be a number that int64 holds, got 1180591620717411303424",
    ),
    "negative into unsigned": (
        lambda: padded(np.uint8, np.int8(-1)),
        ValueError,
        "`fill` must be a number that uint8 holds, got -1",
    ),
    "2 into bools": (
        lambda: padded(np.bool_, 2),
        ValueError,
        "`fill` must be a number that bool holds, got 2",
    ),
    "complex into floats": (
        lambda: padded(np.float32, 1j),
        ValueError,
        "`fill` must be a number that float32 holds, got complex 1j",
    ),
    "traced floats into integers": (
        lambda: jax.jit(lambda fill: padded(np.int32, fill))(1.0),
        ValueError,
        r"`fill` must be a number that int32 holds, got float64\[\]",
    ),
    "several fills": (
        lambda: padded(np.float32, np.ones(3)),
        ValueError,
        r"`fill` must be one number, got float64\[3\]",
    ),
    "fill of one element": (
        lambda: padded(np.float32, [1.0]),
        TypeError,
        r"`fill` must be one number, got list \[1.0\]",
    ),
    "a masked fill": (
        lambda: padded(np.int32, np.ma.masked),
        ValueError,
        "`fill`: numpy masked arrays are not supported",
    ),
    "no fill": (
        lambda: padded(np.float32, None),
        TypeError,
        "`fill` must be one number, got NoneType None",
    ),
    "a key as fill": (
        lambda: padded(np.float32, jax.random.key(0)),
        TypeError,
        r"`fill` must be one number, got key<fry>\[\]",
    ),
    "1 into keys": (
        lambda: batch_of_keys().to_padded(1),
        ValueError,
        "`fill` must be 0 for keys, got 1",
    ),
    "a key into keys": (
        lambda: batch_of_keys().to_padded(jax.random.key(1)),
        TypeError,
        r"`fill` must be one number, got key<fry>\[\]",
    ),
    "rows of another number": (
        lambda: RaggedArray(ROWS, [1]).with_data(ROWS[:8]),
        ValueError,
        r"`data` must have 9 tokens on axis 0, got shape \[8, 2\]",
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


BATCH = RaggedArray(jnp.ones(5), [2, 3])


def test_more_tokens_than_places_have_numbers():
    data = jax.ShapeDtypeStruct((2**31 + 10,), jnp.int8)
    with pytest.raises(ValueError, match="fewer than 2\\*\\*31 tokens .* 2147483658"):
        jax.eval_shape(lambda data: RaggedArray(data, [5, 3]), data)
    few = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    lengths = np.full(2**17, 0, np.int32)
    run = ragged.vmap(lambda x: x @ x.T @ x)
    with pytest.raises(NotImplementedError, match="131072 of up to 32768 tokens"):
        jax.eval_shape(lambda x: run(RaggedArray(x, lengths, max_length=2**15)), few)


def test_padded_examples_are_read_at_two_places():
    """One place, of all examples one after another, would not fit into int32."""
    x = jax.ShapeDtypeStruct((46_400, 46_400), jnp.int8)
    lengths = np.full(46_400, 2, np.int32)
    run = jax.make_jaxpr(
        lambda x: RaggedArray.from_padded(x, lengths, capacity=92_800).data
    )
    assert "start_index_map=(0, 1)" in str(run(x))


AS_ARRAY = {
    "add": lambda: BATCH + 1,
    "radd": lambda: 2 * BATCH,
    "to numpy": lambda: np.ones(2) + BATCH,
    "to jax": lambda: jnp.ones(2) - BATCH,
    "negative": lambda: -BATCH,
    "less": lambda: BATCH < 1,
    "sum": lambda: jnp.sum(BATCH),
    "sum of numpy": lambda: np.sum(BATCH),
    "activation": lambda: jax.nn.relu(BATCH),
    "asarray": lambda: jnp.asarray(BATCH),
    "of equal lengths": lambda: np.asarray(RaggedArray(jnp.ones(4), [2, 2])),
    "traced": lambda: jax.jit(lambda batch: batch + 1)(BATCH),
}


@pytest.mark.parametrize("name", AS_ARRAY)
def test_a_batch_in_place_of_an_array_is_told_what_to_write(name):
    with pytest.raises(TypeError, match="RaggedArray is no array of one shape") as info:
        AS_ARRAY[name]()
    for instead in ("batch.map(f)", "ragged.vmap(f)(batch)", "ragged.grad"):
        assert instead in str(info.value)
