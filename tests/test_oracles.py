"""Tests of the oracle: its gradient, closed forms, and that it notices errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ID, CASES, Case, make_inputs
from oracles import loop64, scan_jax
from oracles.loop64 import Spec
from tolerance import assert_close

NAMES = ("weights", "x", "h_0", "c_0")


def make_keep(case: Case):
    """Draw dropout masks that keep about half of the elements."""
    rng = np.random.default_rng(7)
    shape = (case.spec.num_layers - 1, case.batch, case.steps, case.spec.width)
    return rng.random(shape) < 0.5


def run_case(case: Case, **changes):
    """Run ``loop64.vjp`` on the inputs of `case`, with some of them changed."""
    made = make_inputs(case)._replace(**changes)
    args = [getattr(made, name) for name in NAMES]
    keep = make_keep(case) if case.keyed else None
    options = dict(seq_lengths=made.seq_lengths, resets=made.resets, dropout_masks=keep)
    result, pullback = loop64.vjp(case.spec, *args, padding=case.padding, **options)
    return made, result, pullback


def loss(made, result):
    """Return the inner product of cotangents and result, without the padding."""
    total = np.sum(np.nan_to_num(made.dy) * result.y) + np.sum(made.dh_n * result.h_n)
    return total if result.c_n is None else total + np.sum(made.dc_n * result.c_n)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_gradient_matches_finite_differences(case):
    made, result, pullback = run_case(case)
    grads = pullback(made.dy, made.dh_n, made.dc_n)
    assert all(np.isfinite(a).all() for a in (*result, *grads) if a is not None)
    rng, eps = np.random.default_rng(1), 1e-6
    for name in NAMES:
        value = getattr(made, name)
        if value is None:
            continue
        # A random direction depends on every element, so no wrong one is missed.
        step = rng.standard_normal(value.shape)
        if name == "c_0":  # the state m of an sLSTM jumps where n leaves 0
            step = np.where(value == 0, 0, step)
        ends = [run_case(case, **{name: value + s * step}) for s in (eps, -eps)]
        slope = (loss(*ends[0][:2]) - loss(*ends[1][:2])) / (2 * eps)
        product = np.sum(getattr(grads, name) * step)
        size = 1 + np.abs(getattr(grads, name) * step).sum()
        assert abs(product - slope) < 1e-7 * size, name


@pytest.mark.parametrize(
    "id",
    [
        "lstm-proj-L2-bi-ragged",
        "lstm-clip-proj-bi",
        "gru-resets",
        "gru_before-resets",
        "gru_before-bias-none",
        "tanh-skip",
        "relu-L2-bi-ragged",
        "lstm-dropout",
        "gru-heads",
        "slstm-resets",
        "slstm-heads-of-1",
    ],
)
def test_plain_scan_matches_the_loop(id):
    case = BY_ID[id]
    made, result, pullback = run_case(case)
    keep = jnp.asarray(make_keep(case)) if case.keyed else None

    def scan(args):
        return scan_jax.run(
            case.spec,
            *args,
            seq_lengths=None if case.lengths is None else jnp.array(case.lengths),
            resets=None if made.resets is None else jnp.array(made.resets),
            dropout_masks=keep,
        )

    @jax.jit
    def both(args, cotangents):
        out, pull = jax.vjp(scan, args)
        return out, pull(cotangents)[0]

    args = [None if a is None else jnp.array(a) for a in made[:4]]
    dy = np.nan_to_num(made.dy)
    cts = loop64.Result(dy, made.dh_n, made.dc_n)
    got, grads = both(args, cts)
    want = pullback(*cts)
    pairs = zip((*got, *grads), (*result, want.weights, want.x, *want[2:]), strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, terms=case.terms)


def test_zero_recurrence_gives_the_cell_of_each_input_alone():
    spec = Spec("lstm", 2, 3, bias="none")
    rng = np.random.default_rng(0)
    w_ih, x = rng.standard_normal((12, 2)), rng.standard_normal((2, 4, 2))
    w_hh = np.zeros((12, 3))
    y = loop64.forward(spec, np.concatenate([w_ih.ravel(), w_hh.ravel()]), x).y
    i, f, g, o = np.split(x @ w_ih.T, 4, axis=-1)
    i, f, o = (1 / (1 + np.exp(-a)) for a in (i, f, o))
    c = np.zeros((2, 3))
    for t in range(4):
        c = f[:, t] * c + i[:, t] * np.tanh(g[:, t])
        want = o[:, t] * np.tanh(c)
        np.testing.assert_allclose(y[:, t], want, rtol=1e-12, atol=1e-12)


def test_open_forget_gate_gives_a_running_sum():
    spec, steps = Spec("lstm", 1, 1), 6
    x = np.arange(1.0, steps + 1).reshape(1, steps, 1) / 20
    w_ih, b_ih = np.array([0.0, 0.0, 1.0, 0.0]), np.array([40.0, 40.0, 0.0, 40.0])
    weights = np.concatenate([w_ih, np.zeros(4), b_ih, np.zeros(4)])
    y, _, c_n = loop64.forward(spec, weights, x)
    total = np.cumsum(np.tanh(x), axis=1)
    np.testing.assert_allclose(y, np.tanh(total), rtol=1e-12)
    np.testing.assert_allclose(c_n[0], total[:, -1], rtol=1e-12)


@pytest.mark.parametrize("reset_after", [True, False])
def test_closed_update_gate_holds_the_first_state(reset_after):
    spec = Spec("gru", 2, 2, reset_after=reset_after)
    weights = np.zeros(loop64.num_params(spec))
    weights[24 + 2 : 24 + 4] = 50.0  # b_ih of z
    h_0 = np.array([[[0.3, -0.8]]])
    y = loop64.forward(spec, weights, np.ones((1, 5, 2)), h_0).y
    np.testing.assert_allclose(y, np.tile(h_0, (1, 5, 1)), rtol=1e-12)


def test_one_step_of_the_plain_recurrence_is_its_formula():
    spec = Spec("rnn_tanh", 2, 3, bias="input")
    rng = np.random.default_rng(2)
    w_ih, w_hh, b = (rng.standard_normal(s) for s in ((3, 2), (3, 3), 3))
    x, h_0 = rng.standard_normal((4, 1, 2)), rng.standard_normal((1, 4, 3))
    flat = np.concatenate([w_ih.ravel(), w_hh.ravel(), b])
    y, h_n, _ = loop64.forward(spec, flat, x, h_0)
    want = np.tanh(x[:, 0] @ w_ih.T + h_0[0] @ w_hh.T + b)
    np.testing.assert_allclose(y[:, 0], want, rtol=1e-13)
    np.testing.assert_allclose(h_n[0], want, rtol=1e-13)


def test_reverse_direction_of_a_short_row_starts_at_its_own_end():
    case = BY_ID["gru-L2-bi-ragged"]
    spec = dataclasses.replace(case.spec, num_layers=1)
    uni = dataclasses.replace(spec, bidirectional=False)
    made = make_inputs(dataclasses.replace(case, spec=spec))
    matrices = loop64.unpack(spec, made.weights)
    both = loop64.forward(
        spec, made.weights, made.x, made.h_0, seq_lengths=made.seq_lengths
    )
    for b, n in enumerate(case.lengths):
        flipped = made.x[b : b + 1, :n][:, ::-1]
        alone = loop64.forward(
            uni, loop64.pack(matrices[1:]), flipped, made.h_0[1:, b : b + 1]
        )
        np.testing.assert_array_equal(both.y[b, :n, 3:], alone.y[0, ::-1])
        np.testing.assert_array_equal(both.h_n[1, b], alone.h_n[0, 0])


@pytest.mark.parametrize("kind", ["lstm", "gru", "gru_before"])
def test_comparison_notices_swapped_gates(kind):
    """Check that two swapped gates change every result and every gradient."""
    case = BY_ID[f"{kind}-plain"]
    made, result, pullback = run_case(case)
    size = case.spec.hidden_size
    order = np.arange(loop64.GATES[case.spec.mode] * size).reshape(-1, size)
    order[[0, 1]] = order[[1, 0]]
    swapped = [
        p._replace(**{k: getattr(p, k)[order.ravel()] for k in loop64.Params._fields
                      if getattr(p, k) is not None})
        for p in loop64.unpack(case.spec, made.weights)
    ]  # fmt: skip
    _, other, other_pullback = run_case(case, weights=loop64.pack(swapped))
    cotangents = made.dy, made.dh_n, made.dc_n
    pairs = zip(
        (*result, *pullback(*cotangents)),
        (*other, *other_pullback(*cotangents)),
        strict=True,
    )
    for a, b in pairs:
        assert a is None or np.abs(a - b).max() > 1e-2


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.resets and c.batch > 1], ids=lambda c: c.id
)
def test_cases_with_resets_cut_one_row_off_and_no_other(case):
    """Check that not all sequences begin with a reset, which would hide errors."""
    made, _, pullback = run_case(case)
    dh_0 = pullback(made.dy).h_0
    assert not dh_0[:, 0].any() and dh_0[:, 2].any()
    assert made.resets[2, 1 : case.lengths[2]].any()


def test_case_ids_are_unique_and_inputs_repeat():
    assert len(BY_ID) == len(CASES)
    for case in CASES[:5]:
        for a, b in zip(make_inputs(case), make_inputs(case), strict=True):
            np.testing.assert_array_equal(a, b)
