"""Buckets, packs and streams: every step once, in few shapes, from any place again."""

import itertools
import json
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import data, ragged

LENGTHS = [1, 1, 2, 3, 3, 3, 5, 8, 8, 9]
SEQUENCES = [np.arange(n) + 100 * i for i, n in enumerate(LENGTHS)]

EPOCHS = {
    "buckets": lambda seed=0, **options: data.buckets(
        LENGTHS, batch_size=2, bounds=3, seed=seed, **options
    ),
    "pack": lambda seed=0, **options: data.pack(LENGTHS, 11, seed=seed, **options),
    "streams": lambda seed=0, **options: data.streams(
        SEQUENCES, lanes=2, chunk=4, seed=seed, **options
    ),
}
every_kind = pytest.mark.parametrize("make", EPOCHS.values(), ids=EPOCHS.keys())


def plain(batches):
    """Return batches as nested lists, which can be compared."""
    return [
        [part.tolist() for part in batch]
        if isinstance(batch, (tuple, list))
        else batch.tolist()
        for batch in batches
    ]


# ----------------------------------------------------------------------------- epochs


@every_kind
def test_epochs_repeat_by_seed_and_number(make):
    first, again, other = make(), make(), make(seed=1)
    assert plain(first) == plain(again) == plain(make().epoch(0))
    assert plain(first) == plain(again) == plain(make().epoch(1))
    assert plain(make().epoch(0)) != plain(make().epoch(1))
    assert plain(make().epoch(0)) != plain(other.epoch(0))
    fixed = make(shuffle=False)
    assert plain(fixed.epoch(0)) == plain(fixed.epoch(7))


@every_kind
def test_a_saved_place_is_found_again(make):
    whole = make()
    expected = [plain(whole) for _ in range(3)]
    for epoch, taken in [(0, 0), (0, 1), (1, 2), (2, len(expected[2]) - 1)]:
        reading = make()
        for _ in range(epoch):
            list(reading)
        before = plain(itertools.islice(reading, taken))
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(reading.state_dict())))
        assert before + plain(resumed) == expected[epoch]
        assert plain(resumed) == plain(whole.epoch(epoch + 1))


@every_kind
def test_an_epoch_has_a_length_and_indices(make):
    epochs = make()
    order = epochs.epoch(1)
    assert plain([order[i] for i in range(len(order))]) == plain(order)
    assert plain([order[-1]]) == plain(order)[-1:]
    assert plain(order[1:3]) == plain(order)[1:3]
    with pytest.raises(IndexError):
        order[len(order)]
    assert len(epochs) == len(list(epochs))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["buckets", "pack"])
def test_a_reader_cannot_change_what_others_read(kind, shuffle):
    epochs = EPOCHS[kind](shuffle=shuffle)
    want = plain(epochs.epoch(0))
    for batch in (*epochs, *epochs.epoch(0), *epochs.epoch(0)[:2]):
        batch += 10  # as torch warns where it cannot
    assert plain(epochs.epoch(0)) == want
    with pytest.raises(TypeError, match="item assignment"):
        epochs.epoch(0)[0] = want[0]


@every_kind
def test_another_epoch_does_not_compute_the_order_again(make, monkeypatch):
    epochs, asked = make(), []
    order = type(epochs)._order
    monkeypatch.setattr(
        type(epochs), "_order", lambda self, n: asked.append(n) or order(self, n)
    )
    for _ in epochs:
        epochs.epoch(7)
    assert asked == [0, 7]


def test_representations_are_short():
    assert [repr(make()) for make in EPOCHS.values()] == [
        "Buckets(10 sequences, shapes=[(2, 1), (2, 3), (2, 9)])",
        "Packs(10 examples, capacity=11, max_examples=4, max_length=9)",
        "Streams(10 sequences, 43 steps, lanes=2, chunk=4)",
    ]


# ---------------------------------------------------------------------------- buckets


