"""Tests of every cell against numpy, step by step and fused."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    CASES,
    FUSED,
    LENGTHS,
    STEPS,
    assert_gradients,
    assert_trees_close,
    compiled_net,
    make,
    net,
    numpy_tree,
    oracle,
    weigh,
)
from closures import Variable, fast_jit
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import cells
from ostinato.cells import fused

POLICIES = ("zero", "drop")  # "hold" is run for every cell
every_cell = pytest.mark.parametrize("name", CASES)
fused_cells = pytest.mark.parametrize("name", FUSED)
other_cells = pytest.mark.parametrize("name", [n for n in CASES if n not in FUSED])


@every_cell
def test_step_equals_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    x = np.asarray(x)[:, 0]
    got = numpy_tree(fast_jit(case.cell)(params, states, x, 0))
    p, given = numpy_tree((params, (states, x)))
    for b in range(BATCH):
        row = lambda tree, b=b: jax.tree.map(lambda a: a[b], tree)  # noqa: E731
        assert_trees_close(row(got), case.oracle(p, *row(given)))


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, "hold") for name in CASES]
    + [(name, padding) for name in ("lstm", "gru-after") for padding in POLICIES],
)
def test_sequence_equals_numpy(name, padding):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)
    got = compiled_net(case.cell, params, x, states, LENGTHS, padding=padding)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    assert_trees_close(got[:2], want[:2])


@every_cell
@pytest.mark.parametrize(("batch", "steps"), [(BATCH, 0), (0, STEPS)])
def test_no_steps_and_no_rows_are_allowed(name, batch, steps):
    case = CASES[name]
    params, x, states = make(case)
    x, states = x[:batch, :steps], jax.tree.map(lambda a: a[:batch], states)
    got = compiled_net(case.cell, params, x, states)
    assert got.outputs.shape[:2] == (batch, steps)
    assert_trees_close(got.states, states)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, LENGTHS) for name in CASES] + [(name, None) for name in FUSED],
)
def test_reversed_sequence_equals_numpy(name, lengths):
    case = CASES[name]
    params, x, states = make(case, lengths=lengths)
    got = compiled_net(case.cell, params, x, states, lengths, reverse=True)
    want = oracle(case, params, x, states, lengths=lengths, reverse=True)
    assert_trees_close(got[:2], want[:2])


@every_cell
def test_all_states_resets_and_time_major_equal_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = compiled_net(
        case.cell,
        params,
        jnp.swapaxes(x, 0, 1),
        states,
        resets=jnp.asarray(resets.T),
        time_major=True,
        return_all_states=True,
    )
    swap = lambda tree: jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)  # noqa: E731
    assert_trees_close(
        (swap(got.outputs), got.states, swap(got.all_states)), tuple(want)
    )


@fused_cells
def test_resets_equal_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = compiled_net(case.cell, params, x, states, resets=jnp.asarray(resets))
    assert_trees_close(got[:2], want[:2])


@every_cell
def test_gradients_equal_finite_differences(name):
    case = CASES[name]
    rng = np.random.default_rng(7)
    params, x, states = make(case, lengths=LENGTHS)
    loss = weigh(rng, oracle(case, params, x, states, lengths=LENGTHS))
    assert_gradients(
        lambda *args: loss(net(case.cell, *args, LENGTHS)),
        lambda *args: loss(oracle(case, *args, lengths=LENGTHS)),
        (params, x, states),
        rng,
    )


# -------------------------------------------------------------------------- parameters


@every_cell
def test_init_draws_what_the_cell_takes(name):
    cell = CASES[name].cell
    init = fast_jit(cell.init)
    params, again, other = (init(jax.random.key(n)) for n in (1, 1, 2))
    jax.tree.map(assert_same_bits, params, again)
    assert not (np.asarray(params.w_ih) == np.asarray(other.w_ih)).all()
    states = cell.initial_state(2)
    for leaf in jax.tree.leaves((params, states)):
        assert leaf.dtype == jnp.float32
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(states))
    cell.prepare(params)


def test_multiplicative_and_norm_parameters_begin_neutral():
    params = cells.LayerNormMILSTM(2, 3).init(jax.random.key(0))
    for field in ("alpha", "beta1", "beta2", "scale"):
        assert bool((getattr(params, field) == 1).all())
    for field in ("b", "offset"):
        assert not bool(getattr(params, field).any())
    w_hh = cells.IndRNN(2, 50).init(jax.random.key(0)).w_hh
    assert 0 <= float(w_hh.min()) < 0.2 and 0.8 < float(w_hh.max()) <= 1


@pytest.mark.parametrize("name", ["gru-after", "lstm", "conv-lstm-2d"])
def test_trainable_state_gathers_the_gradient_of_all_rows(name):
    case = CASES[name]
    params, x, states = make(case)
    state = cells.trainable_state(case.cell, jnp.float64)
    for leaf, batched in zip(
        jax.tree.leaves(state), jax.tree.leaves(states), strict=True
    ):
        assert leaf.shape == batched.shape[1:] and not bool(leaf.any())
    one = jax.tree.map(lambda a: a[0], states)
    loss = lambda s: jnp.sum(jnp.sin(net(case.cell, params, x, s).outputs))  # noqa: E731
    got = fast_jit(jax.grad(lambda s: loss(cells.repeat_state(s, BATCH))))(one)
    rows = fast_jit(jax.grad(loss))(cells.repeat_state(one, BATCH))
    assert_trees_close(got, jax.tree.map(lambda a: np.sum(a, axis=0), rows))


def test_states_of_numbers_are_repeated():
    got = cells.repeat_state([0.5, np.ones(2)], 3)
    assert [a.shape for a in got] == [(3,), (3, 2)]


# --------------------------------------------------------------------------- explained


def test_explain_says_what_runs():
    x = jnp.zeros((2, 3, 4), jnp.float32)
    cell = cells.LSTM(4, 5)
    assert cells.explain(cell, x) == ost.explain(cell.spec, x)
    assert cells.explain(cells.Dropout(cell, outputs=0.5), x).backend == (
        cells.explain(cell, x).backend
    )
    two = cells.explain(cells.Bidirectional(cell), x)
    assert two.backend == cells.explain(cell, x).backend
    for options, words in (
        (dict(recompute=("energies",)), "`gates`"),
        (dict(return_all_states=True), "states"),
        (dict(window=2), "`window`"),
        (dict(reverse=True, seq_lengths=[1, 2]), "reverse"),
    ):
        said = cells.explain(cell, x, **options)
        assert said.backend == "xla" and words in said.rejected["cpu"]
    for options in (dict(recompute=("gates",)), dict(segment_length=3)):
        assert cells.explain(cell, x, **options) == cells.explain(cell, x)
    usual = dict(seq_lengths=None, reverse=False, recompute=(), window=1)
    usual["return_all_states"] = False
    assert fused.unsupported_reason(**usual) is None
    assert "`stride`" in fused.unsupported_reason(**usual, stride=2)
    linear = cells.explain(cells.MinGRU(4, 5), x)
    assert "one linear recurrence" in linear.why
    assert linear.backend == cells.explain(cells.LSTM(4, 5), x).backend
    assert cells.explain(cells.LRU(4, 5), x, window=2).backend == "xla"
    said = cells.explain(cells.MILSTM(4, 5), x)
    assert "MILSTM" in said.rejected["cpu"]
    with pytest.raises(TypeError, match="one layer"):
        cells.explain(cells.Stack((cell,)), x)
    with pytest.raises(TypeError, match="`cell` must be a cell"):
        cells.explain(len, x)


# ------------------------------------------------- arrays that come as something else


def in_variables(tree):
    return jax.tree.map(Variable, tree)


@every_cell
def test_a_step_takes_variables(name):
    cell = CASES[name].cell
    params, x, states = make(CASES[name])

    def run(change, params, states, x):
        return cell(change(params), change(states), change(x), 0)

    got, want = (
        fast_jit(lambda *args, change=change: run(change, *args))(
            params, states, x[:, 0]
        )
        for change in (in_variables, lambda tree: tree)
    )
    jax.tree.map(assert_same_bits, got, want)


@pytest.mark.parametrize("name", ["lstm", "norm-gru", "min-gru", "conv-lstm-1d"])
def test_a_network_takes_parameters_in_variables(name):
    cell = CASES[name].cell
    params, x, states = make(CASES[name])
    got, want = (
        fast_jit(lambda p, x, s, change=change: net(cell, change(p), x, s))(
            params, x, states
        )
        for change in (in_variables, lambda tree: tree)
    )
    jax.tree.map(assert_same_bits, got, want)


@pytest.mark.parametrize("name", ["lstm", "gru-before", "norm-gru", "min-gru"])
def test_a_step_takes_arrays_of_numpy_in_float64(name):
    """Without `jax_enable_x64` they are float32 as soon as they are JAX's."""
    cell = CASES[name].cell
    with jax.enable_x64(False):
        params, x, states = make(CASES[name], "float32")
        wide = numpy_tree((params, states, x[:, 0]))
        want = cell(params, states, x[:, 0], 0)
        jax.tree.map(assert_same_bits, cell(*wide, 0), want)
