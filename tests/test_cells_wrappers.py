"""Tests of wrappers, stacks and both directions against numpy and their parts."""

import dataclasses
import functools as ft

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    HIDDEN,
    INPUTS,
    LENGTHS,
    STEPS,
    CellCase,
    assert_gradients,
    compiled_net,
    count,
    make,
    net,
    numpy_tree,
    oracle,
    weigh,
)
from closures import fast_jit
from harness import assert_says
from oracles import cells64
from tolerance import assert_close

import ostinato as ost
from ostinato import cells


def close(got, want, terms=500):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=np.float64, terms=terms)


def residual(p, state, x):
    state, out = cells64.lstm(p, state, x)
    return state, out + x


def stack(p, state, x):
    """Run one step of an LSTM, a projected LSTM and a GRU, of different widths."""
    first, x = cells64.lstm(p[0], state[0], x)
    second, x = cells64.lstmp(p[1], state[1], x)
    third, x = cells64.gru(p[2], state[2], x)
    return (first, second, third), x


STACK = cells.Stack(
    [
        cells.LSTM(INPUTS, HIDDEN),
        cells.LSTMP(HIDDEN, 4, proj_size=2),
        cells.GRU(2, 3),
    ]
)


def evaluated_zoneout(p, state, x):
    h, c = state
    (new_h, new_c), _ = cells64.lstm(p, state, x)
    h, c = 0.25 * h + 0.75 * new_h, 0.1 * c + 0.9 * new_c
    return (h, c), h


WRAPPED = {
    "residual": CellCase(cells.Residual(cells.LSTM(INPUTS, INPUTS)), residual),
    "stack": CellCase(STACK, stack),
    "dropout-evaluated": CellCase(
        cells.Dropout(cells.LSTM(INPUTS, HIDDEN), 0.5, 0.5, 0.5), cells64.lstm
    ),
    "zoneout-evaluated": CellCase(
        cells.Zoneout(cells.LSTM(INPUTS, HIDDEN), 0.25, 0.1), evaluated_zoneout
    ),
}
every_wrapper = pytest.mark.parametrize("name", WRAPPED)


@every_wrapper
@pytest.mark.parametrize("padding", ["hold", "drop"])
@pytest.mark.parametrize("recompute", [(), ("gates",), True], ids=str)
def test_sequence_equals_numpy(name, padding, recompute):
    case = WRAPPED[name]
    params, x, states = make(case, lengths=LENGTHS)
    options = dict(padding=padding, recompute=recompute)
    got = compiled_net(case.cell, params, x, states, LENGTHS, **options)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    close(got[:2], want[:2])


@every_wrapper
def test_gradients_equal_finite_differences(name):
    case = WRAPPED[name]
    rng = np.random.default_rng(2)
    params, x, states = make(case, lengths=LENGTHS)
    loss = weigh(rng, oracle(case, params, x, states, lengths=LENGTHS))
    assert_gradients(
        lambda *args: loss(net(case.cell, *args, LENGTHS)),
        lambda *args: loss(oracle(case, *args, lengths=LENGTHS)),
        (params, x, states),
        rng,
    )


# ------------------------------------------------------------------------------- Stack


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"return_all_states": True}, {"segment_length": 2}],
    ids=str,
)
def test_stack_equals_numpy_however_it_runs(options):
    case = WRAPPED["stack"]
    params, x, states = make(case, lengths=LENGTHS)
    got = compiled_net(case.cell, params, x, states, LENGTHS, **options)
    reverse = options.get("reverse", False)
    want = oracle(case, params, x, states, lengths=LENGTHS, reverse=reverse)
    close(got[:2], want[:2])
    if "return_all_states" in options:
        close(got.all_states, want.all_states)


def test_stack_runs_layer_by_layer_fused_where_it_can():
    cell = cells.Stack((cells.LSTM(INPUTS, 4), cells.MILSTM(4, 4), cells.GRU(4, 2)))
    params, x, states = make(CellCase(cell, None))

    def trace(**options):
        run = lambda p: net(cell, p, x, states, **options).outputs  # noqa: E731
        return jax.make_jaxpr(run)(params).jaxpr

    assert count("ostinato_rnn", trace()) == 2
    assert count("dot_general", trace(), inside="scan") == 1  # the MILSTM's own
    recomputed = trace(recompute=("gates",))
    assert count("ostinato_rnn", recomputed) == 2 and count("scan", recomputed) == 1
    assert count("scan", trace(recompute=True)) == 1


