import itertools
import math
from collections import Counter

import numpy as np
import pytest

from ostinato.apps.g2p import alignment, joint
from ostinato.apps.g2p.batches import LETTER_IDS
from ostinato.apps.g2p.ngram import EDGE, NGram

BASE = 4


def rows_of(word, labels):
    """Yield every row of units of a pair."""
    for counts in itertools.product(range(alignment.MOST + 1), repeat=len(word)):
        if sum(counts) == len(labels):
            left, row = list(labels), []
            for letter, count in zip(word, counts, strict=True):
                first, second = ([left.pop(0) for _ in range(count)] + [0, 0])[:2]
                row.append((LETTER_IDS[letter] * BASE + first) * BASE + second)
            yield row


def random_pairs(count, seed):
    rng = np.random.default_rng(seed)
    words = [
        "".join(rng.choice(list("abc-"), rng.integers(1, 6))) for _ in range(count)
    ]
    labels = [rng.integers(1, BASE, rng.integers(0, 2 * len(w) + 1)) for w in words]
    return words, [tuple(each.tolist()) for each in labels]


def test_a_round_of_learning_counts_all_alignments(monkeypatch):
    monkeypatch.setattr(alignment, "ROUNDS", 1)
    words, labels = random_pairs(30, 0)
    got = alignment.learn(words, labels, BASE)
    weight = {0: 0.1, 1: 1.0, 2: 0.1}
    counts = Counter()
    for word, of_word in zip(words, labels, strict=True):
        rows = list(rows_of(word, of_word))
        shares = [
            math.prod(weight[bool(u // BASE % BASE) + bool(u % BASE)] for u in row)
            for row in rows
        ]
        for row, share in zip(rows, shares, strict=True):
            for unit in row:
                counts[unit] += share / sum(shares)
    want = np.full(alignment.num_codes(BASE), 0.0)
    want[list(counts)] = list(counts.values())
    want = np.maximum(want / want.sum(), alignment.RARE)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_learning_does_not_make_the_pairs_less_likely(monkeypatch):
    words, labels = random_pairs(40, 1)

    def likelihood(rounds):
        monkeypatch.setattr(alignment, "ROUNDS", rounds)
        probs = alignment.learn(words, labels, BASE).astype(np.float64)
        return sum(
            math.log(sum(math.prod(probs[row]) for row in rows_of(word, of_word)))
            for word, of_word in zip(words, labels, strict=True)
        )

    found = [likelihood(rounds) for rounds in (1, 2, 4, 8)]
    assert found == sorted(found)


def test_the_units_of_a_pair_are_the_most_likely_ones():
    words, labels = random_pairs(40, 2)
    probs = np.random.default_rng(0).uniform(0.01, 1, alignment.num_codes(BASE))
    for word, of_word, got in zip(
        words, labels, alignment.align(probs, words, labels, BASE), strict=True
    ):
        assert got is not None
        rows = list(rows_of(word, of_word))
        assert got.tolist() in rows
        best = max(math.prod(probs[row]) for row in rows)  # of "aa", two may be as good
        assert math.prod(probs[got]) == pytest.approx(best)


def test_silent_letters_and_double_phonemes_are_learned():
    words = ["ba", "b", "bah", "ah", "ax", "xa", "a"] * 3
    labels = [(1, 2), (1,), (1, 2), (2,), (2, 3, 1), (3, 1, 2), (2,)] * 3
    probs = alignment.learn(words, labels, BASE)
    (units,) = alignment.align(probs, ["xah"], [(3, 1, 2)], BASE)
    x, a, h = (LETTER_IDS[letter] * BASE**2 for letter in "xah")
    assert units is not None
    assert units.tolist() == [x + 3 * BASE + 1, a + 2 * BASE, h]


def test_pairs_with_too_many_phonemes_have_no_units():
    probs = alignment.learn(["a"], [(1,)], BASE)
    found = alignment.align(probs, ["a", "a", "ab"], [(1, 1, 1), (), (2,)], BASE)
    assert found[0] is None
    assert [len(units) for units in found[1:]] == [1, 2]
    assert alignment.align(probs, [], [], BASE) == []
    aligned = joint.align(["a"], [(1, 1, 1)], BASE)
    assert aligned.units.tolist() == [EDGE]
    got = joint.JointNGram(aligned, BASE).log_prob(["a", "b"], [(1, 1, 1), (1,)])
    assert got[0] == pytest.approx(-4 * math.log(BASE))
    assert np.isfinite(got).all()


def test_long_words_are_aligned():
    words, labels = ["a" * 200, "b" * 30], [(1,) * 350, (2,) * 60]
    probs = alignment.learn(words, labels, BASE)
    assert np.isfinite(probs).all() and (probs > 0).all()
    for units, word in zip(
        alignment.align(probs, words, labels, BASE), words, strict=True
    ):
        assert units is not None and len(units) == len(word)


ROW = np.array([5, 9, EDGE, 5, 9, 9, EDGE, 9, 5, EDGE])


def test_ngram_equals_counts_by_hand():
    # Symbols: the edge, 5, 9, and one that stands for all others. Of order 1 count the
    # symbols that are seen before each: before the edge 5 and 9, before 5 the edge and
    # 9, before 9 the edge, 5 and 9. So two counts are 2, one is 3, and none is 1: the
    # discount is the least one, 0.1 for each.
    def unigram(kinds):
        return (kinds - 0.1) / 7 + 3 * 0.1 / 7 / 4

    # Of order 2: edge-5 2, edge-9 1, 5-9 2, 5-edge 1, 9-edge 2, 9-9 1, 9-5 1. Of these
    # counts, four are 1 and three are 2.
    discount = 4 / (4 + 2 * 3)
    start_5 = (2 - discount + 2 * discount * unigram(2)) / 3
    then_9 = (2 - discount + 2 * discount * unigram(3)) / 3
    then_edge = (2 - discount + 3 * discount * unigram(2)) / 4
    got = NGram(ROW, order=2).log_prob(np.array([5, 9, EDGE]))
    np.testing.assert_allclose(np.exp(got), [start_5 * then_9 * then_edge])


@pytest.mark.parametrize("order", [1, 2, 4])
def test_ngram_probabilities_sum_to_one(order):
    model = NGram(ROW, order)
    symbols = 5, 9, 7  # 7 stands for all symbols that were not seen
    sums = [
        np.exp(model.log_prob(np.array([[*s, EDGE] for s in found]).ravel())).sum()
        for found in (list(itertools.product(symbols, repeat=n)) for n in range(11))
    ]
    # Longer and longer sequences have a share of what is left that hardly changes.
    rest = sums[-1] ** 2 / (sums[-2] - sums[-1])
    assert sum(sums) + rest == pytest.approx(1, abs=1e-3)
    assert len(model.log_prob(np.array([], np.int64))) == 0


def kneser_ney(sequences, order):
    """Return the probability of a symbol after others, by dictionaries."""
    rows = [(EDGE,) * (order - 1) + s + (EDGE,) for s in sequences]
    longest = Counter(
        row[i : i + order] for row in rows for i in range(len(row) - order + 1)
    )
    counts = {order: longest}
    for n in range(order - 1, 0, -1):  # different symbols before each n-gram
        counts[n] = Counter(gram[1:] for gram in {g[-n - 1 :] for g in longest})
    base = len({symbol for s in sequences for symbol in s}) + 2

    def prob(context, symbol):
        lower = prob(context[1:], symbol) if context else 1 / base
        of = counts[len(context) + 1]
        seen = Counter(of.values())
        discount = max(seen[1] / max(seen[1] + 2 * seen[2], 1), 0.1)
        after = [count for gram, count in of.items() if gram[:-1] == context]
        if not after:
            return lower
        own = of[(*context, symbol)]
        kept = own - discount if own else 0
        return (kept + discount * len(after) * lower) / sum(after)

    return prob


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_ngram_equals_dictionaries(order):
    rng = np.random.default_rng(order)
    draw = lambda most: tuple(rng.integers(1, most, rng.integers(0, 6)).tolist())  # noqa: E731
    sequences, others = [draw(4) for _ in range(15)], [draw(6) for _ in range(40)]
    prob = kneser_ney(sequences, order)
    want = []
    for other in others:
        row = (EDGE,) * (order - 1) + other + (EDGE,)
        ends = range(order - 1, len(row))
        want.append(sum(math.log(prob(row[e - order + 1 : e], row[e])) for e in ends))
    rows = [
        np.array([i for s in part for i in (*s, EDGE)]) for part in (sequences, others)
    ]
    np.testing.assert_allclose(NGram(rows[0], order).log_prob(rows[1]), want)
