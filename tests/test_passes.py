"""Tests of explicit passes: functions of one cell, and what conformance leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import BY_ID, Variable, direction_of, fast_jit, primal_of
from harness import arguments, join, options_of, spec_of, split
from oracles import loop64
from oracles.loop64 import Spec, num_params
from test_transforms import assert_trees_close
from tolerance import assert_close

import ostinato as ost

BATCH, INPUT, HIDDEN = 3, 2, 5
KINDS = {  # functions, spec of the oracle, further arguments
    "gru": ("gru", Spec("gru", INPUT, HIDDEN), ()),
    "lstm": ("lstm", Spec("lstm", INPUT, HIDDEN), ()),
    "rnn": ("rnn", Spec("rnn_tanh", INPUT, HIDDEN), ()),
    "rnn-tanh": ("rnn", Spec("rnn_tanh", INPUT, HIDDEN), ("tanh",)),
    "rnn-relu": ("rnn", Spec("rnn_relu", INPUT, HIDDEN), ("relu",)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, dtype="float64"):
    """Make arguments, cotangents, and the oracle's states and gradients."""
    name, spec, _ = KINDS[kind]
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.7, dtype)

    weights, x = draw(num_params(spec)), draw(BATCH, INPUT)
    states = [draw(BATCH, HIDDEN) for _ in range(1 + (name == "lstm"))]
    cotangents = [draw(BATCH, HIDDEN) for _ in states]
    result, pullback = loop64.vjp(
        spec, weights, x[:, None], *(np.asarray(s)[None] for s in states)
    )
    p = ost.unpack_weights(weights, ost.RNNSpec(spec.mode, INPUT, HIDDEN))[0]
    args = (x, *states, p.w_ih, p.w_hh, p.b_ih, p.b_hh)
    grads = pullback(None, *(np.asarray(d)[None] for d in cotangents))
    dp = loop64.unpack(spec, grads.weights)[0]
    dstates = [d[0] for d in (grads.h_0, grads.c_0) if d is not None]
    want_grads = (grads.x[:, 0], *dstates, dp.w_ih, dp.w_hh, dp.b_ih, dp.b_hh)
    want = [s[0] for s in (result.h_n, result.c_n) if s is not None]
    return args, cotangents, want, want_grads


def functions(kind: str):
    name, _, extra = KINDS[kind]
    trio = [
        getattr(ost, f"{name}_cell_{suffix}")
        for suffix in ("inference", "forward", "backward")
    ]
    return trio, extra


@every_kind
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_cell_trio_matches_one_step_of_the_loop(kind, dtype):
    (inference, forward, backward), extra = functions(kind)
    args, cotangents, want, want_grads = make(kind, dtype)
    states = inference(*args, *extra)
    same, reserve = forward(*args, *extra)
    for out in (states, same):
        for got, value in zip(jax.tree.leaves(out), want, strict=True):
            assert got.dtype == jnp.dtype(dtype)
            assert_close(got, value, terms=INPUT + HIDDEN)
    w_ih, w_hh = args[-4:-2]
    grads = backward(*cotangents, reserve, w_ih, w_hh, *extra)
    state_names = ("h", "c")[: len(want)]
    assert grads._fields == ("x", *state_names, "w_ih", "w_hh", "b_ih", "b_hh")
    for name, got, value in zip(grads._fields, grads, want_grads, strict=True):
        assert got.dtype == jnp.dtype(dtype)
        assert_close(got, value, terms=BATCH * HIDDEN, what=name)


def test_gru_reserve_holds_gates_and_recurrent_product():
    args, *_ = make("gru")
    x, h, w_ih, w_hh, b_ih, b_hh = (np.asarray(a) for a in args)
    _, reserve = ost.gru_cell_forward(*args)
    assert reserve._fields == ("r", "z", "n", "uh", "x", "h")
    gx, gh = x @ w_ih.T + b_ih, h @ w_hh.T + b_hh
    r, z = (1 / (1 + np.exp(-(a + b))) for a, b in zip(
        np.split(gx, 3, 1)[:2], np.split(gh, 3, 1)[:2], strict=True
    ))  # fmt: skip
    uh = gh[:, 2 * HIDDEN :]
    n = np.tanh(gx[:, 2 * HIDDEN :] + r * uh)
    for got, want in zip(reserve, (r, z, n, uh, x, h), strict=True):
        assert_close(got, want, terms=INPUT + HIDDEN)


