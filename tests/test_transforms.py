"""Tests of JAX's transformations of the operator: values and first derivatives.

Second derivatives, vmap and sharding have test files of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import (
    BY_ID,
    CASES,
    Primal,
    direction_of,
    fast_jit,
    gradient_of,
    loss_of,
    ours,
    ours_in,
    plain,
    primal_of,
)
from jax import export, lax
from tolerance import assert_close

import ostinato as ost

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
some_cases = pytest.mark.parametrize(
    "case", [BY_ID["lstm"], BY_ID["gru"]], ids=lambda c: c.id
)
small_cases = pytest.mark.parametrize(
    "case", [BY_ID["gru_before"], BY_ID["dropout"]], ids=lambda c: c.id
)


def assert_trees_close(got, want, terms=100):
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
    assert [k for k, _ in got] == [k for k, _ in want]
    for (path, a), (_, b) in zip(got, want, strict=True):
        assert_close(a, b, terms=terms, what=jax.tree_util.keystr(path))


# --- jit, scan, remat, export --------------------------------------------------------


@every_case
def test_jit_equals_eager_and_the_plain_scan(case):
    operator, primal = ours(case), primal_of(case)
    eager = operator(primal)
    assert_trees_close(fast_jit(operator)(primal), eager)
    assert_trees_close(fast_jit(plain(case))(primal), eager)


def test_lists_may_hold_traced_numbers():
    spec = ost.RNNSpec("lstm", 3, 4)
    weights, x = ost.init_weights(jax.random.key(0), spec), jnp.ones((2, 5, 3), "f4")
    runs = {
        "lengths": lambda n: ost.rnn(spec, weights, x, seq_lengths=[n, 2]).y,
        "active": lambda n: (
            ost.rnn_step(spec, weights, x[:, 0], active=[n > 2, True]).y
        ),
        "linear": lambda n: ost.linear_recurrence(x[0, 0], x, seq_lengths=[n, 2]).h,
    }
    for name, run in runs.items():
        np.testing.assert_allclose(jax.jit(run)(3), run(3), rtol=1e-6, err_msg=name)


@some_cases
def test_scan_over_calls_equals_a_loop_over_calls(case):
    """Check chunks of a stream, with the state passed on, values and gradients."""
    primal = primal_of(case)
    chunks = jnp.stack([primal.x, 0.5 * primal.x, -primal.x])
    operator = ours(case)

    def step(weights, state, x):
        y, *state = operator(Primal(weights, x, *state))
        return tuple(state), y

    def scanned(weights, chunks, *state):
        state, ys = lax.scan(lambda s, x: step(weights, s, x), state, chunks)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(state[0])

    def looped(weights, chunks, *state):
        total = 0.0
        for x in chunks:
            state, y = step(weights, state, x)
            total += jnp.sum(jnp.sin(y))
        return total + jnp.sum(state[0])

    args = primal.weights, chunks, primal.h_0, primal.c_0
    wrt = (0, 1, 2)
    got = fast_jit(jax.value_and_grad(scanned, wrt))(*args)
    assert_trees_close(got, fast_jit(jax.value_and_grad(looped, wrt))(*args))


POLICIES = ("nothing_saveable", "everything_saveable", "dots_saveable")


@some_cases
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_keeps_values_and_gradients(case, policy):
    loss, primal = loss_of(case, ours(case)), primal_of(case)
    saved = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    names = ours_in(jax.grad(saved), primal)
    again = policy != "everything_saveable"  # the forward pass runs again
    assert names.count("ostinato_rnn") == 1 + again
    assert names.count("ostinato_rnn_bwd") == 1
    got = fast_jit(jax.value_and_grad(saved))(primal)
    assert_trees_close(got, gradient_of(case)(primal))


@every_case
def test_export_round_trip_keeps_values_and_gradients(case):
    fn = jax.value_and_grad(loss_of(case, ours(case)))
    primal = primal_of(case)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), primal)

    def of_leaves(*leaves):  # unregistered named tuples cannot be serialized
        return jax.tree.leaves(fn(jax.tree.unflatten(tree, leaves)))

    leaves, tree = jax.tree.flatten(shapes)
    blob = export.export(jax.jit(of_leaves))(*leaves).serialize()
    got = export.deserialize(blob).call(*jax.tree.leaves(primal))
    assert_trees_close(got, jax.tree.leaves(gradient_of(case)(primal)))


def test_export_with_symbolic_sizes_serves_every_batch_and_length():
    """Check one exported program for all B and T, values and gradients."""
    spec = ost.RNNSpec("lstm", 2, 3, 2, bidirectional=True)
    weights = ost.init_weights(jax.random.key(0), spec, jnp.float64)

    def run(weights, x, seq_lengths):
        def loss(weights):
            y, _ = ost.rnn(spec, weights, x, seq_lengths=seq_lengths, padding="hold")
            return jnp.sum(y**2), y

        (_, y), grad = jax.value_and_grad(loss, has_aux=True)(weights)
        return y, grad

    b, t = export.symbolic_shape("b, t")
    shapes = (
        jax.ShapeDtypeStruct(weights.shape, weights.dtype),
        jax.ShapeDtypeStruct((b, t, 2), weights.dtype),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )
    blob = export.export(jax.jit(run))(*shapes).serialize()
    exported = export.deserialize(blob)
    for lengths, steps in (((2, 0, 5), 5), ((7,), 8)):
        x = jax.random.normal(jax.random.key(1), (len(lengths), steps, 2))
        args = weights, x, jnp.array(lengths, jnp.int32)
        assert_trees_close(exported.call(*args), fast_jit(run)(*args))


# --- first derivatives ---------------------------------------------------------------


@every_case
def test_grad_matches_the_plain_scan_through_two_fused_primitives(case):
    loss, primal = loss_of(case, ours(case)), primal_of(case)
    assert ours_in(jax.grad(loss), primal) == ["ostinato_rnn", "ostinato_rnn_bwd"]
    _, got = gradient_of(case)(primal)
    assert_trees_close(got, fast_jit(jax.grad(loss_of(case, plain(case))))(primal))
    assert np.isfinite(got.x).all()


@small_cases
def test_gradient_of_one_argument_equals_its_part_of_all(case):
    """Check gradients of one argument, which are computed without the others."""
    primal, loss = primal_of(case), loss_of(case, ours(case))
    names = [n for n, value in primal._asdict().items() if value is not None]

    def one_by_one(primal):
        return {
            n: jax.grad(lambda v, n=n: loss(primal._replace(**{n: v})))(
                getattr(primal, n)
            )
            for n in names
        }

    _, every = gradient_of(case)(primal)
    got = fast_jit(one_by_one)(primal)
    assert_trees_close(got, {n: getattr(every, n) for n in names})


@every_case
def test_jvp_matches_finite_differences(case):
    operator, primal, step = ours(case), primal_of(case), direction_of(case)
    assert ours_in(lambda p, d: jax.jvp(operator, (p,), (d,)), primal, step) == [
        "ostinato_rnn",
        "ostinato_rnn_tangent",
    ]
    out, tangent = fast_jit(lambda p, d: jax.jvp(operator, (p,), (d,)))(primal, step)
    run, eps = fast_jit(operator), 1e-5
    ends = [
        run(jax.tree.map(lambda a, d, s=s: a + s * d, primal, step))
        for s in (eps, -eps)
    ]
    assert_trees_close(out, run(primal))
    for got, high, low in zip(*map(jax.tree.leaves, (tangent, *ends)), strict=True):
        slope = (high - low) / (2 * eps)
        np.testing.assert_allclose(got, slope, rtol=1e-7, atol=1e-7)


@every_case
def test_tangent_and_cotangent_agree(case):
    """Check <jvp(v), w> = <v, vjp(w)>, and that linearize equals jvp."""
    operator, primal, step = ours(case), primal_of(case), direction_of(case)

    @fast_jit
    def both(primal, step, bar):
        _, tangent = jax.jvp(operator, (primal,), (step,))
        _, linear = jax.linearize(operator, primal)
        _, pull = jax.vjp(operator, primal)
        (pulled,) = pull(bar)
        (transposed,) = jax.linear_transpose(linear, primal)(bar)
        return tangent, linear(step), pulled, transposed

    rng, out = np.random.default_rng(3), operator(primal)
    bar = jax.tree.map(lambda o: jnp.asarray(rng.standard_normal(o.shape)), out)
    tangent, linear, pulled, transposed = both(primal, step, bar)
    assert_trees_close(linear, tangent)
    assert_trees_close(transposed, pulled)
    assert_close(dot(tangent, bar), dot(step, pulled), terms=1000)


def dot(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(jnp.nan_to_num(u) * v) for u, v in pairs)


@some_cases
def test_jacfwd_equals_jacrev(case):
    operator, primal = ours(case), primal_of(case)

    def of_state(h_0):
        return operator(primal._replace(h_0=h_0))

    forward = fast_jit(jax.jacfwd(of_state))(primal.h_0)
    assert_trees_close(forward, fast_jit(jax.jacrev(of_state))(primal.h_0))
    assert np.abs(forward[0]).max() > 1e-3


@small_cases
def test_tangent_of_a_single_argument_matches_the_plain_scan(case):
    """Check tangents of one argument, with symbolic zeros for the others."""
    primal, step = primal_of(case), direction_of(case)

    def one_by_one(operator):
        def tangent(name):
            def of_one(v):
                return operator(primal._replace(**{name: v}))

            return jax.jvp(of_one, (getattr(primal, name),), (getattr(step, name),))[1]

        return fast_jit(lambda: [tangent(n) for n in ("weights", "x", "h_0")])()

    assert_trees_close(one_by_one(ours(case)), one_by_one(plain(case)))


def test_integer_arguments_have_no_gradient():
    """Check that a differentiated function may have lengths as an argument."""
    case = BY_ID["gru"]
    primal, lengths = primal_of(case), jnp.asarray(case.lengths, jnp.int32)

    def loss(primal, lengths):
        return loss_of(case, ours(case, seq_lengths=lengths))(primal)

    grads = fast_jit(jax.grad(loss, (0, 1), allow_int=True))(primal, lengths)
    assert grads[1].dtype == jax.dtypes.float0
    assert_trees_close(grads[0], gradient_of(case)(primal)[1])


# --- unusual programs ---------------------------------------------------------------


def test_without_jit_it_still_runs():
    spec = ost.RNNSpec("gru", 2, 3)
    w, x = (
        ost.init_weights(jax.random.key(0), spec, dtype="float64"),
        jnp.ones((2, 4, 2)),
    )
    total = lambda w: ost.rnn(spec, w, x).y.sum()  # noqa: E731
    want = jax.value_and_grad(total)(w)
    with jax.disable_jit():
        assert_trees_close(jax.value_and_grad(total)(w), want, terms=100)
        assert_trees_close(ost.rnn(spec, ost.prepare(spec, w), x).y.sum(), want[0])


def test_mapped_tangents_can_be_transposed():
    spec = ost.RNNSpec("lstm", 2, 3)
    w, x = (
        ost.init_weights(jax.random.key(0), spec, dtype="float64"),
        jnp.ones((2, 4, 2)),
    )
    run = lambda w: ost.rnn(spec, w, x).y  # noqa: E731
    _, tangent = jax.linearize(run, w)
    several = jnp.stack([w, 2 * w, w[::-1]])
    bars = jnp.cos(jax.vmap(tangent)(several))
    (got,) = jax.linear_transpose(jax.vmap(tangent), several)(bars)
    _, pull_back = jax.vjp(run, w)
    assert_trees_close(got, jnp.stack([pull_back(bar)[0] for bar in bars]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_state_of_a_row_without_steps_may_be_nan(mode, reverse):
    spec = ost.RNNSpec(mode, 2, 3, bidirectional=reverse)
    w = ost.init_weights(jax.random.key(0), spec, dtype="float64")
    x = jnp.ones((2, 4, 2))
    state = jnp.zeros((1 + reverse, 2, 3)).at[:, 0].set(jnp.nan)
    state = (state, state) if mode == "lstm" else state

    def total(w, backend):
        y = ost.rnn(spec, w, x, state, seq_lengths=[0, 4], backend=backend).y
        return y.sum()

    for backend in ("xla", None):
        assert np.isfinite(jax.grad(total)(w, backend)).all()
