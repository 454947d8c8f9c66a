import dataclasses
import itertools

import jax
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps.g2p import attention, joint
from ostinato.apps.g2p.batches import Batch, letter_ids, pad

CONFIG = attention.Config(hidden_size=3, num_layers=2, phonemes=("S", "T", "N"))
GRADIENT = jax.jit(jax.value_and_grad(CONFIG.loss))
PAIRS = [("abc", [1, 2, 2]), ("it", [3]), ("a", []), ("b", [1, 2, 3])]


@pytest.fixture(scope="module")
def params():
    """Make parameters large enough that words and phonemes affect the results."""
    with jax.enable_x64(False):
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(CONFIG.init, jax.random.key(0))
        return jax.tree.map(
            lambda a: jax.numpy.array(rng.normal(size=a.shape), np.float32), shapes
        )


def batch_of(pairs, letters=4, phonemes=4, rows=5):
    words, targets = zip(*pairs, strict=True)
    return Batch(*pad(letter_ids(words), letters, rows), *pad(targets, phonemes, rows))


# -------------------------------------------------------------- the model, in numpy


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step(w, x, h, c):
    pre = w.w_ih @ x + w.b_ih + w.w_hh @ h + w.b_hh
    i, f, g, o = np.split(pre, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def lstm_layers(flat, inputs):
    """Compute outputs ``[T, 2 H]`` and the last layer's final states by direction."""
    weights = iter(attention.ost.unpack_weights(flat, CONFIG.spec))
    for _ in range(CONFIG.num_layers):
        sides, finals = [], []
        for step in (1, -1):
            w = jax.tree.map(lambda a: np.asarray(a, np.float64), next(weights))
            state, outputs = (np.zeros(3), np.zeros(3)), []
            for x in inputs[::step]:
                state = lstm_step(w, x, *state)
                outputs.append(state[0])
            sides.append(outputs[::step])
            finals.append(state)
        inputs = np.concatenate(sides, axis=1)
    return inputs, finals


def by_hand(params, word, target):
    """Compute log probabilities ``[U + 1, labels]``, alignment, and CTC score."""
    flat = params.encoder
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    outputs, (forward, backward) = lstm_layers(flat, p.letters[letter_ids([word])[0]])
    memory = outputs @ p.w_memory
    lower, upper = p.decoder
    state, context = backward, np.zeros(3)
    written, rows, looks = forward, [], []
    for label in (0, *target):
        x = np.concatenate([p.phonemes[label], context])
        state = lstm_step(lower.cell, x, *state)
        keys = memory @ lower.w_memory.T + lower.b_memory
        query = lower.w_query @ state[0] + lower.b_query
        energies = np.exp(np.tanh(keys + query) @ lower.v)
        looks.append(energies / energies.sum())
        context = looks[-1] @ memory
        x = np.concatenate([state[0], context])
        written = lstm_step(upper, x, *written)
        scores = written[0] @ p.w_out + p.b_out
        rows.append(scores - np.log(np.exp(scores).sum()))
    frames = (outputs @ p.w_ctc + p.b_ctc).reshape(2 * len(word), -1)
    frames = frames - np.log(np.exp(frames).sum(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        spelled = np.log(sum_over_paths(frames, target))
    return np.array(rows), np.array(looks), spelled


def sum_over_paths(log_probs, target):
    """Compute the probability of a target under CTC by the textbook's recursion."""
    states = [0, *itertools.chain.from_iterable((label, 0) for label in target)]
    alpha = np.zeros(len(states))
    alpha[0] = 1.0
    if len(states) > 1:
        alpha[1] = 1.0
    alpha *= np.exp(log_probs[0, states])
    for frame in np.exp(log_probs[1:]):
        new = alpha.copy()
        new[1:] += alpha[:-1]
        for s in range(2, len(states)):
            if states[s] != 0 and states[s] != states[s - 2]:
                new[s] += alpha[s - 2]
        alpha = new * frame[states]
    return alpha[-2:].sum()


def test_scores_are_those_of_the_equations(params):
    batch = batch_of(PAIRS)
    encoded = attention.encode(params, CONFIG, batch.letters, batch.seq_lengths)
    got = attention.decode(params, CONFIG, encoded, batch.phonemes)
    for row, (word, target) in enumerate(PAIRS):
        want, *_ = by_hand(params, word, target)
        np.testing.assert_allclose(got[row, : len(want)], want, rtol=1e-4, atol=1e-4)


def test_alignment_is_that_of_the_equations(params):
    got = attention.alignment(params, CONFIG, letter_ids(["abc"])[0], [2, 1])
    _, want, _ = by_hand(params, "abc", [2, 1])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-5)


def test_loss_is_of_both_ways_to_spell(params):
    total, unspelled = 0.0, 0
    for word, target in PAIRS:
        log_probs, _, spelled = by_hand(params, word, target)
        for row, label in zip(log_probs, [*target, 0], strict=True):
            total -= 0.5 * (0.9 * row[label] + 0.1 * row.mean())
        if spelled > -np.inf:
            total -= 0.5 * spelled
        else:
            unspelled += 1
    assert unspelled == 1  # CTC has two frames for "b"
    got, grads = GRADIENT(params, batch_of(PAIRS))
    np.testing.assert_allclose(got, total / len(PAIRS), rtol=1e-5)
    assert all(np.all(np.isfinite(grad)) for grad in jax.tree.leaves(grads))


def test_padding_changes_neither_loss_nor_gradient(params):
    sizes = [(4, 4, 5), (6, 5, 7)]
    results = [GRADIENT(params, batch_of(PAIRS, *size)) for size in sizes]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results
    )


def test_a_batch_of_empty_rows_has_no_loss_and_no_gradient(params):
    empty = Batch(*pad([], 4, 5), *pad([], 4, 5))
    value, grads = GRADIENT(params, empty)
    assert value == 0
    assert not any(np.any(grad) for grad in jax.tree.leaves(grads))


def test_dropout_is_of_the_key_alone(params):
    loss = jax.jit(dataclasses.replace(CONFIG, dropout=0.5).loss)
    batch = batch_of(PAIRS)
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    values = [float(loss(params, batch, key)) for key in keys]
    assert values[0] == values[1] != values[2]
    without, _ = GRADIENT(params, batch)
    assert float(loss(params, batch)) == pytest.approx(float(without))


WORDS = ["abc", "it", "a", "somewhatlonger", "be"]


@pytest.mark.parametrize("bounds", [(), (2, 5)], ids=["free", "buckets"])
def test_candidates_have_the_probabilities_of_the_model(params, bounds):
    aligned = joint.align(["be", "all"], [[1, 2], [3, 3, 1]], base=4)
    reader = attention.Reader(CONFIG, aligned, bounds)
    ngram = joint.JointNGram(aligned, base=4)
    for word, candidates in zip(WORDS, reader.beam(params, WORDS), strict=True):
        assert len({c.labels for c in candidates}) == attention.WIDTH
        scores = [c.score for c in candidates]
        assert scores == sorted(scores, reverse=True)
        for labels, score, (second, third) in candidates[::5]:
            rows, _, spelled = by_hand(params, word, labels)
            want = sum(r[k] for r, k in zip(rows, [*labels, 0], strict=True))
            assert score == pytest.approx(want, rel=1e-3, abs=1e-3)
            assert third == pytest.approx(*ngram.log_prob([word], [labels]))
            if spelled > -np.inf:
                assert second == pytest.approx(spelled, rel=1e-3, abs=1e-3)
            else:
                assert second < -attention.UNSPELLABLE


def test_padding_changes_no_pronunciation(params):
    """A run pads words to its own bounds; `pronounce` does not."""
    words = ["a", "it", "a", "b"]
    aligned = joint.align(["be", "all"], [[1, 2], [3, 3, 1]], base=4)
    every = [attention.Reader(CONFIG, aligned, b) for b in ((), (3,), (9, 20))]
    found = [(r.greedy(params, words), r.beam(params, words)) for r in every]
    for greedy, beam in found[1:]:
        assert greedy == found[0][0]
        for got, want in zip(beam, found[0][1], strict=True):
            assert [c.labels for c in got] == [c.labels for c in want]


def test_greedy_takes_the_most_likely_label(params):
    for word, labels in zip(
        WORDS, attention.Reader(CONFIG).greedy(params, WORDS), strict=True
    ):
        rows, *_ = by_hand(params, word, labels)
        longest = 2 * len(word) + 8
        count = min(len(labels) + 1, longest)
        assert rows[:count].argmax(-1).tolist() == [*labels, 0][:count]


@pytest.mark.parametrize(
    "word, target, size", [("abc", [1, 2, 3], 4), ("strength", [1], 7)]
)
def test_pairs_are_batched_by_the_longer_side(word, target, size):
    assert CONFIG.size(word, target) == size


def test_no_two_dropouts_of_a_loss_share_a_key(params, monkeypatch):
    keys = []

    def dropout(key, x, rate):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return x

    def rnn(*given, key, **options):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return run(*given, **options)

    run = attention.ost.rnn
    monkeypatch.setattr(attention, "_dropout", dropout)
    monkeypatch.setattr(attention.ost, "rnn", rnn)
    config = dataclasses.replace(CONFIG, dropout=0.5)
    config.loss(params, batch_of(PAIRS), jax.random.key(0))
    # Between the encoder's layers, after them, and after each of the decoder's.
    assert len(keys) == len(set(keys)) == 4