def test_names_of_one_layer_do_for_a_stack():
    attention = cells.Attention(cells.LSTM(INPUTS + 2, 4), memory_size=2)
    memory = jnp.ones((BATCH, 3, 2), jnp.float64)
    cell = cells.Stack((cells.LSTM(INPUTS, INPUTS), attention.attend(memory)))
    assert cell.recompute_names == ("gates", "energies")
    params, x, states = make(CellCase(cell, None))
    close(
        compiled_net(cell, params, x, states, recompute=("energies",)).outputs,
        compiled_net(cell, params, x, states).outputs,
    )
    for options in ({}, {"segment_length": 2}):
        with pytest.raises(ValueError) as info:
            net(cell, params, x, states, recompute=("gate",), **options)
        assert_says(info, "`recompute` 'gate' 'gates' 'energies'")


@dataclasses.dataclass(frozen=True)
class Halver(cells.SizedCell):
    """A cell as users might write it."""

    input_size: int
    output_size: int

    def init(self, key, dtype=jnp.float32):
        return jnp.full((), 0.5, dtype)

    def initial_state(self, batch, dtype=jnp.float32):
        return jnp.zeros((batch, self.output_size), dtype)

    def step(self, params, states, inputs_t, t):
        out = params * (states + inputs_t)
        return out, out


def test_cells_of_ones_own_stand_in_stacks_and_wrappers():
    own = Halver(INPUTS, INPUTS)
    cell = cells.Stack((cells.LSTM(INPUTS, INPUTS), cells.Residual(own)))
    params, x, states = make(CellCase(cell, None))
    below = compiled_net(cell.cells[0], params[0], x, states[0]).outputs
    want = compiled_net(own, params[1], below, states[1]).outputs + below
    close(compiled_net(cell, params, x, states).outputs, want)


# ----------------------------------------------------------------------- Bidirectional

PAIRS = {
    "fused": (
        cells.LSTM(INPUTS, 4, 0.5),
        None,
        ft.partial(cells64.lstm, forget_bias=0.5),
    ),
    "mixed": (cells.LSTM(INPUTS, 4), cells.GRU(INPUTS, 2), cells64.gru),
    "steps": (cells.MILSTM(INPUTS, 4), None, cells64.milstm),
}


def directions(name):
    """Return a cell and the oracles of its two directions."""
    forward, backward, second = PAIRS[name]
    if name == "mixed":
        return cells.Bidirectional(forward, backward), (cells64.lstm, second)
    return cells.Bidirectional(forward, backward), (second, second)


def both_in_numpy(cell, oracles, params, x, states, **options):
    parts = [
        oracle(CellCase(c, o), p, x, s, reverse=r, **options)
        for c, o, p, s, r in zip(
            cell.both, oracles, params, states, (False, True), strict=True
        )
    ]
    outputs = np.concatenate([part.outputs for part in parts], axis=-1)
    return parts[0]._replace(
        outputs=outputs, states=cells.BothDirections(*(p.states for p in parts))
    )


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("padding", "lengths"),
    [("hold", None), ("hold", LENGTHS), ("zero", LENGTHS), ("drop", LENGTHS)],
)
def test_both_directions_equal_numpy(name, padding, lengths):
    cell, oracles = directions(name)
    params, x, states = make(CellCase(cell, None), lengths=lengths)
    got = compiled_net(cell, params, x, states, lengths, padding=padding)
    want = both_in_numpy(
        cell, oracles, params, x, states, lengths=lengths, padding=padding
    )
    close(got[:2], want[:2])
    calls = count(
        "ostinato_rnn",
        jax.make_jaxpr(lambda p: net(cell, p, x, states, lengths))(params).jaxpr,
    )
    mixed = 1 if lengths else 2  # reversed sequences of different lengths run in steps
    assert calls == {"fused": 1, "mixed": mixed, "steps": 0}[name]


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_of_both_directions_equal_finite_differences(name):
    cell, oracles = directions(name)
    rng = np.random.default_rng(4)
    args = make(CellCase(cell, None), lengths=LENGTHS)
    reference = lambda *args: both_in_numpy(  # noqa: E731
        cell, oracles, *args, lengths=LENGTHS
    )
    loss = weigh(rng, reference(*args))
    assert_gradients(
        lambda *args: loss(net(cell, *args, LENGTHS)),
        lambda *args: loss(reference(*args)),
        args,
        rng,
    )


def test_stack_of_both_directions_takes_every_option():
    layer = cells.Bidirectional(cells.LSTM(INPUTS, 2))
    cell = cells.Stack((layer, cells.Bidirectional(cells.GRU(4, 3))))
    params, x, states = make(CellCase(cell, None), lengths=LENGTHS)
    want = compiled_net(cell, params, x, states, LENGTHS)
    for options in (
        dict(recompute=True),
        dict(recompute=("gates",), segment_length=2),
        dict(return_all_states=True),
    ):
        got = compiled_net(cell, params, x, states, LENGTHS, **options)
        close(got[:2], want[:2])
    assert got.all_states[0].forward[0].shape == (BATCH, STEPS, 2)


