import numpy as np
import pytest

from ostinato.apps.g2p import ranking
from ostinato.apps.g2p.ranking import Candidate, rank


def test_rank_weighs_the_opinions():
    found = [[Candidate((1,), -2.0, (-9.0, 0.0)), Candidate((2,), -3.0, (-4.0, -1.0))]]
    weights = [(0.1, 0.0), (0.3, 0.0), (0.3, 0.6)]
    assert [rank(found, w) for w in weights] == [[(1,)], [(2,)], [(1,)]]
    assert rank([], (0.3, 0.6)) == []


def draw(words, weights, seed=0):
    """Draw candidates, of which one is correct, as likely as `fit` takes it to be."""
    rng = np.random.default_rng(seed)
    found, correct = [], []
    for _ in range(words):
        terms = rng.normal(0, 3, (rng.integers(1, 7), 1 + len(weights)))
        logits = terms @ [1.0, *weights]
        right = rng.choice(len(terms), p=np.exp(logits) / np.exp(logits).sum())
        found.append([Candidate((i,), t[0], tuple(t[1:])) for i, t in enumerate(terms)])
        correct.append([i == right for i in range(len(terms))])
    return found, correct


def loss(weights, scale, found, correct):
    """Compute what `fit` minimises, word by word."""
    lost = 0.0
    for candidates, good in zip(found, correct, strict=True):
        logits = scale * np.array(
            [c.score + np.dot(weights, c.opinions) for c in candidates]
        )
        if any(good):
            probs = np.exp(logits) / np.exp(logits).sum()
            lost -= np.log(probs[np.array(good)].sum())
    first = np.array([1.0] + [ranking.FIRST_WEIGHT] * len(weights))
    away = scale * np.array([1.0, *weights]) - first
    return lost + ranking.PULL * away @ away


def test_fit_finds_the_weights_that_candidates_were_drawn_with():
    found, correct = draw(4000, (0.8, 0.0))
    got = ranking.fit(found, correct, 2)
    np.testing.assert_allclose(got, (0.8, 0.0), atol=0.06)


@pytest.mark.parametrize("words", [1, 5, 40])
def test_fitted_weights_have_the_least_loss(words):
    found, correct = draw(words, (0.6, 0.3), seed=words)
    correct[0] = [True] * len(correct[0])  # several may be correct, or none
    correct[-1] = [False] * len(correct[-1])
    got = np.array(ranking.fit(found, correct, 2))
    scales = np.linspace(0.1, 3, 400)
    best = min(loss(got, scale, found, correct) for scale in scales)
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = np.maximum(got + rng.normal(0, 0.2, 2), 0)
        assert best <= min(loss(other, s, found, correct) for s in scales) + 1e-3


def test_without_correct_candidates_the_first_weights_stay():
    found, correct = draw(3, (0.6,))
    none = [[False] * len(good) for good in correct]
    assert ranking.fit(found, none, 1) == (ranking.FIRST_WEIGHT,)
    assert ranking.fit([], [], 2) == (ranking.FIRST_WEIGHT,) * 2


def test_processes_with_a_share_of_the_words_find_the_same_weights():
    found, correct = draw(60, (0.6, 0.3))
    want = ranking.fit(found, correct, 2)

    def total(mine):  # two processes with the same words have twice the loss
        return 2 * mine

    twice = ranking.fit(found[::2] * 2, correct[::2] * 2, 2)
    assert ranking.fit(found[::2], correct[::2], 2, total) == pytest.approx(
        twice, abs=2e-3
    )
    assert want != twice
