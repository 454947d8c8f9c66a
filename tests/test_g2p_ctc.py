import itertools
import math

import jax
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps.g2p import batches, ctc, ctc_search, joint
from ostinato.apps.g2p.batches import Batch, letter_ids, pad

CONFIG = ctc.Config(hidden_size=3, num_layers=1, phonemes=("S", "T"))
GRADIENT = jax.jit(jax.value_and_grad(CONFIG.loss))


def random_params():
    params = CONFIG.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(params))
    return ctc.Params(
        *map(lambda k, p: jax.random.normal(k, p.shape, p.dtype), keys, params)
    )


def batch_of(pairs, letters, rows):
    words, targets = zip(*pairs, strict=True)
    return Batch(*pad(letter_ids(words), letters, rows), *pad(targets, 4, rows))


def collapse(path):
    merged = [symbol for symbol, _ in itertools.groupby(path)]
    return [symbol for symbol in merged if symbol != ctc_search.BLANK]


def loss_by_all_paths(log_probs, target):
    frames, symbols = log_probs.shape
    total = 0.0
    for path in itertools.product(range(symbols), repeat=frames):
        if collapse(path) == target:
            total += math.exp(sum(log_probs[t, s] for t, s in enumerate(path)))
    return -math.log(total)


def test_loss_is_the_mean_over_words_of_the_sum_over_paths():
    params, pairs = random_params(), [("abc", [1, 2, 2]), ("it", [2])]
    log_probs = ctc.Reader(CONFIG).log_probs(params, [word for word, _ in pairs])
    targets = [target for _, target in pairs]
    want = np.mean(list(map(loss_by_all_paths, log_probs, targets)))
    got, _ = GRADIENT(params, batch_of(pairs, letters=5, rows=2))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_padding_changes_neither_loss_nor_gradient():
    params, pairs = random_params(), [("abc", [1, 2]), ("it", [2])]
    sizes = [(5, 2), (7, 5)]
    results = [GRADIENT(params, batch_of(pairs, *size)) for size in sizes]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results
    )


def test_a_batch_of_empty_rows_has_no_loss_and_no_gradient():
    empty = Batch(*pad([], 5, 2), *pad([], 4, 2))
    value, grads = GRADIENT(random_params(), empty)
    assert value == 0
    assert all(not np.any(grad) for grad in grads)


@pytest.mark.parametrize("bounds", [(), (2, 5)], ids=["free", "buckets"])
def test_reader_keeps_the_order_of_words_of_any_length(bounds):
    params = random_params()
    words = ["abcde", "it", "a", "somewhatlongerword", "be"]
    together = ctc.Reader(CONFIG, bounds=bounds).log_probs(params, words)
    for word, log_probs in zip(words, together, strict=True):
        (alone,) = ctc.Reader(CONFIG).log_probs(params, [word])
        assert log_probs.shape == (2 * len(word), 3)
        np.testing.assert_allclose(log_probs, alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)


def test_reader_of_more_words_than_fit_one_batch():
    words = ["it", "a"] * (batches.ROWS // 2 + 3)
    found = ctc.Reader(CONFIG).log_probs(random_params(), words)
    assert [len(log_probs) for log_probs in found] == [4, 2] * (len(words) // 2)


@pytest.mark.parametrize(
    "word, target, size",
    [("ab", [1, 2, 1, 2], 2), ("a", [1, 2, 1], None), ("ab", [1, 2, 2, 1], None)],
)
def test_a_repeated_phoneme_needs_a_blank_between(word, target, size):
    assert CONFIG.size(word, target) == size


def test_beam_tells_what_the_ngram_model_says():
    words = ["abc", "it"]
    aligned = joint.align(["ab", "cab"] * 9, [[1, 2], [2, 1, 2]] * 9, base=3)
    reader, params = ctc.Reader(CONFIG, aligned), random_params()
    found = reader.beam(params, words)
    ngram = joint.JointNGram(aligned, base=3)
    for word, candidates, log_probs in zip(
        words, found, reader.log_probs(params, words), strict=True
    ):
        assert [c[:2] for c in candidates] == ctc_search.beam(log_probs)
        labels = [c.labels for c in candidates]
        want = ngram.log_prob([word] * len(labels), labels)
        np.testing.assert_allclose([c.opinions for c in candidates], want[:, None])
    assert reader.beam(params, []) == []


def test_letter_ids_start_after_the_padding():
    assert letter_ids(["'-a"]) == [[1, 2, 3]]
    assert len(batches.LETTER_IDS) == 28