def padded_steps(lengths, bounds):
    return sum(min(b for b in bounds if b >= n) for n in lengths)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_bucket_bounds_are_the_best_of_all_choices(count):
    sizes = sorted(set(LENGTHS))
    every = itertools.combinations(sizes, count)
    best = min(padded_steps(LENGTHS, c) for c in every if c[-1] == 9)
    bounds = data.bucket_bounds(LENGTHS, count)
    assert len(bounds) == count
    assert padded_steps(LENGTHS, bounds) == best


def test_bucket_bounds_of_few_and_of_many_lengths():
    assert data.bucket_bounds([4, 4, 2], 5) == (2, 4)
    assert data.bucket_bounds([0, 0], 3) == (1,)
    bounds = data.bucket_bounds(np.arange(10_000), 4)
    assert bounds[-1] == 9_999
    np.testing.assert_allclose(bounds, [2500, 5000, 7500, 9999], rtol=2e-3)
    most = 2**63 - 1
    assert data.bucket_bounds(most - np.arange(10_000), 1) == (most,)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(0, 3))
def test_buckets_have_every_sequence_once(lengths, epoch):
    batches = data.buckets(lengths, max_tokens=24, bounds=3)
    found = batches.epoch(epoch)
    assert sorted(np.concatenate(found)) == list(range(len(lengths)))
    steps = 0
    for batch in found:
        x, n = batches.collate([np.full((lengths[i], 2), i) for i in batch])
        assert x.shape[:2] in batches.shapes and x.shape[0] * x.shape[1] <= 24
        steps += x.shape[0] * x.shape[1]
        assert n.dtype == np.int32 and n[: len(batch)].tolist() == [
            lengths[i] for i in batch
        ]
        assert not n[len(batch) :].any()
        valid = np.arange(x.shape[1]) < n[:, None]
        np.testing.assert_array_equal(x[valid][:, 0], np.repeat(batch, n[: len(batch)]))
        assert not x[~valid].any()
    assert batches.waste == pytest.approx(1 - sum(lengths) / steps)


def test_buckets_of_another_set_have_its_bounds():
    train = data.buckets(LENGTHS, batch_size=2, bounds=3)
    held_out = data.buckets([2, 4], batch_size=2, bounds=train.bounds, shuffle=False)
    assert held_out.bounds == train.bounds
    shapes = [held_out.collate([np.ones(4)])[0].shape, train.shapes[-1]]
    assert set(shapes) <= set(train.shapes)
    with pytest.raises(ValueError, match="at most 9, the last of `bounds`, got 10 at"):
        data.buckets([2, 10], batch_size=2, bounds=train.bounds)


@pytest.mark.parametrize("options", [{"batch_size": 32}, {"max_tokens": 2000}])
def test_more_buckets_never_waste_more(options):
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    made = [data.buckets(lengths, bounds=k, **options) for k in range(1, 13)]
    waste = [batches.waste for batches in made]
    assert waste == sorted(waste, reverse=True) and waste[0] > 2 * waste[-1]
    assert all(len(batches.bounds) <= k for k, batches in enumerate(made, 1))


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"max_tokens": 10}])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_buckets_are_the_best_of_all_choices(count, options):
    waste = [
        data.buckets(LENGTHS, bounds=bounds, **options).waste
        for k in range(1, count + 1)
        for bounds in itertools.combinations(sorted(set(LENGTHS)), k)
        if bounds[-1] == 9
    ]
    assert data.buckets(LENGTHS, bounds=count, **options).waste == min(waste)


@pytest.mark.parametrize("kind", [np.array, jnp.array, list, tuple])
def test_bounds_may_be_any_vector_of_integers(kind):
    assert data.buckets([3, 12], batch_size=2, bounds=kind([8, 16])).bounds == (8, 16)


def test_buckets_of_lengths_whose_sum_no_integer_of_numpy_holds():
    assert data.buckets([2**62, 2**62], batch_size=1).waste == 0
    assert data.buckets([2**62, 2**61], batch_size=1, bounds=1).waste == 0.25
    lengths = [2**61] * 5 + [2**62] * 5  # whose steps in one bucket are 10 * 2**62
    assert data.bucket_bounds(lengths, 2) == (2**61, 2**62)
    batches = data.buckets(lengths, max_tokens=2**62, bounds=2)
    assert batches.shapes == [(2, 2**61), (1, 2**62)]
    assert batches.waste == pytest.approx(1 / 16)


