"""Tests of random specs and shapes against the float64 loop, with every gradient."""

from cases import Case
from harness import (
    arguments,
    assert_padding_is_exact,
    assert_same,
    expected,
    named,
    value_and_pullback,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.loop64 import Spec


@st.composite
def specs(draw) -> Spec:
    mode = draw(st.sampled_from(["rnn_relu", "rnn_tanh", "lstm", "gru"]))
    hidden = draw(st.integers(1, 4) | st.sampled_from([16, 19, 33]))  # vector widths
    skip = draw(st.booleans())
    fields = {
        "input_size": hidden if skip else draw(st.integers(1, 4)),
        "hidden_size": hidden,
        "num_layers": draw(st.integers(1, 3)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.sampled_from(["double", "input", "recurrent", "none"])),
        "dropout": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "input_mode": "skip" if skip else "linear",
    }
    if mode == "lstm":
        fields["proj_size"] = draw(st.integers(0, hidden - 1))
        fields["cell_clip"] = draw(st.sampled_from([None, 0.4, 1.0]))
        fields["clip_nan"] = fields["cell_clip"] is not None and draw(st.booleans())
    if mode == "gru":
        fields["reset_after"] = draw(st.booleans())
    return Spec(mode, **fields)


@st.composite
def calls(draw) -> Case:
    spec = draw(specs())
    steps, batch = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    lengths = None
    if draw(st.booleans()):
        one = st.integers(0, steps)
        lengths = tuple(draw(st.lists(one, min_size=batch, max_size=batch)))
    return Case(
        "drawn",
        spec,
        steps,
        batch,
        lengths,
        resets=not spec.bidirectional and draw(st.booleans()),
        padding=draw(st.sampled_from(["zero", "hold", "drop"])),
        time_major=draw(st.booleans()),
        unbatched=batch == 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@settings(max_examples=25)
@given(case=calls(), recompute=st.booleans())
def test_random_calls_match_float64_loop(case, recompute):
    made, run = arguments(case), value_and_pullback(case, None, recompute=recompute)
    got = named(case, *run(made))
    assert_same(case, got, expected(case), dtype="float64")
    assert_padding_is_exact(case, got)
