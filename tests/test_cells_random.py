"""Dropout and Zoneout: random choices around a cell."""

import dataclasses
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    HIDDEN,
    INPUTS,
    STEPS,
    CellCase,
    compiled_net,
    count,
    make,
    net,
    numpy_tree,
)
from closures import fast_jit
from oracles import cells64
from tolerance import assert_close

import ostinato as ost
from ostinato import cells
from ostinato.cells import sampling

KEY = jax.random.key(0)


def close(got, want, terms=500):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=np.float64, terms=terms)


def test_dropout_keeps_one_mask_for_the_sequence():
    inner = cells.LSTM(INPUTS, HIDDEN)
    cell = cells.Dropout(inner, inputs=0.3, states=0.4, outputs=0.5)
    params, x, states = make(CellCase(cell, None))
    drawn = cell.sample(jax.random.key(3), BATCH)
    for mask in drawn.masks:
        assert mask.dtype == bool and mask.any() and not mask.all()
    got = jax.tree.map(np.asarray, compiled_net(drawn, params, x, states))

    m_x, m_h, m_y = (np.asarray(m, np.float64) for m in drawn.masks)
    p, x, states = numpy_tree((params, x, states))
    for b in range(BATCH):
        state = jax.tree.map(lambda a, b=b: a[b], states)
        for t in range(STEPS):
            given = (state[0] * m_h[b] / 0.6, state[1])
            state, out = cells64.lstm(p, given, x[b, t] * m_x[b] / 0.7)
            close(got.outputs[b, t], out * m_y[b] / 0.5)
        close(jax.tree.map(lambda a, b=b: a[b], got.states), state)