# ------------------------------------------------------------------------------- pack


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(0, 3))
def test_packs_have_every_example_once(lengths, epoch):
    packs = data.pack(lengths, 20, max_examples=5)
    found = packs.epoch(epoch)
    assert sorted(np.concatenate(found)) == list(range(len(lengths)))
    for batch in found:
        tokens, n = packs.collate([np.full((lengths[i], 2), i) for i in batch])
        assert tokens.shape == (20, 2) and n.shape == (5,)
        whole = ragged.RaggedArray(tokens, n, max_length=packs.max_length)
        assert [len(x) for x in whole][: len(batch)] == [lengths[i] for i in batch]
        used = int(n.sum())
        np.testing.assert_array_equal(
            tokens[:used, 0], np.repeat(batch, n[: len(batch)])
        )
        assert not tokens[used:].any()


def test_packs_of_a_corpus_waste_little():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.7, 4000), 5, 200).astype(int)
    packs = data.pack(lengths, 1024)
    assert packs.max_length == lengths.max()
    assert 0 < packs.waste < 0.03
    filled = [lengths[batch].sum() for batch in packs]
    assert max(filled) <= 1024 and len(filled) == len(packs.epoch(0))


def test_batches_of_the_most_examples_make_place_for_others():
    rng = np.random.default_rng(0)
    short, long = rng.integers(1, 5, 20_000), rng.integers(100, 500, 20_000)
    lengths = np.where(rng.random(20_000) < 0.9, short, long)
    assert data.pack(lengths, 512).waste < 0.06
    assert len(data.pack([2] * 6, 12, max_examples=1)) == 6


def test_packs_of_lengths_whose_sum_no_integer_of_numpy_holds():
    assert data.pack([2**62] * 3, 2**62).waste == 0
    assert data.pack([2**61] * 3, 2**62).waste == 0.25


# ---------------------------------------------------------------------------- streams


@pytest.mark.parametrize("epoch", [0, 1])
def test_streams_go_on_from_chunk_to_chunk(epoch):
    streams = data.streams(SEQUENCES, lanes=3, chunk=2)
    chunks = list(streams.epoch(epoch))
    assert len(chunks) == sum(LENGTHS) // 6 and streams.left_out == sum(LENGTHS) % 6
    x = np.concatenate([x for x, _ in chunks], axis=1)
    resets = np.concatenate([resets for _, resets in chunks], axis=1)
    assert all(resets.shape == (3, 2) for _, resets in chunks)
    read = x.ravel().tolist()
    corpus = np.concatenate(SEQUENCES).tolist()
    assert len(set(read)) == len(read) == len(corpus) - streams.left_out
    for lane, marks in zip(x, resets, strict=True):
        assert marks[0]
        for before, now, mark in zip(lane[:-1], lane[1:], marks[1:], strict=True):
            assert mark == (now % 100 == 0)
            assert mark or now == before + 1


def test_one_long_sequence_is_not_copied(tmp_path):
    np.save(tmp_path / "text.npy", np.arange(26.0).reshape(13, 2))
    text = np.load(tmp_path / "text.npy", mmap_mode="r")
    streams = data.streams(text, lanes=2, chunk=3)
    assert streams.left_out == 1
    assert np.shares_memory(streams._corpus, text)
    (x, resets), (y, none) = streams
    assert x[..., 0].tolist() == [[0, 2, 4], [12, 14, 16]]
    assert y[..., 1].tolist() == [[7, 9, 11], [19, 21, 23]]
    assert resets.tolist() == [[True, False, False]] * 2 and not none.any()


def test_empty_sequences_begin_nothing():
    parts = [np.arange(0), np.arange(3), np.arange(0), np.arange(3)]
    ((x, resets),) = data.streams(parts, lanes=1, chunk=6, shuffle=False)
    assert x.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert resets.tolist() == [[True, False, False, True, False, False]]


