"""Tests of ensembles: members that learn by themselves and are averaged in use."""

import dataclasses

import jax
import numpy as np
import pytest
from g2p_words import (
    arrays,
    interrupt_after,
    language,
    plain_jax,  # noqa: F401
    spell,
    train_tiny,
)

from ostinato.apps import training
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import attention, checkpoint, ctc, joint
from ostinato.apps.g2p.batches import Batch, RaggedBatch, letter_ids, pad
from ostinato.apps.g2p.pronounce import Pronouncer
from ostinato.apps.tensors import MODEL_FILE, RESUME_FILE

PHONEMES = ("S", "T", "N")
WORDS, TARGETS = ["abc", "it", "a"], [[1, 2, 2], [3], [2]]
MEMBERS = 3
CONFIGS = {
    "ctc": ctc.Config(3, 1, PHONEMES, members=MEMBERS),
    "attention": attention.Config(3, 1, PHONEMES, members=MEMBERS),
}


def batch():
    return Batch(*pad(letter_ids(WORDS), 4, 3), *pad(TARGETS, 4, 3))


def drawn(config):
    """Return parameters that are large enough for members to differ a lot.

    They are arrays of numpy, whose parts are taken without a program of XLA.
    """
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return jax.tree.map(lambda a: np.float32(rng.normal(size=a.shape)), shapes)


def member(params, i):
    return jax.tree.map(lambda a: a[i], params)


def single(config):
    return dataclasses.replace(config, members=1)


@pytest.mark.parametrize(
    "name, ragged", [("ctc", False), ("attention", False), ("ctc", True)]
)
def test_members_learn_as_if_they_were_alone(name, ragged):
    config = CONFIGS[name]
    alone = single(config)
    loss = alone.ragged_loss if ragged else alone.loss
    data = RaggedBatch.of(batch()) if ragged else batch()
    clock = np.zeros(1, np.float32)

    def learn(params, members):
        optimizer = jax.jit(training.init_optimizer)(params)
        state = training.State(0, params, params, optimizer)
        for _ in range(3):
            state, told = training.update(
                state, data, 0.01, clock, loss=loss, seed=0, members=members
            )
        return state, float(told[0])

    params = drawn(config)
    together, mean = learn(params, MEMBERS)
    losses = []
    for i in range(MEMBERS):
        want, value = learn(member(params, i), 1)
        losses.append(value)
        for kind in ("params", "averaged"):
            jax.tree.map(
                lambda a, b, i=i: np.testing.assert_allclose(
                    a[i], b, rtol=1e-4, atol=1e-5
                ),
                jax.device_get(getattr(together, kind)),
                getattr(want, kind),
            )
    np.testing.assert_allclose(mean, np.mean(losses), rtol=1e-5)


def test_attention_averages_the_probabilities_of_its_members():
    config = CONFIGS["attention"]
    params = drawn(config)
    aligned = joint.align(WORDS, TARGETS, config.num_labels)
    found = config.reader(aligned).beam(params, WORDS)
    assert any(len(candidates) > 1 for candidates in found)

    @jax.jit
    def read(one, letters, lengths, phonemes, shown, count):
        """Return log probabilities of the next phoneme, and the loss of all by CTC."""
        encoded = attention.encode(one, config, letters, lengths)
        losses = ctc.label_losses(encoded.frames, lengths * 2, shown, count)
        return attention.decode(one, config, encoded, phonemes)[0], losses[0]

    for word, candidates in zip(WORDS, found, strict=True):
        letters, lengths = pad(letter_ids([word]), 4, 1)
        for labels, score, (spelled, _) in candidates[::2]:
            phonemes, ids = np.array([labels], np.int32), np.array([*labels, 0])
            count, longest = np.array([len(labels)]), max(len(labels), 1)
            shown = np.resize(phonemes, (1, longest))
            steps, frames = [], []
            for i in range(MEMBERS):
                log_probs, loss = jax.device_get(
                    read(member(params, i), letters, lengths, phonemes, shown, count)
                )
                steps.append(np.exp(log_probs[np.arange(len(ids)), ids]))
                frames.append(np.exp(-np.float64(loss)))
            want = np.log(np.mean(steps, axis=0)).sum()
            np.testing.assert_allclose(score, want, rtol=1e-3, atol=1e-3)
            if (mean := np.mean(frames)) > 1e-30:
                np.testing.assert_allclose(spelled, np.log(mean), rtol=1e-3, atol=1e-3)


def test_ctc_averages_the_probabilities_of_its_members():
    config = CONFIGS["ctc"]
    params = drawn(config)
    found = config.reader().log_probs(params, WORDS)
    readers = single(config).reader()
    each = [readers.log_probs(member(params, i), WORDS) for i in range(MEMBERS)]
    for got, *want in zip(found, *each, strict=True):
        np.testing.assert_allclose(np.exp(got), np.mean(np.exp(want), 0), rtol=1e-4)


def test_alignment_is_the_mean_of_the_members():
    config = CONFIGS["attention"]
    params = drawn(config)
    letters = letter_ids(["abc"])[0]
    got = attention.alignment(params, config, letters, [2, 1])
    each = [
        attention.alignment(member(params, i), single(config), letters, [2, 1])
        for i in range(MEMBERS)
    ]
    assert np.ptp(each, axis=0).max() > 0.1  # the members differ
    np.testing.assert_allclose(got, np.mean(each, axis=0), rtol=1e-4, atol=1e-5)


def test_members_begin_with_different_parameters():
    params = jax.jit(CONFIGS["ctc"].init)(jax.random.key(0))
    assert params.w_out.shape[0] == MEMBERS
    assert np.ptp(np.asarray(params.w_out), axis=0).min() > 0


def test_an_ensemble_learns_is_resumed_and_pronounces(tmp_path, monkeypatch):
    options = dict(model="ctc", ensemble=2, layers=1, dropout=0.1)
    options["dictionary"] = {w: p for w, p in language(60).items() if len(w) == 3}
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    summary = train_tiny(whole, epochs=24, **options)
    assert summary.best.dev_per < 20
    with monkeypatch.context() as patch:
        interrupt_after(patch, updates=5)
        train_tiny(halved, epochs=24, **options)
    train_tiny(halved, resume=True, **options)
    for name in (MODEL_FILE, RESUME_FILE):
        want, got = arrays(whole, name), arrays(halved, name)
        for key in want:
            np.testing.assert_array_equal(got[key], want[key])
    assert checkpoint.load_model(whole).config.members == 2
    assert Pronouncer(whole)(["bak"]) == [spell("bak")]
    with pytest.raises(UserError, match="`ensemble` must stay 2"):
        train_tiny(halved, resume=True, **{**options, "ensemble": 3})


def test_a_bad_size_names_the_option(tmp_path):
    with pytest.raises(UserError, match="ensemble.*at least 1.*0"):
        train_tiny(tmp_path, epochs=1, ensemble=0)