# ----------------------------------------------------------------- Dropout and Zoneout


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
    assert 0.2 < np.mean(kept_shares[:: 1 + has_c]) < 0.4
    if has_c:
        assert 0.4 < np.mean(kept_shares[1::2]) < 0.6
    assert not np.allclose(kept_shares, kept_shares[0])  # drawn anew at each step


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


# --------------------------------------------------------------------------- bad input

LSTM = cells.LSTM(INPUTS, HIDDEN)
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("make_cell", "error", "words"),
    [
        (lambda: cells.Residual(LSTM), ValueError, "`cell` input_size=3 output_size=5"),
        (lambda: cells.Residual(len), TypeError, "`cell` SizedCell"),
        (lambda: cells.Dropout(LSTM, 1.0), ValueError, "`inputs` [0, 1) 1.0"),
        (lambda: cells.Dropout(LSTM, outputs=-0.1), ValueError, "`outputs` -0.1"),
        (lambda: cells.Dropout(LSTM, "a"), TypeError, "`inputs` number"),
        (
            lambda: cells.Dropout(cells.Stack((LSTM,)), states=0.5),
            TypeError,
            "`states` (h, c) Stack",
        ),
        (lambda: cells.Dropout(LSTM, 0.5).sample(KEY, 1.5), TypeError, "`batch`"),
        (lambda: cells.Dropout(LSTM, 0.5).sample(1, 2), TypeError, "`key`"),
        (lambda: cells.Zoneout(LSTM, 2.0), ValueError, "`h_rate` 2.0"),
        (
            lambda: cells.Zoneout(cells.GRU(2, 3), 0.1, 0.1),
            ValueError,
            "`c_rate` GRU 0.1",
        ),
        (lambda: cells.Zoneout(cells.Stack((LSTM,)), 0.1), TypeError, "`cell` Stack"),
        (
            lambda: cells.Zoneout(cells.Residual(cells.GRU(3, 3)), 0.1),
            ValueError,
            "`cell` Residual around Zoneout",
        ),
        (
            lambda: cells.Zoneout(cells.Dropout(LSTM, outputs=0.5), 0.1),
            ValueError,
            "`cell` Dropout",
        ),
        (lambda: cells.Zoneout(LSTM, 0.1).sample(3), TypeError, "`key`"),
        (lambda: cells.Stack(LSTM), TypeError, "`cells` tuple"),
        (lambda: cells.Stack(()), ValueError, "`cells` at least one"),
        (lambda: cells.Stack((LSTM, len)), TypeError, "`cells[1]` SizedCell"),
        (lambda: cells.Stack((LSTM, LSTM)), ValueError, "`cells[1]` input_size=5 3"),
        (
            lambda: cells.Bidirectional(LSTM, cells.GRU(4, 2)),
            ValueError,
            "`backward` input_size=3 4",
        ),
        (lambda: cells.Bidirectional(LSTM, len), TypeError, "`backward`"),
    ],
)
def test_bad_wrapper_is_refused(make_cell, error, words):
    with pytest.raises(error) as info:
        make_cell()
    assert_says(info, words)


def test_both_directions_refuse_what_has_no_meaning():
    cell = cells.Bidirectional(LSTM)
    params, x, states = make(CellCase(cell, None))
    resets = jnp.zeros((BATCH, STEPS), bool)
    for options, words in (
        (dict(reverse=True), "`reverse`"),
        (dict(resets=resets), "`resets`"),
    ):
        with pytest.raises(ValueError, match=words):
            net(cell, params, x, states, **options)
    with pytest.raises(ValueError, match="no single step"):
        cell(params, states, x[:, 0], 0)
    with pytest.raises(TypeError, match="`params` must be BothDirections"):
        net(cell, tuple(params), x, states)
    with pytest.raises(ValueError, match="`recompute`.*'energies'.*'gates'"):
        net(cell, params, x, states, recompute=("energies",))


def test_masks_and_params_of_another_shape_are_refused():
    params, x, states = make(CellCase(LSTM, None))
    drawn = cells.Dropout(LSTM, 0.5).sample(KEY, BATCH + 1)
    with pytest.raises(ValueError, match="`masks` must be of the call's"):
        net(drawn, params, x, states)
    with pytest.raises(TypeError, match="`params` must be a tuple with one item"):
        ost.recurrent_net(cells.Stack((LSTM,)), x, (states,), params=params)
    with pytest.raises(TypeError, match="`states` must be a tuple with one item"):
        ost.recurrent_net(cells.Stack((LSTM,)), x, states, params=(params,))
