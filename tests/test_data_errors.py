"""Errors of buckets, packs and streams: they name the argument and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_data import EPOCHS, LENGTHS

from ostinato import data


def test_a_foreign_state_is_refused():
    epochs = EPOCHS["buckets"]()
    with pytest.raises(ValueError, match="must be that of seed 0, got one of seed 1"):
        epochs.load_state_dict(EPOCHS["buckets"](seed=1).state_dict())
    with pytest.raises(ValueError, match="must be that of 5 batches in epoch 0, got"):
        epochs.load_state_dict(epochs.state_dict() | {"batch": 5})
    with pytest.raises(TypeError, match=r"must have the entries .* got dict \{\}"):
        epochs.load_state_dict({})
    with pytest.raises(TypeError, match=r"`state\['batch'\]` must be an integer"):
        epochs.load_state_dict(epochs.state_dict() | {"batch": "1"})
    older = epochs.state_dict()
    del older["data"]
    with pytest.raises(TypeError, match="must have the entries epoch, .*, data of"):
        epochs.load_state_dict(older)


TEXT = np.arange(1000)
FOREIGN = {  # two that have equally many batches
    "lanes": (data.streams(TEXT, 4, 25), data.streams(TEXT, 5, 20)),
    "dtype": (data.streams(TEXT, 4, 25), data.streams(TEXT * 1.0, 4, 25)),
    "texts": (data.streams(TEXT, 4, 25), data.streams([TEXT[:9], TEXT[9:]], 4, 25)),
    "order": (data.streams(TEXT, 4, 25), data.streams(TEXT, 4, 25, shuffle=False)),
    "lengths": (
        data.buckets([1, 2, 3, 4] * 5, batch_size=2, bounds=(2, 4)),
        data.buckets([4, 3, 2, 1] * 5, batch_size=2, bounds=(2, 4)),
    ),
    "bounds": (
        data.buckets([2, 4] * 4, batch_size=2, bounds=(2, 4)),
        data.buckets([2, 4] * 4, batch_size=2, bounds=(4,)),
    ),
    "class": (data.buckets([3] * 6, batch_size=1), data.pack([3] * 6, 3)),
    "examples": (data.pack([3] * 6, 3), data.pack([3] * 6, 3, max_examples=9)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_state_of_other_data_or_options_is_refused(kind):
    one, other = FOREIGN[kind]
    assert len(one) == len(other)
    for a, b in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=r"must be that of \w+\(.* of other data"):
            a.load_state_dict(b.state_dict())
        a.load_state_dict(a.state_dict())
        assert 0 <= a.state_dict()["data"] < 2**31


@pytest.mark.parametrize(
    "bounds, message",
    [
        ("16", "`bounds` must be an integer or increasing integers, got str '16'"),
        (2.0, "`bounds` must be an integer or increasing integers, got float 2.0"),
        (True, "`bounds` must be an integer or increasing integers, got bool True"),
        ({8, 16}, "`bounds` must be an integer or increasing integers, got set"),
        ([8.5, 16], "`bounds` must hold integers, got float64"),
    ],
)
def test_bounds_of_wrong_types(bounds, message):
    with pytest.raises(TypeError, match=message):
        data.buckets([3, 12], batch_size=2, bounds=bounds)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "one of `batch_size` and `max_tokens` must be given, got None and None"),
        ({"batch_size": 2, "max_tokens": 9}, "must be given, got 2 and 9"),
        ({"max_tokens": 8}, "at least 9, the longest of `lengths`, got 8"),
        ({"max_tokens": 11, "bounds": (9, 12)}, "12, the last of `bounds`, got 11"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        (
            {"max_tokens": 2**70},
            "`max_tokens` must be less than 2.*, got one of 71 bits",
        ),
        ({"batch_size": 2, "bounds": (9, 3)}, r"must be increasing, got \[9, 3\]"),
        ({"batch_size": 2, "bounds": ()}, r"must be increasing, got \[\]"),
        ({"batch_size": 2, "seed": -1}, "`seed` must be at least 0, got -1"),
    ],
)
def test_bad_options_of_buckets(options, message):
    with pytest.raises(ValueError, match=message):
        data.buckets(LENGTHS, **options)


def test_bad_lengths():
    with pytest.raises(ValueError, match="must hold at least one length, got none"):
        data.bucket_bounds([], 2)
    with pytest.raises(ValueError, match=r"`lengths\[1\]` must be at least 0, got -1"):
        data.pack([3, -1], 4)
    with pytest.raises(TypeError, match="`lengths` must hold integers, got float64"):
        data.buckets([1.5], batch_size=1)
    with pytest.raises(ValueError, match=r"must have shape \[N\], got \[1, 1\]"):
        data.pack(np.array([[3]]), 4)
    with pytest.raises(TypeError, match="`lengths` must hold integers, got key<fry>"):
        data.pack(jax.random.split(jax.random.key(0), 2), 4)
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"`lengths` must .*; give lengths.numpy\(\)"):
        data.bucket_bounds(torch.tensor([1, 2]), 1)
    for tensor in (torch.ones(9, requires_grad=True), torch.ones(9).bfloat16()):
        with pytest.raises(TypeError, match="`corpus` must be an array, got a tensor"):
            data.streams(tensor, lanes=1, chunk=2)
        with pytest.raises(
            TypeError, match=r"`corpus\[0\]` must be an array, got a tensor"
        ):
            data.streams([tensor], lanes=1, chunk=2)
    huge = np.array([1, 2**63 + 5], np.uint64)
    with pytest.raises(
        ValueError, match=r"`lengths\[1\]` must be at most 922.*, got 9223"
    ):
        data.pack(huge, 10)


SEQUENCES = {
    "arrays": ([np.ones(2), np.ones(3)], r"list of sequences, such as float64\[2\]"),
    "of-one-length": ([jnp.ones(2), jnp.ones(2)], "such as float"),
    "lists": (([1, 2], [3]), r"tuple of sequences, such as list \[1, 2\]"),
    "words": (["to", "the"], "such as str 'to'"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_in_place_of_lengths_are_told_so(name):
    sequences, got = SEQUENCES[name]
    message = (
        f"must be the lengths of the sequences, integers, got a.*{got}.*len.s. for"
    )
    with pytest.raises(TypeError, match=message):
        data.buckets(sequences, batch_size=2)
    with pytest.raises(TypeError, match=message):
        data.pack(sequences, 8)
    with pytest.raises(TypeError, match=message):
        data.bucket_bounds(sequences, 2)


def test_a_batch_that_is_none_is_refused():
    batches = data.buckets(LENGTHS, batch_size=2, bounds=3)
    with pytest.raises(ValueError, match="got 3 sequences of up to 1 steps"):
        batches.collate([np.ones(1)] * 3)
    with pytest.raises(ValueError, match="got 1 sequences of up to 10 steps"):
        batches.collate([np.ones(10)])
    with pytest.raises(ValueError, match="must hold at least one array, got none"):
        batches.collate([])
    with pytest.raises(ValueError, match=r"`sequences\[1\]` must have the shape"):
        batches.collate([np.ones((2, 3)), np.ones((2, 4))])
    with pytest.raises(TypeError, match=r"`sequences\[1\]` must have the dtype"):
        batches.collate([np.ones(2), np.ones(2, np.float32)])
    with pytest.raises(TypeError, match=r"`sequences` must be a list .* got NoneType"):
        batches.collate(None)
    with pytest.raises(TypeError, match=r"`sequences\[0\]` must be .* parts differ"):
        batches.collate([[np.ones(3), 1]])


def test_pairs_of_inputs_and_targets_are_no_steps_of_a_stream():
    with pytest.raises(
        TypeError, match=r"\[0\]` must be .*got a tuple of 2 arrays; giv"
    ):
        data.streams([(np.ones(3), np.zeros(3))] * 2, 1, 2)
    data.streams([(1.0, 2.0, 3.0)] * 2, 1, 2)
    data.streams([[np.ones(2), np.ones(2)]] * 2, 1, 2)


X = np.ones((3, 2))
BAD_PARTS = {
    "structure": ([(X, 1), (X, 1, 1)], ValueError, r"\[1\]` must have the parts of `"),
    "keys": ([{"x": X}, {"y": X}], ValueError, r"\[1\]` must have the parts of `seq"),
    "one an array": ([X, (X, 1)], ValueError, r"\[1\]` must have the parts of `seque"),
    "steps": ([{"x": X, "y": X[:2]}], ValueError, r"\[0\]\['y'\]` .*'x'\]`, 3, got 2"),
    "labels": (
        [(X, 1), (X, 1.5)],
        TypeError,
        r"\[1\]\[1\]` .* `sequences\[0\]\[1\]`, in",
    ),
    "shape": ([(X, 1), (X[:, :1], 1)], ValueError, r"\[1\]\[0\]` must have the shape"),
    "text": ([(X, "cat")], TypeError, r"\[0\]\[1\]` must be an array .*got str 'cat'"),
    "nothing": ([(X, None)], TypeError, r"\[0\]\[1\]` must be an array .*got NoneType"),
    "one label an array": (
        [(X, 1), (X, X[0])],
        TypeError,
        r"\[0\]\[1\]` must be an arr",
    ),
    "no steps": (
        [{"x": 1}],
        ValueError,
        r"\[0\]` must hold an array \[n, ...\], got non",
    ),
    "no parts": ([{}], ValueError, r"\[0\]` must hold an array \[n, ...\], got none"),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_parts_of_sequences(name):
    sequences, error, message = BAD_PARTS[name]
    batches = data.buckets([3, 3], batch_size=2)
    with pytest.raises(error, match=r"`sequences" + message):
        batches.collate(sequences)


def test_a_masked_array_is_no_sequence():
    masked = np.ma.masked_array([1, 2, 3], [0, 1, 0])
    with pytest.raises(ValueError, match=r"`sequences\[0\]`: numpy masked arrays are"):
        data.buckets([3, 3], batch_size=2).collate([masked])
    with pytest.raises(ValueError, match="`corpus`: numpy masked arrays are not suppo"):
        data.streams(masked, 1, 2)
    with pytest.raises(ValueError, match="`lengths`: numpy masked arrays are not supp"):
        data.pack(masked, 3)


def test_an_example_longer_than_all_is_of_no_batch():
    batches = data.pack([3, 3], 8, max_examples=2)
    with pytest.raises(ValueError, match="of at most 3 tokens each, got one of 7"):
        batches.collate([np.ones(7)])


def test_an_empty_list_has_the_dtype_of_the_others():
    batches = data.buckets(LENGTHS, batch_size=3, bounds=1)
    x, lengths = batches.collate([[], [1, 2]])
    assert x.dtype == np.int64 and lengths.tolist() == [0, 2, 0]
    x, lengths = batches.collate([np.ones((2, 4), np.float32), []])
    assert x.shape == (3, 9, 4) and lengths.tolist() == [2, 0, 0]
    assert batches.collate([[], []])[0].shape == (3, 9)
    with pytest.raises(TypeError, match=r"`sequences\[1\]` must have the dtype"):
        batches.collate([np.ones(2), np.ones(0, np.float32)])


def test_a_long_example_is_refused():
    with pytest.raises(ValueError, match="at most `capacity` = 8, got 9 at 9; leave"):
        data.pack(LENGTHS, 8)
    packs = data.pack(LENGTHS, 9, max_examples=2)
    with pytest.raises(ValueError, match="at most 2 of 9 tokens, got 2 of 10"):
        packs.collate([np.ones(5)] * 2)
    with pytest.raises(ValueError, match="at most 2 of 9 tokens, got 3 of 3"):
        packs.collate([np.ones(1)] * 3)


def test_bad_corpora():
    with pytest.raises(ValueError, match=r"at least lanes \* chunk = 6 steps, got 5"):
        data.streams(np.arange(5), lanes=2, chunk=3)
    with pytest.raises(TypeError, match=r"must be an array \[N, ...\] or a list"):
        data.streams("a text", lanes=2, chunk=3)
    with pytest.raises(ValueError, match="`corpus` must hold at least one array"):
        data.streams([], lanes=2, chunk=3)
    with pytest.raises(
        TypeError, match=r"`corpus\[0\]` must be an array \[n, ...\], g"
    ):
        data.streams([1, 2], lanes=2, chunk=3)
