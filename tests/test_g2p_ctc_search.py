import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from ostinato.apps.g2p import ctc_search, metrics


def random_log_probs(frames, symbols, seed):
    scores = np.random.default_rng(seed).normal(0, 2, (frames, symbols))
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def collapse(path):
    merged = [symbol for symbol, _ in itertools.groupby(path)]
    return tuple(symbol for symbol in merged if symbol != ctc_search.BLANK)


def sum_over_all_paths(log_probs):
    """Compute the probability of every label sequence, path by path."""
    frames, symbols = log_probs.shape
    total = defaultdict(float)
    for path in itertools.product(range(symbols), repeat=frames):
        score = sum(log_probs[t, symbol] for t, symbol in enumerate(path))
        total[collapse(path)] += math.exp(score)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_wide_beam_equals_the_sum_over_all_paths(seed):
    log_probs = random_log_probs(5, 4, seed)
    want = sum_over_all_paths(log_probs)
    got = ctc_search.beam(log_probs, width=10_000, min_prob=0.0)
    assert {labels for labels, _ in got} == want.keys()
    np.testing.assert_allclose(
        [math.exp(score) for _, score in got], [want[labels] for labels, _ in got]
    )
    assert [labels for labels, _ in got] == sorted(want, key=lambda q: -want[q])


@pytest.mark.parametrize("seed", range(4))
def test_greedy_collapses_the_best_path(seed):
    log_probs = random_log_probs(6, 3, seed)
    paths = itertools.product(range(3), repeat=6)
    best = max(paths, key=lambda p: sum(log_probs[t, s] for t, s in enumerate(p)))
    assert ctc_search.greedy(log_probs) == collapse(best)


def test_beam_sums_where_greedy_does_not():
    log_probs = np.log([[0.4, 0.35, 0.25], [0.4, 0.35, 0.25]])
    assert ctc_search.greedy(log_probs) == ()
    assert ctc_search.beam(log_probs)[0][0] == (1,)  # 1-, -1 and 11 together


def test_beam_of_a_long_word_does_not_underflow():
    log_probs = random_log_probs(2000, 5, 0)
    labels, score = ctc_search.beam(log_probs, width=2)[0]
    assert labels and -math.inf < score < -500


def test_no_frames_spell_nothing():
    assert ctc_search.greedy(np.empty((0, 3))) == ()
    assert ctc_search.beam(np.empty((0, 3))) == [((), 0.0)]


@pytest.mark.parametrize(
    "a, b, distance",
    [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("abc", "acb", 2)],
)
def test_edit_distance(a, b, distance):
    assert metrics.edit_distance(a, b) == distance
    assert metrics.edit_distance(b, a) == distance


def test_error_rates_take_the_nearest_reference():
    references = {"read": ["RED", "RID"], "a": ["A", "EI"], "ox": ["OKS"]}
    guesses = {"read": "RID", "a": "E", "ox": "OSS"}
    counts = metrics.error_counts(guesses, references)
    rates = metrics.ErrorRates.of(counts)
    # distances 0, 1 (to "A") and 1; lengths 3, 1 and 3
    np.testing.assert_allclose(rates, (100 * 2 / 7, 100 * 2 / 3, 3))
