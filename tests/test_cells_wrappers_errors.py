"""Wrappers of cells refuse bad arguments and say what they want."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from cell_cases import (
    BATCH,
    HIDDEN,
    INPUTS,
    STEPS,
    CellCase,
    make,
    net,
)
from harness import assert_says

import ostinato as ost
from ostinato import cells

LSTM = cells.LSTM(INPUTS, HIDDEN)
TWO = cells.Stack((cells.GRU(4, 4), cells.GRU(4, 4)))  # with the states (h, h)


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
        (lambda: cells.Dropout(TWO, states=0.5), TypeError, "`states` (h, c) Stack"),
        (
            lambda: cells.Dropout(cells.Residual(cells.RGLRU(4)), states=0.5),
            TypeError,
            "`states` products RGLRU",
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
        (lambda: cells.Zoneout(TWO, 0.1), TypeError, "`cell` (h, c) Stack"),
        (
            lambda: cells.Zoneout(cells.Dropout(TWO, 0.5), 0.1),
            TypeError,
            "`cell` (h, c) Dropout",
        ),
        (lambda: cells.Zoneout(cells.LRU(4, 8), 0.1), ValueError, "`cell` LRU 4 8"),
        (
            lambda: cells.Zoneout(cells.S5(4, 4), 0.1),
            ValueError,
            "`cell` S5 complex64",
        ),
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


def weighing():
    """Return a cell of 3 inputs with an `AttentionOutput` of 3 features."""
    attention = cells.Attention(cells.LSTM(5, 1), "regular", 2)
    memory = jnp.ones((BATCH, 3, 2), jnp.float32)
    return attention.attend(memory, return_weights=True)


@pytest.mark.parametrize(
    "wrap",
    [
        cells.Residual,
        lambda cell: cells.Residual(cells.Stack((cell,))),
        cells.Bidirectional,
        lambda cell: cells.Bidirectional(cells.LSTM(3, 4), cell),
        lambda cell: cells.Attention(cell, "dot", 2).attend(cell.memory),
    ],
)
def test_a_cell_with_several_outputs_inside_of_another_is_refused(wrap):
    cell = wrap(weighing())
    params, states = cell.init(KEY), cell.initial_state(BATCH)
    x = jnp.ones((BATCH, STEPS, cell.input_size), jnp.float32)
    with pytest.raises(TypeError) as info:
        ost.recurrent_net(cell, x, states, params=params)
    assert_says(info, "`cell` one array AttentionOutput")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, h: (x, (h[0].astype(jnp.int32), h[1])), "`h` dtype int32"),
        (lambda x, h: (x, (h[0][:, :4], h[1])), "`h` (3, 5) (3, 4)"),
        (lambda x, h: (x, h[0]), "`states` (h, c)"),
        (lambda x, h: (x[..., :2], h), "`inputs` input_size=3"),
        (lambda x, h: (x.astype(jnp.bfloat16), h), "`params` `inputs` bfloat16"),
    ],
)
def test_both_directions_at_once_check_states_and_inputs(change, words):
    cell = cells.Bidirectional(LSTM)
    params, x, states = make(CellCase(cell, None))
    x, backward = change(jnp.asarray(x), jax.tree.map(jnp.asarray, states.backward))
    with pytest.raises((TypeError, ValueError)) as info:
        net(cell, params, x, states._replace(backward=backward))
    assert_says(info, words)