KEEPING = {  # cells whose new h reads the old one directly, not only in products
    "gru": lambda inner: inner,
    "zoneout": lambda inner: cells.Zoneout(inner, 0.25),
    "residual": lambda inner: cells.Residual(inner),
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("reset_after", [True, False])
def test_dropout_of_states_leaves_what_a_gru_keeps(name, reset_after):
    """Check that the part of h that a GRU keeps is not divided by 1 - rate."""
    inner = cells.GRU(HIDDEN, HIDDEN, reset_after=reset_after)
    cell = cells.Dropout(KEEPING[name](inner), states=0.5)
    params, x, h = make(CellCase(cell, None, (HIDDEN,)))
    drawn = cell.sample(jax.random.key(5), BATCH)
    got = net(drawn, params, x, h)
    mask = np.asarray(drawn.masks.states, np.float64) / 0.5
    p, x, h = numpy_tree((params, x, h))
    w_i, w_h, b_i, b_h, _ = p
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    for t in range(STEPS):
        seen = h * mask
        r_x, z_x, n_x = np.split(x[:, t] @ w_i.T + b_i, 3, -1)
        r_h, z_h, n_h = np.split(seen @ w_h.T + b_h, 3, -1)
        r, z = sigmoid(r_x + r_h), sigmoid(z_x + z_h)
        if reset_after:
            n = np.tanh(n_x + r * n_h)
        else:
            last = slice(2 * HIDDEN, None)
            n = np.tanh(n_x + (r * seen) @ w_h[last].T + b_h[last])
        new = (1 - z) * n + z * h
        h = 0.25 * h + 0.75 * new if name == "zoneout" else new
        close(got.outputs[:, t], h + x[:, t] if name == "residual" else h)


def test_dropout_of_images_drops_channels():
    inner = cells.ConvLSTM(3, 2, (5, 4), (3, 3))
    cell = cells.Dropout(inner, inputs=0.5, states=0.5, outputs=0.5)
    drawn = cell.sample(jax.random.key(1), 4)  # as many sequences as columns
    x = jax.random.normal(jax.random.key(2), (4, 6, 5, 4, 3))
    params = cell.init(jax.random.key(0), x.dtype)
    states = inner.initial_state(4, x.dtype)
    got = ost.recurrent_net(drawn, x, states, params=params).outputs
    m_x, m_h, m_y = (2.0 * np.asarray(m)[:, None, None] for m in drawn.masks)
    for t in range(6):
        seen = (states[0] * m_h, states[1])
        states, y = inner(params, seen, x[:, t] * m_x, 0)
        assert_close(got[:, t], y * m_y, terms=500)


@dataclasses.dataclass(frozen=True)
class FastWeights(cells.SizedCell):
    """A cell whose state is a matrix for each sequence, `[B, F, F]`."""

    input_size: int
    output_size: int

    def init(self, key, dtype=jnp.float32):
        return jnp.full((self.input_size, self.output_size), 0.5, dtype)

    def initial_state(self, batch, dtype=jnp.float32):
        return jnp.zeros((batch, self.output_size, self.output_size), dtype)

    def precompute(self, params, inputs):
        return inputs @ params

    def step(self, params, states, inputs_t, t):
        states = 0.5 * states + inputs_t[:, :, None] * inputs_t[:, None]
        return states, jnp.tanh(jnp.einsum("bij,bj->bi", states, inputs_t))


@pytest.mark.parametrize("backend", [None, "scan"])
def test_dropout_around_a_cell_with_a_matrix_state(backend):
    inner = FastWeights(INPUTS, HIDDEN)
    cell = cells.Dropout(inner, inputs=0.5, states=0.5, outputs=0.5)
    for length in (STEPS, BATCH):  # the latter has as many steps as sequences
        params, x, states = make(CellCase(cell, None))
        x = x[:, :length]
        drawn = cell.sample(jax.random.key(7), BATCH)
        got = compiled_net(drawn, params, x, states, backend=backend)
        m_x, m_h, m_y = (2.0 * np.asarray(m) for m in drawn.masks)
        p, x, state = numpy_tree((params, x, states))
        for t in range(length):
            v = (x[:, t] * m_x) @ p
            state = 0.5 * state * m_h[:, None] + v[:, :, None] * v[:, None]
            close(got.outputs[:, t], np.tanh(np.einsum("bij,bj->bi", state, v)) * m_y)
        close(got.states, state)


def test_dropout_of_states_leaves_what_a_para_gru_keeps():
    inner = cells.ParaGRU(INPUTS, HIDDEN)
    cell = cells.Dropout(inner, states=0.5)
    params, x, h = make(CellCase(cell, None))
    drawn = cell.sample(jax.random.key(5), BATCH)
    got = compiled_net(drawn, params, x, h)
    mask = 2.0 * np.asarray(drawn.masks.states)
    p, x, h = numpy_tree((params, x, h))
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    for t in range(STEPS):
        seen = h * mask
        r, z, n = np.split(x[:, t] @ p.w_ih.T + p.b_ih, 3, -1)
        r, z = sigmoid(r + p.w_hh[0] * seen), sigmoid(z + p.w_hh[1] * seen)
        h = (1 - z) * h + z * np.tanh(n + p.w_hh[2] * (r * seen))
        close(got.outputs[:, t], h)


def test_dropout_around_what_has_no_single_step():
    inner = cells.Bidirectional(cells.LSTM(INPUTS, HIDDEN))
    cell = cells.Dropout(inner, inputs=0.5, outputs=0.5)
    params, x, states = make(CellCase(cell, None))
    drawn = cell.sample(jax.random.key(1), BATCH)
    masks = drawn.masks.inputs, drawn.masks.outputs
    m_x, m_y = (2.0 * np.asarray(m)[:, None] for m in masks)
    for time_major in (False, True):
        order = (lambda a: jnp.swapaxes(a, 0, 1)) if time_major else (lambda a: a)
        got = net(drawn, params, order(x), states, time_major=time_major)
        want = net(inner, params, x * m_x, states)
        close(order(got.outputs), want.outputs * m_y)
    assert not cell.has_step
    stacked = cells.Stack((cell, cells.LSTM(2 * HIDDEN, HIDDEN)))
    params, x, states = make(CellCase(stacked, None))
    close(
        net(stacked, params, x, states, recompute=True),
        net(stacked, params, x, states),
    )


NESTED = {
    "dropout of zoneout": lambda: cells.Dropout(
        cells.Zoneout(cells.GRU(3, 4), 0.5), inputs=0.5
    ),
    "stack of dropout": lambda: cells.Stack(
        (cells.GRU(3, 4), cells.Dropout(cells.GRU(4, 4), outputs=0.5))
    ),
    "both directions": lambda: cells.Bidirectional(
        cells.Residual(cells.Dropout(cells.GRU(3, 3), states=0.5))
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_sample_draws_all_choices_in_a_cell(name):
    cell = NESTED[name]()
    params, x = cell.init(KEY), jnp.ones((5, 6, 3), jnp.float32)

    def run(cell):
        h_0 = cell.initial_state(5)
        return np.asarray(ost.recurrent_net(cell, x, h_0, params=params).outputs)

    first, again, other = (
        cells.sample(cell, jax.random.key(n), batch=5) for n in (0, 0, 1)
    )
    assert not sampling.is_random(first) and sampling.is_random(cell)
    assert (run(first) == run(again)).all()
    assert (run(first) != run(other)).any() and (run(first) != run(cell)).any()
    kept = cells.sample(first, jax.random.key(2), batch=5)  # they are drawn already
    assert (run(kept) == run(first)).all()
    plain = cells.GRU(3, 4)
    assert cells.sample(plain, KEY, 5) is plain
    with pytest.raises(TypeError, match="`cell` must be a cell"):
        cells.sample(3, KEY, 5)
    with pytest.raises(TypeError, match="key"):
        cells.sample(cell, 3.5, 5)


def test_every_mask_of_dropout_is_drawn_for_itself():
    cell = cells.Dropout(cells.LSTM(64, 64), inputs=0.5, states=0.5, outputs=0.5)
    masks = [np.asarray(m) for m in cell.sample(jax.random.key(0), 8).masks]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).mean() < 0.6


def test_zoneout_chooses_for_each_state():
    cell = cells.Zoneout(cells.LSTM(1, 256), 0.5, 0.5).sample(jax.random.key(0))
    params = jax.tree.map(lambda a: jnp.full_like(a, 0.1), cell.init(cell.key))
    start = jax.tree.map(lambda a: a + 7.0, cell.initial_state(1))
    (h, c), _ = cell(params, start, jnp.ones((1, 1), jnp.float32), 0)
    kept = [np.asarray(a[0] == 7.0) for a in (h, c)]
    assert all(0.4 < k.mean() < 0.6 for k in kept)
    assert 0.4 < (kept[0] == kept[1]).mean() < 0.6


def test_dropout_draws_anew_and_repeats():
    cell = cells.Dropout(cells.GRU(INPUTS, 200), outputs=0.25)
    one, same, other = (
        cell.sample(jax.random.key(k), BATCH).masks.outputs for k in (0, 0, 1)
    )
    assert bool((one == same).all()) and not bool((one == other).all())
    assert 0.65 < float(one.mean()) < 0.85
    assert cell.sample(jax.random.key(0), BATCH).masks.inputs is None


def test_dropout_is_its_cell_in_evaluation():
    inner = cells.LSTM(INPUTS, HIDDEN)
    cell = cells.Dropout(inner, 0.5, 0.5, 0.5)
    params, x, states = make(CellCase(cell, None))
    close(compiled_net(cell, params, x, states), compiled_net(inner, params, x, states))
    jaxpr = jax.make_jaxpr(lambda p: net(cell, p, x, states))(params).jaxpr
    assert count("ostinato_rnn", jaxpr) == 1
    assert hash(cell) == hash(cells.Dropout(inner, 0.5, 0.5, 0.5))


@pytest.mark.parametrize("inner", [cells.LSTM(INPUTS, 50), cells.GRU(INPUTS, 50)])
def test_zoneout_keeps_some_units_of_the_old_state(inner):
    has_c = isinstance(inner, cells.LSTM)
    cell = cells.Zoneout(inner, 0.3, 0.5 if has_c else 0.0)
    params, x, states = make(CellCase(cell, None))
    key = jax.random.key(9)
    drawn = cell.sample(key)
    got = compiled_net(drawn, params, x, states, return_all_states=True)
    again = compiled_net(drawn, params, x, states, recompute=("gates",))
    close(again.outputs, got.outputs)
    everything = jax.tree.map(
        lambda first, rest: np.concatenate([first[:, None], rest], axis=1),
        states,
        got.all_states,
    )
    one_step, kept_shares = fast_jit(inner), []
    for t in range(STEPS):
        before = jax.tree.map(lambda a, t=t: a[:, t], everything)
        after = jax.tree.map(lambda a, t=t: a[:, t + 1], everything)
        fresh, _ = one_step(params, before, np.asarray(x)[:, t], t)
        trees = (before, after, numpy_tree(fresh))
        leaves = [jax.tree.leaves(tree) for tree in trees]
        for old, new, candidate in zip(*leaves, strict=True):
            kept = old == new
            np.testing.assert_allclose(new[~kept], candidate[~kept], rtol=1e-12)
            kept_shares.append(kept.mean())
    of_h = kept_shares[:: 1 + has_c]
    assert 0.2 < np.mean(of_h) < 0.4
    assert not np.allclose(of_h, of_h[0])  # drawn anew at each step
    if has_c:
        assert 0.4 < np.mean(kept_shares[1::2]) < 0.6


@pytest.mark.parametrize("cell", ["dropout", "zoneout"])
def test_random_cells_hold_under_jit_and_grad(cell):
    inner = cells.LSTM(INPUTS, HIDDEN)

    def drawn(key):
        if cell == "dropout":
            return cells.Dropout(inner, 0.2, 0.2, 0.2).sample(key, BATCH)
        return cells.Zoneout(inner, 0.2, 0.2).sample(key)

    params, x, states = make(CellCase(inner, None))

    def loss(params, key):
        return jnp.sum(jnp.sin(net(drawn(key), params, x, states).outputs))

    key = jax.random.key(1)
    value = fast_jit(loss)
    grad = fast_jit(jax.grad(loss))(params, key)
    np.testing.assert_allclose(value(params, key), loss(params, key), rtol=1e-12)
    step = 1e-6 * params.w_hh
    slope = value(params._replace(w_hh=params.w_hh + step), key)
    slope -= value(params._replace(w_hh=params.w_hh - step), key)
    np.testing.assert_allclose(
        slope / 2, np.sum(grad.w_hh * step), rtol=1e-4, atol=1e-12
    )
