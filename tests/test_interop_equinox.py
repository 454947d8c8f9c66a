"""interop.equinox: the numbers of equinox's own cells, in and out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import (
    LIMIT,
    assert_swaps_show,
    assert_weights_are_checked,
    distance,
    draw,
    lenient,
    redraw,
    weights_of,
)

import ostinato as ost
from ostinato.interop import equinox as ours

pytestmark = pytest.mark.peers
eqx = pytest.importorskip("equinox", reason="needs the extra `peers`")

X = draw(2, 5, 3)
KINDS = {"lstm": eqx.nn.LSTMCell, "gru": eqx.nn.GRUCell}
CASES = [(mode, bias) for mode in KINDS for bias in (True, False)]


def make(mode, use_bias=True, **options):
    with lenient():
        key = jax.random.key(0)
        return redraw(KINDS[mode](3, 4, use_bias=use_bias, key=key, **options))


def outputs(cell, x=X):
    def one(steps):
        def step(state, x_t):
            state = cell(x_t, state)
            return state, state[0] if isinstance(state, tuple) else state

        zeros = jnp.zeros(cell.hidden_size, steps.dtype)
        state = (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros
        return jax.lax.scan(step, state, steps)[1]

    with lenient():
        return jax.vmap(one)(jnp.asarray(x))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("mode", "use_bias"), CASES)
def test_cell_gives_the_same_numbers_and_goes_back(mode, use_bias):
    cell = make(mode, use_bias)
    imported = ours.from_cell(cell)
    assert imported.spec.mode == mode and imported.notes == ()
    assert distance(imported, X, outputs(cell)) <= LIMIT
    assert_same(ours.to_cell(imported.spec, imported.weights), cell)


@pytest.mark.parametrize("mode", KINDS)
def test_any_two_gates_swapped_show(mode, monkeypatch):
    cell = make(mode)
    convert = lambda: ours.from_cell(cell)  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, mode, convert, X, outputs(cell))


@pytest.mark.parametrize("bias", ["double", "input", "recurrent"])
@pytest.mark.parametrize("mode", KINDS)
def test_export_of_a_layer_computes_the_same(mode, bias):
    spec = ost.RNNSpec(mode, 3, 4, bidirectional=True, bias=bias)
    weights = weights_of(spec)
    cell = ours.to_cell(spec, weights, reverse=True, fold=True)
    want = ost.rnn(spec, weights, jnp.asarray(X)).y[:, ::-1, 4:]
    flipped = ost.rnn(spec, weights, jnp.asarray(X[:, ::-1])).y[:, ::-1, 4:]
    assert np.abs(outputs(cell, X[:, ::-1]) - want).max() <= LIMIT
    assert np.abs(outputs(cell) - flipped).max() <= LIMIT


def test_bfloat16_and_tracing():
    cell = make("gru", dtype=jnp.bfloat16)
    imported = ours.from_cell(cell)
    assert imported.weights.dtype == jnp.bfloat16
    again = jax.jit(lambda w: ours.to_cell(imported.spec, w, fold=True))
    assert_same(again(imported.weights), cell)


def test_what_equinox_lacks_is_an_error():
    lstm = ost.RNNSpec("lstm", 3, 4)
    with pytest.raises(ValueError, match="both b_ih and b_hh for a cell of equinox"):
        ours.to_cell(lstm, weights_of(lstm))
    for spec in (
        ost.RNNSpec("rnn_tanh", 3, 4),
        ost.RNNSpec("lstm", 3, 4, proj_size=2),
        ost.RNNSpec("gru", 3, 4, reset_after=False),
        ost.RNNSpec("gru", 4, 4, input_mode="skip"),
    ):
        with pytest.raises(ValueError, match="`spec` must have .* for a cell of equi"):
            ours.to_cell(spec, weights_of(spec), fold=True)


class Twice(eqx.nn.GRUCell):
    def __call__(self, input, hidden, *, key=None):
        return 2 * super().__call__(input, hidden)


def test_what_is_no_cell_is_an_error():
    for value in (Twice(3, 4, key=jax.random.key(0)), X, eqx.nn.LSTMCell):
        with pytest.raises(TypeError, match="`cell` must be an eqx.nn.LSTMCell"):
            ours.from_cell(value)
    bad = eqx.tree_at(lambda c: c.bias_n, make("gru"), jnp.zeros(3))
    with pytest.raises(ValueError, match="`cell.bias_n` must have shape"):
        ours.from_cell(bad)


@pytest.mark.parametrize("leaf", ["weight_hh", "bias", "bias_n"])
def test_a_leaf_that_is_missing_is_an_error(leaf):
    cell = eqx.tree_at(lambda c: getattr(c, leaf), make("gru"), None)
    with pytest.raises(TypeError, match=f"`cell.{leaf}` must be an array"):
        ours.from_cell(cell)


def test_arguments_of_the_exporter_are_checked():
    spec = ost.RNNSpec("gru", 3, 4)
    assert_weights_are_checked(ours.to_cell, spec, traced=True, fold=True)
    with pytest.raises(TypeError, match="`fold` must be True or False, got str"):
        ours.to_cell(spec, weights_of(spec), fold="no")
