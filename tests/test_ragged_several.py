"""Several sequences or channels in each example, with lengths of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import one_by_one
from test_ragged_rules import PARTS, batch, equal
from test_returns import gae_loop

import ostinato as ost
from ostinato import ragged


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
def test_advantages_of_several_sequences_in_an_example(time_major, own):
    """Two sequences in each example, along either axis, with lengths of their own."""
    rng = np.random.default_rng(3)
    rewards = [rng.standard_normal((n, 2)) for n in (3, 1, 4)]
    values = [rng.standard_normal((n, 2)) for n in (3, 1, 4)]
    last = rng.standard_normal((3, 2))
    least = np.array([[1, 2], [0, 1], [3, 9]])
    r, v = (ragged.RaggedArray.from_list(a, capacity=10) for a in (rewards, values))

    def run(r, v, last, lengths):
        if not time_major:
            r, v = r.T, v.T
        options = {"seq_lengths": jnp.minimum(lengths, 4)} if own else {}
        found = ost.gae(
            r, v, last, discounts=0.9, lambda_=0.7, time_major=time_major, **options
        ).advantages
        return found if time_major else found.T

    got = ragged.vmap(run)(r, v, last, jnp.asarray(least))
    for k, (a, b) in enumerate(zip(rewards, values, strict=True)):
        lengths = np.minimum(least[k], len(a)) if own else [len(a)] * 2
        full = [np.full(a.T.shape, rate) for rate in (0.9, 0.7, 0.0, 0.0)]
        want = gae_loop(a.T, b.T, last[k], *full, lengths).T
        np.testing.assert_allclose(got[k], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["tokens", "own factor", "lengths"])
@pytest.mark.parametrize("time_major", [False, True])
def test_recurrences_over_several_sequences_in_an_example(time_major, kind):
    """Two sequences in each example, along either axis."""
    rng = np.random.default_rng(3)
    sizes = (3, 1, 4)
    x, a = ([rng.standard_normal((n, 2, 3)) for n in sizes] for _ in range(2))
    h_0, own = rng.standard_normal((3, 2, 3)), rng.standard_normal((3, 3))
    lengths = np.array([[1, 3], [0, 1], [4, 2]])
    tokens = [ragged.RaggedArray.from_list(rows, capacity=10) for rows in (a, x)]

    def run(a, x, h_0, own, lengths):
        if not time_major:
            a, x = a.swapaxes(0, 1), x.swapaxes(0, 1)
        options = {"seq_lengths": lengths} if kind == "lengths" else {}
        a = own if kind == "own factor" else a
        h, h_n = ost.linear_recurrence(a, x, h_0, time_major=time_major, **options)
        return h if time_major else h.swapaxes(0, 1), h_n

    got = ragged.vmap(run)(*tokens, h_0, own, jnp.asarray(lengths))
    for k, n in enumerate(sizes):
        h, state = np.zeros((n, 2, 3)), h_0[k].copy()
        ends = lengths[k] if kind == "lengths" else (n, n)
        for t in range(n):
            factor = own[k][None] if kind == "own factor" else a[k][t]
            inside = (t < np.array(ends))[:, None]
            state = np.where(inside, factor * state + x[k][t], state)
            h[t] = np.where(inside, state, 0)
        np.testing.assert_allclose(got[0][k], h, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got[1][k], state, rtol=1e-12, atol=1e-12)


def test_filters_with_lengths_of_their_own():
    """Channels of an example end before it does; lengths beyond it end with it."""
    b, a = np.array([0.5, 0.2]), np.array([1.0, -0.4])
    lengths = jnp.array([[1, 2, 0, 3], [0, 1, 1, 1], [4, 2, 3, 1]])

    def run(x, lengths):
        return ost.lfilter(b, a, x, axis=0, seq_lengths=lengths)

    def alone(x, lengths):
        y = np.zeros(x.shape)
        for c, n in enumerate(lengths.tolist()):
            for t in range(n):
                before = x[t - 1, c] if t else 0.0
                past = y[t - 1, c] if t else 0.0
                y[t, c] = 0.5 * x[t, c] + 0.2 * before + 0.4 * past
        return y

    got = ragged.vmap(run)(batch(), lengths)
    equal(
        list(got),
        [alone(np.asarray(x), n) for x, n in zip(PARTS, lengths, strict=True)],
    )


def test_a_gradient_of_a_filter_inside():
    """The filter then runs from the end of the example."""
    b, a = jnp.array([0.5, 0.2]), jnp.array([1.0, -0.4])

    def gradient(x, run):
        return jax.grad(lambda x: jnp.sum(jnp.sin(run(x))))(x)

    def filtered(x):
        return ost.lfilter(b, a, x, axis=0)

    def alone(x):
        def step(carry, x_t):
            before, past = carry
            y = b[0] * x_t + b[1] * before - a[1] * past
            return (x_t, y), y

        return jax.lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), x)[1]

    got = ragged.vmap(lambda x: gradient(x, filtered))(batch())
    equal(list(got), one_by_one(lambda x: gradient(x, alone), PARTS))


@pytest.mark.parametrize("own_weights", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
def test_several_sequences_in_an_example(time_major, own, own_weights):
    """Two sequences in each example, along either axis, with lengths of their own."""
    spec = ost.RNNSpec("gru", 3, 2)
    weights = ost.init_weights(jax.random.key(0), spec, jnp.float64)
    scale = np.array([1.0, 0.5, 2.0]) if own_weights else np.float64(1)
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((n, 2, 3)) for n in (3, 1, 4)]
    lengths = np.array([[1, 3], [0, 1], [4, 2]])

    def run(x, lengths, scale):
        x = x if time_major else x.swapaxes(0, 1)
        options = {"seq_lengths": lengths} if own else {}
        y, state = ost.rnn(spec, scale * weights, x, time_major=time_major, **options)
        return y if time_major else y.swapaxes(0, 1), state

    tokens = ragged.RaggedArray.from_list(rows, capacity=10)
    mapped = ragged.vmap(run, in_axes=(0, 0, 0 if own_weights else None))
    y, state = mapped(tokens, jnp.asarray(lengths), scale)
    for k, x in enumerate(rows):
        for b in range(2):
            n = lengths[k, b] if own else len(x)
            factor = scale[k] if own_weights else 1.0
            want = ost.rnn(spec, factor * weights, jnp.asarray(x[:n, b]))
            assert_same = np.testing.assert_allclose
            assert_same(y[k][:n, b], want.y, rtol=1e-12, atol=1e-12)
            assert not np.any(y[k][n:, b])
            assert_same(state[k, :, b], want.state, rtol=1e-12, atol=1e-12)
