"""Tests of the float64 loop against torch, where torch has the operator."""

import dataclasses

import numpy as np
import pytest
from cases import CASES, Case, make_inputs
from oracles import loop64
from tolerance import assert_close

pytestmark = pytest.mark.peers
REASON = "needs torch, from the extra `peers`"
torch_rnn = pytest.importorskip("oracles.torch_rnn", reason=REASON)


def torch_has(case: Case) -> bool:
    spec = case.spec
    if spec.mode == "slstm" or spec.num_heads > 1:
        return False
    plain = spec.input_mode == "linear" and spec.reset_after and not spec.cell_clip
    rows = (
        case.steps
        and case.batch
        and not case.resets
        and case.padding == "zero"
        and not case.keyed
    )
    return bool(plain and rows and spec.bias in ("double", "none"))


def for_torch(case: Case) -> Case:
    """Replace lengths of 0, which torch's packed sequences do not allow, by 1."""
    lengths = case.lengths and tuple(max(1, n) for n in case.lengths)
    return dataclasses.replace(case, lengths=lengths)


SHARED = [for_torch(c) for c in CASES if torch_has(c)]


@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.id)
def test_loop_matches_torch(case):
    made = make_inputs(case)
    args = made.weights, made.x, made.h_0, made.c_0
    want, pullback_want = loop64.vjp(case.spec, *args, seq_lengths=made.seq_lengths)
    got, pullback_got = torch_rnn.vjp(
        case.spec, made.weights, np.nan_to_num(made.x), *args[2:],
        seq_lengths=made.seq_lengths,
    )  # fmt: skip
    dy = np.nan_to_num(made.dy)
    for which in range(4):  # y, h_n, c_n alone, then together
        cts = [d if which in (i, 3) else None for i, d in enumerate((dy, *made[-2:]))]
        pairs = [*zip(got, want, strict=True)]
        pairs += zip(pullback_got(*cts), pullback_want(*cts), strict=True)
        for a, b in pairs:
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b, terms=case.terms)


def test_every_mode_and_projection_is_shared():
    seen = {(c.spec.mode, bool(c.spec.proj_size)) for c in SHARED}
    modes = {(m, False) for m in loop64.GATES if m != "slstm"}
    assert seen == modes | {("lstm", True)}
    assert any(c.lengths and c.spec.bidirectional for c in SHARED)
