"""Tests of g2p by `ragged.vmap`: the same losses, gradients, weights and files."""

import jax
import numpy as np
import pytest
from g2p_words import (
    arrays,
    interrupt_after,
    language,
    learn,
    plain_jax,  # noqa: F401
    spell,
    train_tiny,
)

from ostinato.apps.g2p import attention, ctc
from ostinato.apps.g2p.batches import Batch, RaggedBatch, TrainingSet, letter_ids, pad
from ostinato.apps.g2p.models import MODELS
from ostinato.apps.g2p.pronounce import Pronouncer
from ostinato.apps.g2p.settings import Settings
from ostinato.apps.report import CSV_FILE
from ostinato.apps.tensors import RESUME_FILE
from ostinato.ragged import vmap

PHONEMES = ("AA", "B", "EH", "K", "S")
CONFIGS = [
    ctc.Config(3, 2, PHONEMES, dropout=0.4),
    attention.Config(3, 1, PHONEMES),
]
WORDS = ["a", "antidisestablishment", "ox", "be", "thorough", "of", "a"]
TARGETS = [[1], [1, 2, 2, 3, 5, 5, 1, 4, 3, 2, 1], [4, 5], [2], [3, 3, 1], [1, 2], [5]]


def batch(order, letters=21, phonemes=12, rows=8):
    """Make a batch of words of very different lengths, some of length 0."""
    words, targets = [WORDS[i] for i in order], [TARGETS[i] for i in order]
    return Batch(*pad(letter_ids(words), letters, rows), *pad(targets, phonemes, rows))


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def model(request):
    """Return a model, large parameters, and its two losses with gradients, compiled."""
    config = request.param
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(config.init, jax.random.key(0))
        params = jax.tree.map(
            lambda a: jax.numpy.array(rng.normal(size=a.shape), np.float32), shapes
        )
        losses = (config.loss, config.ragged_loss)
        return config, params, *(jax.jit(jax.value_and_grad(f)) for f in losses)


@pytest.mark.parametrize("order", [range(7), (4, 2, 4, 3)], ids=["seven", "four"])
def test_loss_and_gradient_equal_those_of_padded_words(model, order):
    _, params, padded, ragged = model
    want = padded(params, batch(order))
    got = ragged(params, RaggedBatch.of(batch(order)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want
    )


def test_every_word_draws_its_own_dropout():
    """Check that a mask depends on the key and the word's index, not on other words."""
    config = CONFIGS[0]
    params = jax.jit(config.init)(jax.random.key(0))
    key, order = jax.random.key(5), (5, 2, 5)  # of one shape, compiled once
    got = jax.jit(config.ragged_loss)(params, RaggedBatch.of(batch(order)), key)
    one = jax.jit(config.word_loss)
    want = [
        one(params, np.array(letter_ids([WORDS[i]])[0]), np.array(TARGETS[i]), k)
        for i, k in zip(order, jax.random.split(key, 8), strict=False)
    ]
    np.testing.assert_allclose(got, np.mean(want), rtol=1e-4)
    assert want[0] != want[2]


def test_a_batch_keeps_its_words_and_drops_the_padding():
    padded = batch((4, 2), rows=3)
    letters, phonemes = RaggedBatch.of(padded)
    assert [a.tolist() for a in letters] == [*letter_ids([WORDS[4], WORDS[2]]), []]
    assert [a.tolist() for a in phonemes] == [TARGETS[4], TARGETS[2], []]
    assert (letters.dim, phonemes.dim) == ("letters", "phonemes")
    assert (letters.max_length, phonemes.max_length) == (21, 12)


def test_an_epoch_compiles_for_few_sizes():
    size = CONFIGS[0].size
    data = TrainingSet(
        language(1500), PHONEMES, size=size, batch_size=16, num_buckets=1, seed=0
    )
    traced = []

    @jax.jit
    def letters(batch):
        traced.append(batch)
        return vmap(lambda word, _: word.shape[0], min_length=0)(*batch)

    for batch in data.epoch(0):
        np.testing.assert_array_equal(letters(RaggedBatch.of(batch)), batch.seq_lengths)
    assert data.num_batches > 80
    assert len(traced) <= 4


# ------------------------------------------------------------------------------- a run


BATCH = 28  # all batches of 28 words have the same capacities: one compilation


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ragged")
    return learn(folder, ragged=True, batch=BATCH, draw=False)


def test_a_run_learns_and_pronounces(learned):
    out, summary, text = learned
    assert summary.best.dev_per < 5
    assert "model ctc by ragged.vmap" in text
    assert "to learn, of at most" in text
    assert Pronouncer(out)(["bakes", "sex"]) == [spell("bakes"), spell("sex")]


def test_a_run_makes_the_updates_of_a_padded_one(learned, tmp_path, monkeypatch):
    """Check a run without dropout, on equal batches, since one bucket holds all."""
    interrupt_after(monkeypatch, updates=20)
    train_tiny(tmp_path, epochs=20, batch=BATCH)
    got, want = (
        np.genfromtxt(out / CSV_FILE, delimiter=",", names=True)
        for out in (learned[0], tmp_path)
    )
    assert len(want) >= 2 and want["updates"][1] > 9
    for name in ("updates", "loss"):
        np.testing.assert_allclose(got[name][:2], want[name][:2], rtol=1e-4)


def test_an_interrupted_run_goes_on_as_it_began(learned, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, updates=10)
        train_tiny(tmp_path, epochs=20, batch=BATCH, ragged=True)
    train_tiny(tmp_path, resume=True, batch=BATCH)  # the run stays ragged
    want, got = (arrays(out, RESUME_FILE) for out in (learned[0], tmp_path))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", MODELS)
def test_words_of_all_lengths_share_batches(name):
    assert Settings.choose(model=name, ragged=True).buckets == 1
    assert Settings.choose(model=name, ragged=True, buckets=3).buckets == 3
    assert Settings.choose(model=name, ragged=False).buckets > 1
