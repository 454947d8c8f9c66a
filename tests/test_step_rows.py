"""Steps that read rows of other sequences, parts of vectors and transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from test_step_hunt import assert_same, both, draw, gradient_of

import ostinato as ost
from ostinato._step.integers import computed
from ostinato._step.jaxprs import read

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


pytestmark = native


@pytest.mark.parametrize("batch", [3, 40])
def test_gradients_of_rows_of_sequences_that_end_before_others(batch):
    """Each row of `p` is of a sequence, and so is its gradient, 0 without steps."""
    rng = np.random.default_rng(0)
    p, x, h_0 = (rng.random(s) for s in [(batch, 4), (6, batch, 4), (batch, 4)])
    lengths = np.resize([6, 2, 0], batch)

    def loss(p, scale):
        def step(p, h, x, t):
            h = jnp.tanh(h * p + x)
            return h, h

        out = ost.recurrent_net(
            step, x, jnp.asarray(h_0), params=p, seq_lengths=lengths, time_major=True,
            padding="zero", backend="cpu",
        )  # fmt: skip
        return scale * jnp.sum(out.outputs)

    got = fast_jit(jax.grad(loss))(jnp.asarray(p), 3.0)
    want = np.zeros_like(p)
    for b, length in enumerate(lengths):
        h, slope = h_0[b], np.zeros(4)
        for t in range(length):
            new = np.tanh(h * p[b] + x[t, b])
            slope = (1 - new**2) * (slope * p[b] + h)
            h = new
            want[b] += 3 * slope
    np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.parametrize("batch", [3, 40, 100])
def test_what_all_sequences_have_stays_while_one_of_them_runs(batch):
    lengths = np.where(np.arange(batch) == 1, 6, 2)
    x, p = np.ones((6, batch, 4)), np.arange(1.0, 5)

    def step(p, h, x, t):
        alike = jnp.tanh(p * t.astype(x.dtype))
        return jnp.tanh(h + x), jnp.broadcast_to(alike, x.shape)

    out = ost.recurrent_net(
        step, x, jnp.zeros((batch, 4)), params=p, seq_lengths=lengths, time_major=True,
        padding="zero", backend="cpu",
    ).outputs  # fmt: skip
    for t in range(6):
        want = np.where((t < lengths)[:, None], np.tanh(p * t), 0)
        np.testing.assert_allclose(out[t], want, rtol=1e-10)


def test_numbers_of_sequences_in_another_order_are_no_own_rows():
    """`dimensions` of a reshape were ignored: the rows seemed to be 0, 1, 2, ..."""

    def step(p, h, x, t):
        numbers = jnp.arange(6).reshape(2, 3)
        rows = jax.lax.reshape(numbers, (6,), dimensions=(1, 0))
        h = jnp.tanh(h @ p + x) + h[rows, jnp.argmax(h, -1)][:, None]
        return h, h

    rng = np.random.default_rng(0)
    x, h, p = (rng.standard_normal(shape) for shape in [(6, 4, 3), (6, 3), (3, 3)])
    want, rows = [], np.arange(6).reshape(2, 3).T.ravel()
    got = ost.recurrent_net(step, jnp.asarray(x), jnp.asarray(h), params=p).outputs
    for t in range(4):
        read = h[rows, np.argmax(h, -1)]
        h = np.tanh(h @ p + x[:, t]) + read[:, None]
        want.append(h)
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-12)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize(
    "turned", [lambda x: x[:, ::-1], lambda x: x.swapaxes(1, 2)], ids=["back", "turned"]
)
def test_an_input_in_another_order_is_not_the_input(turned, backend):
    rng = np.random.default_rng(0)
    w, x, h = (rng.normal(size=s) for s in ((16, 16), (3, 5, 16, 16), (3, 16)))

    def step(w, h, x, t):
        return jnp.tanh(h @ w + x[:, 0]), (x, turned(x))

    out = ost.recurrent_net(step, x, jnp.asarray(h), params=w, backend=backend).outputs
    np.testing.assert_array_equal(out[0], x)
    for t in range(5):
        np.testing.assert_array_equal(out[1][:, t], turned(x[:, t]))


@native
@pytest.mark.parametrize("batch", [1, 3])
def test_an_axis_of_size_1_before_that_of_sequences(batch):
    rng = np.random.default_rng(0)
    sizes = (8, 8), (batch, 4, 8), (batch, 8)
    w, x, h = (rng.normal(size=s) for s in sizes)

    def step(w, h, x, t):
        above = jnp.reshape(jnp.tanh(h @ w + x), (1, batch, 8))
        h = jnp.reshape(jnp.sin(above), (batch, 1, 2, 4)).reshape(batch, 8)
        return h, above.reshape(batch, 1, 8)

    out = ost.recurrent_net(step, x, jnp.asarray(h), params=w, backend="cpu").outputs
    for t in range(4):
        want = np.tanh(h @ w + x[:, t])
        h = np.sin(want)
        np.testing.assert_allclose(out[:, t, 0], want, rtol=1e-10)


def heads_first(p, h, t):
    """Return products of each sequence, which are the second axis."""
    heads = h.reshape(len(h), -1, 4).swapaxes(0, 1)
    found = jnp.einsum("nbi,nbi->nb", heads, jnp.sin(heads))
    return jnp.broadcast_to(found.T[:, :, None], (len(h), h.shape[1] // 4, 4))


def shared_square(p, h, t):
    square = jnp.sin(p[:4, :4] * (1 + t)).reshape(1, 4, 4)
    square = jnp.broadcast_to(square, (len(h), 4, 4))
    return jnp.tile(jnp.einsum("bij,bj->bi", square, h[:, :4]), (1, h.shape[1] // 4))


@native
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("function", [heads_first, shared_square])
def test_products_of_values_of_each_sequence(function, batch):
    def step(p, h, x, t):
        more = function(p, h, t.astype(h.dtype)).reshape(h.shape)
        h = jnp.tanh(h @ p + x + more)
        return h, h

    given = draw(0, 12, 12), draw(1, batch, 4, 12), draw(2, batch, 12)
    assert_same(*both(gradient_of(step), *given))


NUMBERS = np.array([[-2, 0, 1], [3, -1, 0]], np.int32)
FLAGS = np.array([[True, False, True], [False, False, True]])
COMPUTED = {
    "rows": lambda x, y, f: jax.lax.broadcasted_iota(jnp.int32, (2, 3), 0),
    "columns": lambda x, y, f: jax.lax.broadcasted_iota(jnp.int8, (2, 3), 1),
    "a row in each": lambda x, y, f: jax.lax.broadcast_in_dim(x, (2, 2, 3), (1, 2)),
    "a column in each": lambda x, y, f: jax.lax.broadcast_in_dim(x, (2, 3, 3), (0, 2)),
    "truth": lambda x, y, f: x.astype(bool),
    "fewer bits": lambda x, y, f: jax.lax.convert_element_type(300 * x, jnp.uint8),
    "equal": lambda x, y, f: x == y,
    "other": lambda x, y, f: x != y,
    "less": lambda x, y, f: x < y,
    "greater": lambda x, y, f: x > y,
    "signs": lambda x, y, f: jnp.sign(x),
    "sums": lambda x, y, f: (x + 2**31 - 4) + y,
    "one of two": lambda x, y, f: jax.lax.select_n(f, x, y),
    "one of three": lambda x, y, f: jax.lax.select_n(jnp.abs(y), x, y, x + y),
    "one for all": lambda x, y, f: jax.lax.select_n(f[0, 1], x, y),
    "in another order": lambda x, y, f: jax.lax.reshape(x, (6,), (1, 0)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_integers_that_are_known_are_those_of_jax(name):
    """The last operation is computed in NumPy from what JAX makes of the others."""
    given = jnp.asarray(NUMBERS), jnp.asarray(NUMBERS % 3 - 1), jnp.asarray(FLAGS)
    jaxpr = jax.make_jaxpr(COMPUTED[name])(*given).jaxpr
    values = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [np.asarray(read(v, values)) for v in eqn.invars]
        made = eqn.primitive.bind(*map(jnp.asarray, inputs), **eqn.params)
        values[eqn.outvars[0]] = made
    got = computed(eqn, inputs)
    assert got.dtype == made.dtype
    np.testing.assert_array_equal(got, made)
