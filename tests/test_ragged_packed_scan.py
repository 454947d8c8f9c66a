"""Packed scans: how examples are assigned to lanes, and that results do not show it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import CountedJit, fast_jit
from jax import lax
from tolerance import assert_close

from ostinato import ragged
from ostinato.ragged.schedule import packed_scan

D, BATCH, LONGEST, CAPACITY = 2, 5, 9, 21
LENGTHS = {
    "mixed": (3, 0, 9, 1, 6),  # one is longer than its share of the tokens
    "full": (1, 9, 9, 1, 1),
    "one": (0, 0, 9, 0, 0),
    "short": (1, 1, 0, 1, 1),
    "empty": (0, 0, 0, 0, 0),
}
rng = np.random.default_rng(8)
W = rng.standard_normal((D, D))
ROWS = rng.standard_normal((CAPACITY, D))
START = rng.standard_normal((BATCH, D))
SCALE = 1 + rng.random(BATCH)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Make chunks so small that some are run and some are not."""
    monkeypatch.setattr(packed_scan, "CHUNK", 3)


def rnn(x, h, scale, w, *, reverse):
    """Run a recurrence with an initial state and a factor of the example's own."""

    def step(h, a):
        h = jnp.tanh(scale * (h @ w) + a)
        return h, 2 * h

    return lax.scan(step, h, x, reverse=reverse)


def loss(h, y):
    """Return the loss of one example."""
    position = jnp.arange(y.shape[0], dtype=y.dtype)
    return jnp.sum(h**2) + jnp.sum(jnp.cos(position)[:, None] * y)


@functools.cache
def alone(reverse):
    """Return the results of one example and their gradients."""

    def total(*args):
        h, y = rnn(*args, reverse=reverse)
        return loss(h, y), (h, y)

    return fast_jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))


@functools.cache
def together(number, reverse):
    run = functools.partial(rnn, reverse=reverse)
    options = {"scan": "packed", "lanes": number, "min_length": 0}
    mapped = ragged.vmap(run, (0, 0, 0, None), **options)
    losses = ragged.vmap(loss, min_length=0)

    def total(data, h, scale, w, lengths):
        batch = ragged.RaggedArray(data, lengths, max_length=LONGEST)
        h, y = mapped(batch, h, scale, w)
        return losses(h, y).sum(), (h, y)

    return CountedJit(jax.grad(total, (0, 1, 2, 3), has_aux=True))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("number", [1, 2, 3, BATCH, 4 * BATCH])
def test_packed_scans_equal_each_example_alone(number, reverse):
    """Values and gradients, of all lengths by one compiled function."""
    run = together(number, reverse)
    for lengths in LENGTHS.values():
        ends = np.cumsum(lengths)
        data = np.where(np.arange(CAPACITY)[:, None] < ends[-1], ROWS, np.nan)
        examples = np.split(ROWS, ends)[:BATCH]
        got, (h, y) = run(data, START, SCALE, W, np.asarray(lengths, np.int32))
        each = [
            alone(reverse)(x, start, scale, W)
            for x, start, scale in zip(examples, START, SCALE, strict=True)
        ]
        assert_close(h, [out[1][0] for out in each])
        for a, out in zip(y.to_list(), each, strict=True):
            assert_close(a, out[1][1])
        unused = np.zeros((CAPACITY - ends[-1], D))
        tokens = np.concatenate([out[0][0] for out in each] + [unused])
        assert_close(got[0], tokens, terms=100)
        for k in (1, 2):
            assert_close(got[k], [out[0][k] for out in each], terms=100)
        assert_close(got[3], sum(out[0][3] for out in each), terms=100)
    assert run.traces == 1


def test_batch_without_examples():
    none = ragged.RaggedArray(ROWS[:4], np.zeros(0, np.int32), max_length=3)
    run = functools.partial(rnn, reverse=False)
    mapped = ragged.vmap(run, (0, 0, 0, None), scan="packed", lanes=2)
    h, y = fast_jit(mapped)(none, START[:0], SCALE[:0], W)
    assert h.shape == (0, D)
    assert y.to_list() == []


def test_long_examples_are_assigned_first(monkeypatch):
    """Each goes to the lane with fewer steps; the longer lane has all the steps."""
    schedules, original = [], packed_scan._schedule
    monkeypatch.setattr(
        packed_scan,
        "_schedule",
        lambda *args: schedules.append(original(*args)) or schedules[-1],
    )
    scan = functools.partial(lax.scan, lambda c, a: (c + a, c), jnp.zeros(1))
    mapped = ragged.vmap(scan, scan="packed", lanes=2, min_length=0)

    @fast_jit
    def steps(lengths):
        mapped(ragged.RaggedArray(np.zeros((24, 1)), lengths, max_length=9))
        assert schedules[-1].position.shape == (21, 2)
        return schedules[-1].steps

    for lengths, want in {
        (9, 3, 3, 3, 0): 9,
        (3, 3, 3, 0, 9): 9,
        (5, 4, 3, 3, 3): 10,
        (1, 0, 0, 0, 0): 1,
    }.items():
        assert steps(np.asarray(lengths, np.int32)) == want
