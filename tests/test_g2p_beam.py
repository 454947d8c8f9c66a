import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps.g2p.beam import EDGE, beam_search

LABELS, LONGEST = 4, 3


def log_softmax(scores):
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def tables(rows, seed=0):
    """Draw log probabilities of a label after another one, by word and step."""
    shape = (rows, LONGEST + 1, LABELS, LABELS)
    return log_softmax(np.random.default_rng(seed).normal(0, 2, shape))


def search(table, width, active=None, most=LONGEST):
    rows = len(table)
    active = jnp.ones(rows, bool) if active is None else jnp.array(active)

    def step(states, labels, t):
        # The state is the word, and a count of steps that must follow its hypothesis.
        row, count = states
        return (row, count + 1), jnp.asarray(table, jnp.float32)[row, count, labels]

    row = jnp.repeat(jnp.arange(rows), width)
    run = jax.jit(
        lambda: beam_search(
            step,
            (row, 0 * row),
            active=active,
            width=width,
            most=jnp.broadcast_to(jnp.asarray(most), rows),
            longest=LONGEST,
        )
    )
    return [np.asarray(a) for a in run()]


def probability(table, labels):
    """Compute the log probability of labels and the end."""
    pairs = itertools.pairwise((EDGE, *labels, EDGE))
    return sum(table[t, a, b] for t, (a, b) in enumerate(pairs))


def every_sequence():
    for n in range(LONGEST + 1):
        yield from itertools.product(range(1, LABELS), repeat=n)


def spelled(labels):
    return tuple(labels[labels != EDGE].tolist())


@pytest.mark.parametrize("seed", range(3))
def test_wide_beam_finds_every_sequence_in_order(seed):
    table = tables(rows=2, seed=seed)
    count = len(list(every_sequence()))
    labels, scores = search(table, width=count + 5)
    for row in range(2):
        want = {s: probability(table[row], s) for s in every_sequence()}
        got = [spelled(found) for found in labels[row, :count]]
        assert got == sorted(want, key=lambda s: -want[s])
        np.testing.assert_allclose(
            scores[row, :count], [want[s] for s in got], rtol=1e-5
        )
        assert np.all(scores[row, count:] == -np.inf)


def test_width_one_takes_the_most_likely_label_in_every_step():
    table = tables(rows=20)
    labels, scores = search(table, width=1)
    for row in range(20):
        want, last = [], EDGE
        for t in range(LONGEST):
            last = int(table[row, t, last].argmax())
            if last == EDGE:
                break
            want.append(last)
        assert spelled(labels[row, 0]) == tuple(want)
        np.testing.assert_allclose(
            scores[row, 0], probability(table[row], want), rtol=1e-5
        )


def test_a_narrow_beam_is_between_greedy_and_exact():
    table = tables(rows=50)
    best = [search(table, width)[1][:, 0] for width in (1, 3, 40)]
    assert np.all(best[1] <= best[2] + 1e-5)
    assert best[0].mean() < best[1].mean() <= best[2].mean()


def test_rows_without_a_word_find_nothing():
    table = tables(rows=3)
    labels, scores = search(table, 2, active=[True, False, True])
    want_labels, want_scores = search(table, 2)
    assert np.all(scores[1] == -np.inf)
    np.testing.assert_array_equal(labels[[0, 2]], want_labels[[0, 2]])
    np.testing.assert_array_equal(scores[[0, 2]], want_scores[[0, 2]])


def test_it_stops_when_everything_has_ended():
    steps = []

    def step(states, labels, t):
        jax.debug.callback(lambda t: steps.append(int(t)), t)
        return states, jnp.where(jnp.arange(3) == EDGE, 0.0, -jnp.inf) + 0 * states

    search_all = jax.jit(
        lambda: beam_search(
            step,
            jnp.zeros((4, 1)),
            active=jnp.ones(2, bool),
            width=2,
            most=jnp.full(2, 50),
            longest=50,
        )
    )
    jax.block_until_ready(search_all())
    jax.effects_barrier()
    assert steps == [0]
