"""Steps that read rows of other sequences, parts of vectors and transposes."""

import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost

native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


B, T = 3, 4


rng = np.random.default_rng(0)


X, H_0, U, V, W = (rng.random(s) for s in [(B, T, 3), (B, 3), (3, 3), 6, (3, 3)])


def next_row(h, x, np):
    """Read another sequence's entry: the last one has its own."""
    rows = np.minimum(np.arange(B) + 1, B - 1)
    return np.tanh(h @ U + x + h[rows, np.argmax(h, -1)][:, None])


def row_after(h, x, np):
    rows = np.arange(B) + 1  # the last one is beyond the end
    i = np.argmax(h, -1)
    if np is jnp:
        read = h.at[rows, i].get(mode="fill", fill_value=0.25)
    else:
        read = np.append(h[rows[:-1], i[:-1]], 0.25)
    return np.tanh(h @ U + x + read[:, None])


def part_for_sequences(h, x, np):
    """Take as many numbers of a vector as there are sequences."""
    v = np.asarray(V)
    return np.tanh(h @ U + x * v[None, :3] + v[3:][:, None])


def transposes(h, x, np):
    """Sort twice, ahead of the loop, with a transposed matrix that only this reads."""
    s = np.sort(np.sort(x, -1) @ W.T, -1)
    return np.tanh(h @ U.T + s)


@pytest.mark.parametrize(
    "step, backend",
    [
        (next_row, None),
        (row_after, None),
        pytest.param(part_for_sequences, "cpu", marks=native),
        pytest.param(transposes, "cpu", marks=native),
        (transposes, "xla"),
    ],
)
def test_rows_parts_and_transposes_equal_numpy(step, backend):
    def run(params, h, x, t):
        h = step(h, x, jnp)
        return h, h

    got = ost.recurrent_net(run, X, jnp.asarray(H_0), backend=backend).outputs
    h = H_0
    for t in range(T):
        h = step(h, X[:, t], np)
        np.testing.assert_allclose(got[:, t], h, rtol=1e-10)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_a_transposed_input_is_not_the_input(backend):
    """There are as many sequences as features, so that the shapes are the same."""
    rng = np.random.default_rng(0)
    w, x, h = (rng.normal(size=s) for s in ((16, 16), (16, 3, 16), (16, 16)))

    def step(w, h, x, t):
        return jnp.tanh(h @ w + x), (x, x.T)

    out = ost.recurrent_net(step, x, h, params=w, backend=backend).outputs
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[1], np.transpose(x, (2, 1, 0)))
