"""The largest elements of an array, and beam searches, in the native loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
T = 4


@pytest.fixture(autouse=True)
def any_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def check(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def is_native(step, x, states, params, **options):
    told = ost.explain(step, x, states, params=params, backend="cpu", **options)
    return "backward" in str(told) and "xla" not in str(told)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_largest_elements_are_those_of_numpy(count):
    """Of equal ones the first one comes first; NaN comes before all others."""
    rows = np.array([
        [3.0, 1, 3, 2, 3, 1, 2],
        [-np.inf, -np.inf, 0, -np.inf, -np.inf, -np.inf, -np.inf],
        [1, np.nan, np.inf, 5, np.nan, -np.inf, np.inf],
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        [7, 6, 5, 4, 3, 2, 1],
    ])  # fmt: skip
    x = np.stack([rows, rows[::-1]], 1)

    def step(p, h, x, t):
        values, places = lax.top_k(x, count)
        return h + 1, (values, places)

    out = ost.recurrent_net(step, x, jnp.zeros((5, 1)), backend="cpu")
    first = np.where(np.isnan(x), -1, 1)
    order = np.lexsort((-np.nan_to_num(x, nan=0, posinf=1e9, neginf=-1e9), first), -1)
    np.testing.assert_array_equal(out.outputs[1], order[..., :count])
    wanted = np.take_along_axis(x, order, -1)[..., :count]
    np.testing.assert_array_equal(out.outputs[0], wanted)


@pytest.mark.parametrize("batch", [1, 3, 18])
def test_gradients_of_the_largest_elements(batch):
    rng = np.random.default_rng(0)
    x, h = rng.standard_normal((batch, T, 9)), rng.standard_normal((batch, 9))
    w = rng.standard_normal((3, 9))

    def step(w, h, x, t):
        values, places = lax.top_k(h + x, 3)
        odd = (jnp.sum(places, -1, keepdims=True) % 3).astype(x.dtype)
        h = jnp.tanh(0.5 * x + values @ w + odd)
        return h, values

    def slopes(backend):
        def loss(w, h, x):
            lengths = np.array([4, 0, 2] * 6)[:batch]
            net = dict(params=w, backend=backend, seq_lengths=lengths)
            out = ost.recurrent_net(step, x, h, **net)
            return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states**2)

        return fast_jit(jax.value_and_grad(loss, (0, 1, 2)))(w, h, x)

    check(*map(slopes, ("cpu", "scan")))


BEAM, WORDS, H = 3, 11, 6


def beam_search(p, states, x, t):
    """Advance the best hypotheses by a word; the last word ends one."""
    h, score, word, ended = states
    h = jnp.tanh(p["table"][word] + h @ p["u"])
    logs = jax.nn.log_softmax(h @ p["out"])
    stays = jnp.where(jnp.arange(WORDS) == 0, 0.0, -1e9)
    logs = jnp.where(ended[..., None], stays, logs)
    total = (score[..., None] + logs).reshape(len(score), -1)
    score, best = lax.top_k(total, BEAM)
    parent, word = best // WORDS, best % WORDS
    h = jnp.take_along_axis(h, parent[..., None], 1)
    ended = jnp.take_along_axis(ended, parent, 1) | (word == 0)
    return (h, score, word, ended), (word, parent, score)


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_a_beam_search_is_that_of_scan(batch):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    params = {"table": draw(WORDS, H), "u": draw(H, H), "out": draw(H, WORDS)}
    states = (
        draw(batch, BEAM, H),
        jnp.where(jnp.arange(BEAM) == 0, 0.0, -1e9) + jnp.zeros((batch, 1)),
        jnp.ones((batch, BEAM), jnp.int32),
        jnp.zeros((batch, BEAM), bool),
    )
    assert is_native(beam_search, None, states, params, length=8)

    def run(backend):
        def of(params):
            lengths = np.array([8, 3] + [5] * 15)[:batch]
            net = dict(params=params, length=8, backend=backend, seq_lengths=lengths)
            return ost.recurrent_net(beam_search, None, states, **net)

        def score(params):
            out = of(params)
            return jnp.sum(out.states[1] * jnp.arange(1.0, BEAM + 1)), out.outputs

        return fast_jit(jax.value_and_grad(score, has_aux=True))(params)

    check(*map(run, ("cpu", "scan")))


def numbers(h):
    return jnp.argmax(h, -1)[:, None] + jnp.arange(3)


@pytest.mark.parametrize(
    "largest, reason",
    [
        (lambda h: lax.top_k(h, 17)[0], "more than 16 of the largest"),
        (lambda h: lax.top_k(h.T, 2)[0].T, "combines different sequences"),
        (lambda h: lax.top_k(numbers(h), 2)[0].astype(h.dtype), "`top_k` of integers"),
    ],
)
def test_other_choices_of_the_largest_run_by_xla(largest, reason):
    def step(w, h, x, t):
        h = jnp.tanh(h @ w + x + jnp.sum(largest(h)))
        return h, h

    rng = np.random.default_rng(0)
    w, h, x = (rng.standard_normal(s) for s in ((20, 20), (20, 20), (20, T, 20)))
    told = ost.explain(step, x, h, params=w)
    assert told.backend == "xla" and reason in told.rejected["cpu"]
    runs = (ost.recurrent_net(step, x, h, params=w, backend=b) for b in (None, "scan"))
    check(*(out.states for out in runs))