# ------------------------------------------------------------------------------ parts


class Example(NamedTuple):
    x: np.ndarray
    targets: dict
    label: int


PARTS = {  # how a sequence is made of its parts, and its parts are read
    "tuple": (lambda x, y, n: (x, (y, n)), lambda e: (e[0], *e[1])),
    "dict": (
        lambda x, y, n: {"x": x, "y": y.tolist(), "n": jnp.int32(n)},
        lambda e: (e["x"], e["y"], e["n"]),
    ),
    "named": (
        lambda x, y, n: Example(x, {"y": y}, np.int8(n)),
        lambda e: (e.x, e.targets["y"], e.label),
    ),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", ["buckets", "pack"])
def test_parts_of_sequences_stay_together(kind, name):
    make, read = PARTS[name]
    examples = [
        make(np.full((n, 2), i, np.float32), SEQUENCES[i], i + 1)
        for i, n in enumerate(LENGTHS)
    ]
    batches = EPOCHS[kind]()
    for batch in batches:
        found, lengths = batches.collate([examples[i] for i in batch])
        assert type(found) is type(examples[0])
        x, y, label = read(found)
        want = batches.collate([np.full((LENGTHS[i], 2), i) for i in batch])
        np.testing.assert_array_equal(x, want[0])
        np.testing.assert_array_equal(lengths, want[1])
        want = batches.collate([SEQUENCES[i] for i in batch])
        np.testing.assert_array_equal(y, want[0])
        missing = [0] * (len(lengths) - len(batch))
        assert label.tolist() == [*(batch + 1), *missing]
        one = read(examples[0])[-1]
        assert x.dtype == np.float32 and label.dtype == np.asarray(one).dtype


# -------------------------------------------------------------------------- libraries


def test_with_torch():
    loading = pytest.importorskip("torch.utils.data")
    batches = EPOCHS["buckets"]()
    loader = loading.DataLoader(
        SEQUENCES, batch_sampler=batches, collate_fn=batches.collate
    )
    for epoch in range(2):
        expected = [
            batches.collate([SEQUENCES[i] for i in batch])
            for batch in batches.epoch(epoch)
        ]
        assert len(loader) == len(expected)
        assert plain(loader) == plain(expected)
    streams = EPOCHS["streams"]()
    chunks = loading.DataLoader(streams.epoch(0), batch_size=None)
    assert plain(chunks) == plain(streams)


def test_with_grain():
    grain = pytest.importorskip("grain")
    packs = EPOCHS["pack"]()
    loaded = grain.MapDataset.source(packs.epoch(0)).map(
        lambda batch: packs.collate([SEQUENCES[i] for i in batch])
    )
    expected = [packs.collate([SEQUENCES[i] for i in batch]) for batch in packs]
    assert plain(loaded) == plain(expected)
    reading = iter(loaded.to_iter_dataset())
    next(reading)
    saved = reading.get_state()
    rest = plain(reading)
    reading.set_state(saved)
    assert plain(reading) == rest == plain(expected[1:])


def test_packs_have_space_for_no_more_examples_than_there_are():
    packs = data.pack([3, 4], 100)
    assert packs.max_examples == 2
    assert packs.collate([[1] * 3, [2] * 4])[1].tolist() == [3, 4]


def test_bounds_of_very_many_lengths_are_rounded_up():
    """Of 2050 lengths, those from 1 on become 2, 4, and so on."""
    lengths = [1] * 10_000 + list(range(2, 2051))
    assert data.bucket_bounds(lengths, 2) == (2, 2050)


def test_a_later_epoch_of_a_seed_is_not_one_of_the_next_seed():
    lengths = [3] * 40
    one, other = (data.buckets(lengths, batch_size=40, seed=seed) for seed in (0, 1))
    orders = [one.epoch(1), other.epoch(0), one.epoch(2), other.epoch(1)]
    assert len({tuple(np.concatenate(list(order))) for order in orders}) == 4
