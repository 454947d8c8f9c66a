"""Tests of bad input of the explicit passes: errors name argument, want and got."""

import functools

import jax.numpy as jnp
import pytest
from harness import assert_says
from test_errors import GRU, LSTM, B, H, I, T, weights_of, zeros

import ostinato as ost


@functools.cache
def reserve():
    return ost.rnn_forward(GRU, weights_of(GRU), zeros(B, T, I))[1]


def backward(spec=GRU, weights=None, given=None, dy=None, *dstate):
    weights = weights_of(spec) if weights is None else weights
    dy = zeros(B, T, H) if dy is None else dy
    return ost.rnn_backward(spec, weights, given or reserve(), dy, *dstate)


def lstm_backward(dstate):
    _, saved = ost.rnn_forward(LSTM, weights_of(LSTM), zeros(B, T, I))
    return backward(LSTM, None, saved, zeros(B, T, H), dstate)


def gru_cell(**changes):
    arrays = {
        "x": zeros(B, I),
        "h": zeros(B, H),
        "w_ih": zeros(3 * H, I),
        "w_hh": zeros(3 * H, H),
        "b_ih": zeros(3 * H),
        "b_hh": zeros(3 * H),
    }
    return ost.gru_cell_forward(**arrays | changes)


def rnn_cell(activation):
    args = zeros(B, I), zeros(B, H), zeros(H, I), zeros(H, H), zeros(H), zeros(H)
    return ost.rnn_cell_inference(*args, activation)


PASSES = {
    "reserve": (lambda: backward(given="saved"), TypeError, "`reserve` rnn_forward"),
    "spec": (
        lambda: backward(LSTM),
        ValueError,
        "`spec` mode='gru' mode='lstm'",
    ),
    "weights": (
        lambda: backward(weights=zeros(9)),
        ValueError,
        f"`weights` [{GRU.num_params}] [9]",
    ),
    "dy-shape": (
        lambda: backward(dy=zeros(B, T, 2)),
        ValueError,
        "`dy` (3, 4, 7) (3, 4, 2)",
    ),
    "dy-dtype": (
        lambda: backward(dy=zeros(B, T, H, dtype=jnp.float64)),
        TypeError,
        "`dy` float32 float64",
    ),
    "dstate-shape": (
        lambda: backward(GRU, None, None, None, zeros(1, 1, H)),
        ValueError,
        "`dstate` (1, 3, 7) (1, 1, 7)",
    ),
    "dstate-one-for-lstm": (
        lambda: lstm_backward(zeros(2, B, H)),
        TypeError,
        "`dstate` (dh, dc) float32[2, 3, 7]",
    ),
    "dstate-c": (
        lambda: lstm_backward((zeros(2, B, H), zeros(2, B, 1))),
        ValueError,
        "`dstate[1]` (2, 3, 7) (2, 3, 1)",
    ),
    "cell-x-rank": (lambda: gru_cell(x=zeros(I)), ValueError, "`x` [B, I] [5]"),
    "cell-h-batch": (
        lambda: gru_cell(h=zeros(1, H)),
        ValueError,
        "`h` (3, 7) (1, 7)",
    ),
    "cell-w_ih": (
        lambda: gru_cell(w_ih=zeros(H, I)),
        ValueError,
        "`w_ih` (21, 5) (7, 5)",
    ),
    "cell-b_hh": (lambda: gru_cell(b_hh=zeros(H)), ValueError, "`b_hh` (21,) (7,)"),
    "cell-dtype": (
        lambda: gru_cell(w_hh=zeros(3 * H, H, dtype=jnp.float64)),
        TypeError,
        "`w_hh` float32 float64",
    ),
    "cell-int": (
        lambda: gru_cell(x=zeros(B, I, dtype=jnp.int32)),
        TypeError,
        "`x` float32 int32",
    ),
    "cell-activation": (
        lambda: rnn_cell("gelu"),
        ValueError,
        "`activation` 'tanh' 'relu' 'gelu'",
    ),
    "cell-cotangent": (
        lambda: ost.gru_cell_backward(
            zeros(B, 1), gru_cell()[1], zeros(3 * H, I), zeros(3 * H, H)
        ),
        ValueError,
        "`dh_next` (3, 7) (3, 1)",
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_bad_argument_of_a_pass_raises_with_name_want_and_got(name):
    run, error, words = PASSES[name]
    with pytest.raises(error) as info:
        run()
    assert_says(info, words)


def cell_backward(gates, **changes):
    """Run the backward pass of a cell with so many gates on zeros."""
    run, kind = {
        1: (ost.rnn_cell_backward, ost.RNNCellReserve),
        3: (ost.gru_cell_backward, ost.GRUReserve),
        4: (ost.lstm_cell_backward, ost.LSTMReserve),
    }[gates]
    kept = {field: zeros(B, H) for field in kind._fields} | {"x": zeros(B, I)}
    cotangents = {"dh_next": zeros(B, H)}
    if gates == 4:
        cotangents["dc_next"] = zeros(B, H)
    given = {"w_ih": zeros(gates * H, I), "w_hh": zeros(gates * H, H), **cotangents}
    kept |= {k: v for k, v in changes.items() if k in kept}
    given |= {k: v for k, v in changes.items() if k in given}
    reserve = changes.get("reserve", kind(**kept))
    return run(reserve=reserve, **given)


@pytest.mark.parametrize("gates", [1, 3, 4])
def test_backward_of_a_cell_checks_all_that_it_is_given(gates):
    assert cell_backward(gates).x.shape == (B, I)
    rows = gates * H
    cases = [
        (dict(w_ih=zeros(rows, I + 2)), ValueError, f"`w_ih` {(rows, I)}"),
        (dict(w_hh=zeros(H + 2, H)), ValueError, f"`w_hh` {(rows, H)}"),
        (dict(w_ih=zeros(rows, H), w_hh=zeros(rows, I)), ValueError, "`w_ih`"),
        (dict(w_ih=zeros(rows, I, dtype=jnp.bfloat16)), TypeError, "`w_ih` bfloat16"),
        (dict(w_ih=[[1.0]]), TypeError, "`w_ih` list"),
        (dict(reserve=None), TypeError, "`reserve` Reserve None"),
        (dict(x=zeros(B + 1, I)), ValueError, f"`reserve.x` {(B, I)}"),
        (dict(h=zeros(H)), ValueError, "`reserve.h` [B, H]"),
        (dict(dh_next=zeros(B, 1)), ValueError, f"`dh_next` {(B, H)} {(B, 1)}"),
    ]
    for changes, error, words in cases:
        with pytest.raises(error) as info:
            cell_backward(gates, **changes)
        assert_says(info, words)


@pytest.mark.parametrize("name", ["lengths", "save", "names"])
def test_an_unknown_keyword(name):
    with pytest.raises(TypeError, match=rf"rnn_forward\(\) got an unex.*'{name}'"):
        ost.rnn_forward(GRU, weights_of(GRU), zeros(B, T, I), **{name: True})
