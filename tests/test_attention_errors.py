"""Attention refuses what it cannot do, and says what to do instead."""

import numpy as np
import pytest
from attention_cases import FEATURES, SIZE, make
from cell_cases import (
    net,
)
from harness import assert_says

from ostinato import cells

LSTM = cells.LSTM(FEATURES + SIZE, 5)


@pytest.mark.parametrize(
    ("make_it", "error", "words"),
    [
        (lambda: cells.Attention(len, memory_size=2), TypeError, "`cell` SizedCell"),
        (
            lambda: cells.Attention(LSTM, "cosine", memory_size=2),
            ValueError,
            "`kind` 'regular' 'dot' 'cosine'",
        ),
        (
            lambda: cells.Attention(LSTM, memory_size=5),
            ValueError,
            "`cell` input_size=5 memory_size=5",
        ),
        (
            lambda: cells.Attention(LSTM, memory_size=0),
            ValueError,
            "`memory_size` at least 1",
        ),
        (lambda: cells.Attention(LSTM), ValueError, "`memory_size` at least 1"),
        (lambda: cells.Attention(LSTM, "dot", 1.5), TypeError, "`memory_size` 1.5"),
    ],
)
def test_bad_attention_is_refused(make_it, error, words):
    with pytest.raises(error) as info:
        make_it()
    assert_says(info, words)


@pytest.mark.parametrize(
    ("memory", "lengths", "error", "words"),
    [
        (np.zeros((3, 4)), None, ValueError, "`memory` [B, M, E]"),
        (np.zeros((3, 4, 5)), None, ValueError, "`memory` (3, 4, 3) (3, 4, 5)"),
        (np.zeros((3, 4, 3), int), None, TypeError, "`memory` float32 int64"),
        ([[1.0]], None, TypeError, "`memory` array"),
        (np.zeros((3, 4, 3)), [1, 2], ValueError, "`memory_lengths` (3,) (2,)"),
        (np.zeros((3, 4, 3)), [1, 2, 5], ValueError, "`memory_lengths` 0..M 0..4 5"),
        (np.zeros((3, 4, 3)), [1, 2, -1], ValueError, "`memory_lengths` -1"),
        (np.zeros((3, 4, 3)), [1.0, 2, 3], TypeError, "`memory_lengths` integers"),
    ],
)
def test_bad_memory_is_refused(memory, lengths, error, words):
    attention = cells.Attention(LSTM, memory_size=SIZE)
    with pytest.raises(error) as info:
        attention.attend(memory, lengths)
    assert_says(info, words)


def test_attention_without_memory_says_what_to_do():
    attention, (params, x, memory, states) = make("soft_coverage")
    with pytest.raises(ValueError, match=r"has no memory.*attend\(memory"):
        net(attention, params, x, states)
    with pytest.raises(ValueError, match=r"has no memory"):
        attention.initial_state(3)


def test_memory_of_other_rows_or_dtype_is_refused():
    attention, (params, x, memory, states) = make("regular")
    with pytest.raises(ValueError, match=r"`states.context` must have shape"):
        net(attention.attend(memory[:2]), params, x, states)
    with pytest.raises(TypeError, match=r"`params` must have the dtype of `memory`"):
        net(attention.attend(memory.astype("float32")), params, x, states)
    with pytest.raises(TypeError, match=r"`states` must be an AttentionState"):
        net(attention.attend(memory), params, x, tuple(states)[:2])
    with pytest.raises(TypeError, match=r"`params` of Attention must be Attention"):
        net(attention.attend(memory), params.cell, x, states)
