"""Tests of RNNSpec: its fields, its properties, and which specs are errors."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from harness import assert_says
from oracles import loop64

import ostinato as ost


def spec(mode="lstm", input_size=3, hidden_size=4, **fields):
    return ost.RNNSpec(mode, input_size, hidden_size, **fields)


BAD = {  # fields, exception, words of the message
    "mode": ({"mode": "lstmp"}, ValueError, "`mode` 'rnn_relu' 'lstm' 'gru' 'lstmp'"),
    "mode-type": ({"mode": 4}, ValueError, "`mode` 4"),
    "bias": ({"bias": "single"}, ValueError, "`bias` 'double' 'none' 'single'"),
    "bias-bool": ({"bias": True}, ValueError, "`bias` 'double' True"),
    "input_mode": ({"input_mode": "id"}, ValueError, "`input_mode` 'skip' 'id'"),
    "input_size": ({"input_size": 0}, ValueError, "`input_size` 1 0"),
    "hidden_size": ({"hidden_size": -2}, ValueError, "`hidden_size` 1 -2"),
    "num_layers": ({"num_layers": 0}, ValueError, "`num_layers` 1 0"),
    "size-float": ({"hidden_size": 4.0}, TypeError, "`hidden_size` integer 4.0"),
    "size-string": ({"input_size": "3"}, TypeError, "`input_size` integer '3'"),
    "size-bool": ({"num_layers": True}, TypeError, "`num_layers` integer True"),
    "proj-negative": ({"proj_size": -1}, ValueError, "`proj_size` 0 -1"),
    "proj-equal": ({"proj_size": 4}, ValueError, "`proj_size` hidden_size=4 4"),
    "proj-gru": ({"mode": "gru", "proj_size": 2}, ValueError, "`proj_size` 'gru' 2"),
    "bidirectional": ({"bidirectional": 2}, TypeError, "`bidirectional` True 2"),
    "dropout-above": ({"dropout": 1.5}, ValueError, "`dropout` [0, 1] 1.5"),
    "dropout-below": ({"dropout": -0.1}, ValueError, "`dropout` [0, 1] -0.1"),
    "dropout-nan": ({"dropout": float("nan")}, ValueError, "`dropout` nan"),
    "dropout-string": ({"dropout": "0.1"}, TypeError, "`dropout` number '0.1'"),
    "dropout-bool": ({"dropout": False}, TypeError, "`dropout` number False"),
    "clip-zero": ({"cell_clip": 0.0}, ValueError, "`cell_clip` 0.0"),
    "clip-negative": ({"cell_clip": -1}, ValueError, "`cell_clip` -1"),
    "clip-nan": ({"cell_clip": float("nan")}, ValueError, "`cell_clip` nan"),
    "clip-string": ({"cell_clip": "1"}, TypeError, "`cell_clip` number '1'"),
    "clip-gru": ({"mode": "gru", "cell_clip": 1.0}, ValueError, "`cell_clip` 'gru'"),
    "clip_nan-alone": ({"clip_nan": True}, ValueError, "clip_nan cell_clip None"),
    "reset-lstm": ({"reset_after": False}, ValueError, "reset_after=False 'lstm'"),
    "heads-zero": ({"num_heads": 0}, ValueError, "`num_heads` 1 0"),
    "heads-odd": ({"num_heads": 3}, ValueError, "`num_heads` hidden_size=4 3"),
    "heads-proj": (
        {"num_heads": 4, "proj_size": 2},
        ValueError,
        "`num_heads` proj_size=2 4",
    ),
    "skip": ({"input_mode": "skip"}, ValueError, "input_mode='skip' 3 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_impossible_spec_raises_with_the_field_and_the_value(name):
    fields, error, words = BAD[name]
    with pytest.raises(error) as info:
        spec(**fields)
    assert_says(info, words)


def test_spec_is_frozen_hashable_and_compares_by_value():
    a = spec(dropout=0, num_layers=np.int64(2))
    b = spec(dropout=0.0, num_layers=2)
    assert a == b and hash(a) == hash(b) and {a: 1}[b] == 1
    assert a != spec(num_layers=2, reset_after=True, bias="none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.hidden_size = 5
    assert dataclasses.replace(a, num_layers=3).num_layers == 3
    jax.jit(lambda s: s.num_params, static_argnums=0)(a)


@pytest.mark.parametrize("edge", [0, 1, 0.0, 1.0])
def test_dropout_may_be_either_end(edge):
    assert spec(dropout=edge).dropout == edge


GRID = [
    dict(zip(("mode", "bidirectional", "bias", "input_mode"), values, strict=True))
    for values in itertools.product(
        loop64.GATES,
        (False, True),
        ("double", "input", "recurrent", "none"),
        ("linear", "skip"),
    )
] + [
    {"mode": "lstm", "proj_size": 2, "bidirectional": d, "num_heads": k}
    for d in (False, True)
    for k in (1, 2)
]


@pytest.mark.parametrize("layers", [1, 3])
def test_derived_sizes_match_the_oracle(layers):
    for fields in GRID:
        size = 4 if fields.get("input_mode") == "skip" else 3
        ours = spec(input_size=size, num_layers=layers, **fields)
        theirs = loop64.Spec(
            input_size=size, hidden_size=4, num_layers=layers, **fields
        )
        assert ours.num_params == ost.num_params(ours) == loop64.num_params(theirs)
        assert ours.num_directions == theirs.num_directions
        assert ours.num_gates == loop64.GATES[theirs.mode]
        assert ours.output_size == theirs.output_size
        h = (layers * ours.num_directions, 6, ours.output_size)
        cells = {"lstm": 1, "slstm": 3}.get(ours.mode, 0)
        want = (h, *[(*h[:2], 4)] * cells) if cells else h
        assert ours.state_shape(6) == want


def test_number_of_parameters_matches_a_published_figure():
    """Check MXNet's test: an LSTM with 10 units and 7 inputs has 760 parameters."""
    assert ost.RNNSpec("lstm", 7, 10).num_params == 760