@every_kind
def test_cell_backward_is_differentiable_too(kind):
    """Compare JAX's derivative of our gradient with that of JAX's own gradient."""
    (inference, forward, backward), extra = functions(kind)
    args, cotangents, *_ = make(kind)
    rng = np.random.default_rng(4)
    step = [jnp.asarray(rng.standard_normal(a.shape)) for a in args]

    def explicit(*args):
        _, reserve = forward(*args, *extra)
        return tuple(backward(*cotangents, reserve, *args[-4:-2], *extra))

    def automatic(*args):
        out, pull = jax.vjp(lambda *a: inference(*a, *extra), *args)
        cts = cotangents if isinstance(out, tuple) else cotangents[0]
        return pull(tuple(cts) if isinstance(out, tuple) else cts)

    got, want = fast_jit(
        lambda args, step: [jax.jvp(f, args, step) for f in (explicit, automatic)]
    )(args, tuple(step))
    assert_trees_close(got, want)


@pytest.mark.parametrize("id", ["lstm", "gru"])
def test_passes_are_differentiable_too(id):
    """Compare the tangent of our gradient with that of JAX's gradient of `rnn`."""
    case = BY_ID[id]
    made, spec, step = arguments(case), spec_of(case), direction_of(case)
    options = options_of(case, made, None)
    cotangent = ost.RNNOutput(made.dy, join(made.dh_n, made.dc_n))

    def explicit(p):
        state = join(p.h_0, p.c_0)
        out, reserve = ost.rnn_forward(spec, p.weights, p.x, state, **options)
        grads = ost.rnn_backward(spec, p.weights, reserve, *cotangent)
        return out, type(p)(grads.weights, grads.x, *split(grads.initial_state))

    def automatic(p):
        def run(p):
            return ost.rnn(spec, p.weights, p.x, join(p.h_0, p.c_0), **options)

        out, pull = jax.vjp(run, p)
        return out, pull(cotangent)[0]

    got, want = fast_jit(
        lambda p, d: [jax.jvp(f, (p,), (d,)) for f in (explicit, automatic)]
    )(primal_of(case), step)
    assert_trees_close(got, want, terms=1000)


def test_reserve_crosses_the_edge_of_jit():
    """Check forward and backward passes in two compiled functions."""
    case = BY_ID["lstm"]
    made, spec = arguments(case), spec_of(case)
    options, state = options_of(case, made, None), join(made.h_0, made.c_0)

    def forward(weights, x):
        return ost.rnn_forward(spec, weights, x, state, **options)

    def backward(weights, reserve, dy):
        return ost.rnn_backward(spec, weights, reserve, dy)

    _, reserve = fast_jit(forward)(made.weights, made.x)
    got = fast_jit(backward)(made.weights, reserve, made.dy)
    _, reserve = forward(made.weights, made.x)
    want = ost.rnn_backward(spec, made.weights, reserve, made.dy)
    assert_trees_close(got, want)


def test_recompute_keeps_no_gates_in_the_reserve():
    case = BY_ID["gru"]
    made, spec = arguments(case), spec_of(case)

    def sizes(recompute):
        def forward(made):
            return ost.rnn_forward(
                spec, made.weights, made.x, made.h_0, recompute=recompute
            )[1]

        leaves = jax.tree.leaves(jax.eval_shape(forward, made))
        return sum(leaf.size for leaf in leaves)

    gates = case.spec.num_layers * case.batch * case.steps * 3 * case.spec.hidden_size
    assert sizes(False) - sizes(True) >= gates


def test_state_cotangent_alone_is_enough():
    case = BY_ID["gru"]
    made, spec = arguments(case), spec_of(case)
    options = options_of(case, made, None)
    _, reserve = ost.rnn_forward(spec, made.weights, made.x, made.h_0, **options)
    got = ost.rnn_backward(spec, made.weights, reserve, None, made.dh_n)
    zeros = jnp.zeros_like(made.dy)
    want = ost.rnn_backward(spec, made.weights, reserve, zeros, made.dh_n)
    assert_trees_close(got, want)


@every_kind
def test_cell_trio_takes_variables_and_arrays_of_numpy_in_float64(kind):
    """Without `jax_enable_x64` the latter are float32 as soon as they are JAX's."""
    (_, forward, backward), extra = functions(kind)
    with jax.enable_x64(False):
        args, cotangents, _, _ = make(kind, "float32")
        weights = args[-4:-2]

        def both(change):
            *states, reserve = forward(*map(change, args), *extra)
            grads = backward(*map(change, cotangents), reserve, *map(change, weights))
            return states, grads

        want = both(lambda a: a)
        for change in (Variable, lambda a: np.asarray(a, np.float64)):
            assert_trees_close(both(change), want)
            got = jax.tree.leaves(both(change))
            assert {a.dtype for a in got} == {np.dtype("float32")}
