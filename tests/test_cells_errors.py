"""Cells refuse bad arguments and say what they want."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from cell_cases import (
    CASES,
    make,
    net,
)
from harness import assert_says

import ostinato as ost
from ostinato import cells


@pytest.mark.parametrize(
    ("make_cell", "error", "words"),
    [
        (lambda: cells.LSTM(0, 3), ValueError, "`input_size` at least 1 0"),
        (lambda: cells.GRU(2, 1.5), TypeError, "`hidden_size` integer 1.5"),
        (lambda: cells.RNN(2, 3, "gelu"), ValueError, "`activation` 'tanh' 'gelu'"),
        (lambda: cells.IndRNN(2, 3, "gelu"), ValueError, "`activation` 'relu' 'gelu'"),
        (lambda: cells.LSTM(2, 3, "1"), TypeError, "`forget_bias` number"),
        (lambda: cells.LSTM(2, 3, float("nan")), ValueError, "`forget_bias` finite"),
        (lambda: cells.LSTMP(2, 3, proj_size=3), ValueError, "`proj_size` 3"),
        (lambda: cells.LSTMP(2, 3, proj_size=0), ValueError, "`proj_size` 0"),
        (lambda: cells.GRU(2, 3, 1), TypeError, "`reset_after`"),
        (lambda: cells.LayerNormGRU(2, 3, 0.0), ValueError, "`epsilon` above 0"),
        (lambda: cells.ConvLSTM(1, 1, 3, (3,)), TypeError, "`grid` tuple"),
        (lambda: cells.ConvLSTM(1, 1, (3, 3), (3,)), ValueError, "`grid` `kernel`"),
        (lambda: cells.ConvLSTM(1, 1, (3, 0), (3, 3)), ValueError, "`grid` at least 1"),
        (
            lambda: cells.LSTM(2, 3).init(jax.random.key(0), jnp.int32),
            TypeError,
            "`dtype` floating int32",
        ),
        (lambda: cells.LSTM(2, 3).init(0), TypeError, "`key` PRNG"),
        *[
            (
                lambda cell=cell: cell.init(jax.random.key(0), jnp.int32),
                TypeError,
                "`dtype` floating int32",
            )
            for cell in (cells.LRU(2, 3), cells.S5(2, 3), cells.RGLRU(3))
        ],
        *[
            (lambda c=c, s=s: c.initial_state(s), kind, "`batch`")
            for c in (cells.GRU(2, 3), cells.MinGRU(2, 3), cells.LRU(2, 3))
            for s, kind in ((-1, ValueError), (1.5, TypeError))
        ],
        (lambda: cells.GRU(2, 3).initial_state(2, jnp.int32), TypeError, "`dtype`"),
        (lambda: cells.trainable_state(len), TypeError, "`cell`"),
        (lambda: cells.repeat_state(jnp.zeros(2), 1.5), TypeError, "`batch`"),
    ],
)
def test_bad_cell_is_refused(make_cell, error, words):
    with pytest.raises(error) as info:
        make_cell()
    assert_says(info, words)


def _change(params, x, states, **changes):
    given = {"params": params, "x": x, "states": states} | changes
    return given["params"], given["x"], given["states"]


@pytest.mark.parametrize("steps", [False, True], ids=["fused", "steps"])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p, x, s: _change(p, x[..., :2], s), ValueError, "input 3 2"),
        (lambda p, x, s: _change(p, x.astype("float32"), s), TypeError, "float32"),
        (lambda p, x, s: _change(p, x, s[0]), TypeError, "(h, c)"),
        (
            lambda p, x, s: _change(p, x, (s[0][:, :2], s[1])),
            ValueError,
            "shape (3, 2)",
        ),
        (
            lambda p, x, s: _change(p, x, (s[0].astype("float32"), s[1])),
            TypeError,
            "float32",
        ),
        (
            lambda p, x, s: _change(p._replace(w_hh=p.w_hh.T), x, s),
            ValueError,
            "`params.w_hh` (20, 5) (5, 20)",
        ),
        (
            lambda p, x, s: _change(p._replace(b_ih=None), x, s),
            ValueError,
            "`params.b_ih` (20,) None",
        ),
        (lambda p, x, s: _change(None, x, s), TypeError, "`params` LayerWeights"),
        (
            lambda p, x, s: _change(p._replace(b_ih=p.b_ih.astype("float32")), x, s),
            TypeError,
            "`params.b_ih` float32",
        ),
    ],
)
def test_bad_arguments_are_refused(change, error, words, steps):
    case = CASES["lstm"]
    with pytest.raises(error) as info:
        net(case.cell, *change(*make(case)), return_all_states=steps)
    assert_says(info, words)


def test_wrong_grid_is_refused():
    case = CASES["conv-lstm-2d"]
    params, x, states = make(case)
    with pytest.raises(ValueError, match=r"`inputs` must .* grid=\(3, 4\)"):
        net(case.cell, params, x[:, :, :2], states)
    with pytest.raises(ValueError, match=r"`h` must have shape"):
        net(case.cell, params, x, (states[0][:, :2], states[1]))


@pytest.mark.parametrize("cell", [cells.GRU(3, 4), cells.IndRNN(3, 4), cells.LRU(3, 4)])
def test_a_list_is_no_parameter(cell):
    params, x = cell.init(jax.random.key(0)), jnp.zeros((2, 5, 3))
    for name in params._fields:
        if getattr(params, name) is not None:
            wrong = params._replace(**{name: [[1.0]]})
            with pytest.raises(TypeError, match=f"`params.{name}` must be an array"):
                net(cell, wrong, x, cell.initial_state(2))


@pytest.mark.parametrize("cell", [cells.GRU(3, 4), cells.MinGRU(3, 4)])
def test_cells_have_no_window(cell):
    params, x = cell.init(jax.random.key(0), jnp.float64), jnp.zeros((2, 5, 3))
    with pytest.raises(ValueError, match="`window` must be 1 for a cell"):
        ost.recurrent_net(cell, x, jnp.zeros((2, 2, 4)), params=params, window=2)


@pytest.mark.parametrize("name", ["lstm", "conv-lstm-1d"])
def test_states_of_another_dtype_are_refused(name):
    case = CASES[name]
    params, x, states = make(case)
    for dtype in ("bfloat16", "int32"):
        other = jax.tree.map(lambda a, dtype=dtype: a.astype(dtype), states)
        with pytest.raises(TypeError, match=f"`h` must have the dtype.* got {dtype}"):
            net(case.cell, params, x, other)
    for batch, error in ((-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="`batch` must be"):
            case.cell.initial_state(batch)
    with pytest.raises(TypeError, match="`dtype` must be a floating dtype"):
        case.cell.initial_state(2, jnp.int32)
