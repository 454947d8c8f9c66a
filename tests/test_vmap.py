"""Tests that vmap over data, weights, both, lengths, resets and keys equals a loop.

They also check that vmap keeps one call of each primitive, without a Python loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_inputs
from closures import (
    BY_ID,
    Case,
    Primal,
    direction_of,
    fast_jit,
    gradient_of,
    loss_of,
    ours,
    ours_in,
    primal_of,
)
from harness import rounded
from jaxprs import equations_in
from oracles.loop64 import Spec
from test_second_derivatives import forward_over_reverse
from test_step_blocks import scaled
from test_step_hunt import assert_same, draw
from test_transforms import assert_trees_close

import ostinato as ost

LSTM, GRU, BEFORE = BY_ID["lstm"], BY_ID["gru"], BY_ID["gru_before"]
SLSTM = BY_ID["slstm"]
some_cases = pytest.mark.parametrize(
    "case", [LSTM, GRU, BEFORE, SLSTM], ids=lambda c: c.id
)
SIZE = 2
AXES = {
    "data": Primal(None, 0, 0, 0),
    "x": Primal(None, 0, None, None),
    "state": Primal(None, None, 0, 0),
    "weights": Primal(0, None, None, None),
    "weights-x": Primal(0, 0, None, None),
    "everything": Primal(0, 0, 0, 0),
}


def without_cells(case: Case, axes: Primal) -> Primal:
    return axes if case.spec.cells else axes._replace(c_0=None)


def spread(case: Case, axes: Primal, size: int = SIZE, seed: int = 8) -> Primal:
    """Return the primal, with `size` arrays stacked where `axes` has a number."""
    rng = np.random.default_rng(seed)

    def stack(a, axis):
        if axis is None or a is None:
            return a
        noise = 0.3 * rng.standard_normal((size, *a.shape))
        return np.moveaxis(np.asarray(a) + noise, 0, axis)

    return Primal(*(stack(a, n) for a, n in zip(primal_of(case), axes, strict=True)))


def loop(fn, axes, *args):
    """Return the reference for vmap, with one Python iteration per element."""
    size = next(
        a.shape[n] for a, n in zip(args, axes, strict=True) if n is not None
    )  # fmt: skip
    outs = []
    for i in range(size):
        parts = (
            a if n is None else a[(slice(None),) * n + (i,)]
            for a, n in zip(args, axes, strict=True)
        )
        outs.append(fn(*parts))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *outs)


def vmap(fn, axes, out_axes=0):
    return jax.vmap(fn, tuple(axes), out_axes)  # axes must be a plain tuple


def flat(fn):
    """Turn a function of a `Primal` into a function of its fields."""
    return lambda *fields: fn(Primal(*fields))


@some_cases
@pytest.mark.parametrize("name", AXES)
def test_vmap_of_value_and_gradient_equals_a_loop(case, name):
    axes = without_cells(case, AXES[name])
    primal = spread(case, axes)
    loss = loss_of(case, ours(case))
    one = flat(jax.value_and_grad(loss))
    many = vmap(one, axes)
    assert ours_in(many, *primal) == ["ostinato_rnn", "ostinato_rnn_bwd"]
    got = fast_jit(many)(*primal)
    assert_trees_close(got, loop(flat(gradient_of(case)), axes, *primal))


@some_cases
@pytest.mark.parametrize("name", ["data", "weights", "everything"])
def test_gradient_of_vmap_equals_gradient_of_a_loop(case, name):
    axes = without_cells(case, AXES[name])
    primal = spread(case, axes)
    loss = flat(loss_of(case, ours(case)))

    def mapped(primal):
        return jnp.sum(jnp.tanh(vmap(loss, axes)(*primal)))

    names = ours_in(jax.grad(mapped), primal)
    assert names == ["ostinato_rnn", "ostinato_rnn_bwd"]
    got = fast_jit(jax.grad(mapped))(primal)

    values, grads = loop(flat(gradient_of(case)), axes, *primal)
    slopes = 1 - np.tanh(values) ** 2
    for g, each, axis in zip(got, grads, axes, strict=True):
        if g is None:
            continue
        each = each * slopes.reshape(-1, *[1] * (each.ndim - 1))
        assert_trees_close(g, each if axis == 0 else each.sum(0))


@pytest.mark.parametrize("time_major", [False, True])
def test_mapped_data_joins_the_batch(time_major):
    """Check values, for every position of the mapped axis and of the result's."""
    case = LSTM
    operator = ours(case, time_major=time_major)
    primal = spread(case, Primal(None, 0, 0, 0))
    if time_major:
        primal = primal._replace(x=jnp.swapaxes(primal.x, 1, 2))
    jaxpr = jax.make_jaxpr(vmap(flat(operator), (None, 0, 0, 0)))(*primal)
    calls = equations_in(jaxpr.jaxpr)
    (eqn,) = [e for e in calls if e.primitive.name == "ostinato_rnn"]
    rows = SIZE * case.batch
    wanted = (case.steps, rows, 2) if time_major else (rows, case.steps, 2)
    assert wanted in [v.aval.shape for v in eqn.invars]

    want = loop(fast_jit(flat(operator)), (None, 0, 0, 0), *primal)
    for x_axis, h_axis, out_axis in ((0, 0, 0), (1, 2, 1), (2, 1, 2), (3, 3, 3)):
        moved = Primal(
            primal.weights,
            jnp.moveaxis(primal.x, 0, x_axis),
            jnp.moveaxis(primal.h_0, 0, h_axis),
            primal.c_0,
        )
        mapped = vmap(flat(operator), (None, x_axis, h_axis, 0), out_axis)
        got = fast_jit(mapped)(*moved)
        got = jax.tree.map(lambda a, n=out_axis: jnp.moveaxis(a, n, 0), got)
        assert_trees_close(got, want)


LENGTHS = np.array([[2, 0, 4], [4, 1, 0]], np.int32)


@pytest.mark.parametrize(
    "axes",
    [(None, None, 0), (None, 0, 0), (0, None, 0), (0, 0, 0), (0, 0, None)],
    ids=str,
)
def test_mapped_lengths_equal_a_loop(axes):
    """Check mapped lengths, with mapped data or weights or both, and shared lengths."""
    case, (w, x, _) = GRU, axes
    primal = spread(case, Primal(w, x, None, None))
    primal = primal._replace(x=jnp.nan_to_num(primal.x))
    lengths = jnp.asarray(LENGTHS if axes[2] == 0 else LENGTHS[0])

    def one(weights, x, lengths):
        loss = loss_of(case, ours(case, seq_lengths=lengths))
        return jax.value_and_grad(loss)(Primal(weights, x, primal.h_0, None))

    args = primal.weights, primal.x, lengths
    many = vmap(one, axes)
    assert ours_in(many, *args) == ["ostinato_rnn", "ostinato_rnn_bwd"]
    got = fast_jit(many)(*args)
    assert_trees_close(got, loop(fast_jit(one), axes, *args))


@pytest.mark.parametrize("weights", [None, 0])
def test_mapped_resets_equal_a_loop(weights):
    case = GRU
    primal = spread(case, Primal(weights, None, None, None))
    resets = jnp.asarray(np.random.default_rng(0).random((SIZE, 3, 4)) < 0.4)

    def one(weights, resets):
        loss = loss_of(case, ours(case, resets=resets))
        return jax.value_and_grad(loss)(primal._replace(weights=weights))

    args = primal.weights, resets
    got = fast_jit(vmap(one, (weights, 0)))(*args)
    assert_trees_close(got, loop(fast_jit(one), (weights, 0), *args))


@pytest.mark.parametrize("weights", [None, 0])
def test_mapped_keys_equal_a_loop(weights):
    """Check that each element draws the mask of its own key."""
    case = BY_ID["dropout"]
    primal = spread(case, Primal(weights, None, None, None))
    keys = jax.random.split(jax.random.key(4), SIZE)

    def one(weights, key):
        loss = loss_of(case, ours(case, key=key))
        return jax.value_and_grad(loss)(primal._replace(weights=weights))

    args = primal.weights, keys
    got = fast_jit(vmap(one, (weights, 0)))(*args)
    assert_trees_close(got, loop(fast_jit(one), (weights, 0), *args))
    assert np.abs(got[0][0] - got[0][1]) > 1e-3


NESTED = {
    "data in weights": (Primal(0, None, None, None), Primal(None, 0, 0, None)),
    "weights in data": (Primal(None, 0, 0, None), Primal(0, None, None, None)),
    "weights in weights": (Primal(0, 0, None, None), Primal(0, None, 0, None)),
    "data in data": (Primal(None, 0, 0, None), Primal(None, 0, 0, None)),
    "state in weights-x": (Primal(0, 0, None, None), Primal(None, None, 0, None)),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_vmap_equals_nested_loops(name):
    outer, inner = NESTED[name]
    case = BEFORE
    # The inner axis is added first, then the outer one in front of it.
    rng = np.random.default_rng(6)
    primal = spread(case, inner, 3)
    primal = Primal(
        *(
            a if n is None or a is None
            else jnp.stack([a, a + 0.3 * rng.standard_normal(a.shape)])
            for a, n in zip(primal, outer, strict=True)
        )
    )  # fmt: skip
    one = flat(jax.value_and_grad(loss_of(case, ours(case))))
    many = vmap(vmap(one, inner), outer)
    assert ours_in(many, *primal) == ["ostinato_rnn", "ostinato_rnn_bwd"]
    got = fast_jit(many)(*primal)
    compiled = flat(gradient_of(case))
    want = loop(lambda *fields: loop(compiled, inner, *fields), outer, *primal)
    assert_trees_close(got, want)


def test_per_example_gradients_equal_a_loop():
    """Check gradients of shared weights, one for each unbatched sequence."""
    case = Case("one", Spec("lstm", 2, 3, 1, True), 4, 1, (3,), unbatched=True)
    batch = make_inputs(Case("rows", case.spec, 4, 3, (2, 0, 4)))
    x, lengths = jnp.asarray(batch.x), jnp.asarray(batch.seq_lengths)
    weights = jnp.asarray(batch.weights)

    def loss(weights, x, length):
        operator = ours(case, seq_lengths=length)
        h = jnp.asarray(batch.h_0[:, 0])
        y, h_n, c_n = operator(Primal(weights, x, h, h))
        return jnp.sum(jnp.sin(y)) + jnp.sum(h_n * c_n)

    one, axes = jax.grad(loss), (None, 0, 0)
    got = fast_jit(vmap(one, axes))(weights, x, lengths)
    assert got.shape == (3, weights.size) and np.isfinite(got).all()
    assert_trees_close(got, loop(fast_jit(one), axes, weights, x, lengths))


@pytest.mark.parametrize("name", ["data", "weights", "everything"])
def test_vmap_of_jvp_and_of_hessian_product_equal_a_loop(name):
    """Check mapped primals with a shared tangent."""
    case = GRU
    axes = without_cells(case, AXES[name])
    primal, step = spread(case, axes), direction_of(case)
    operator = ours(case)
    loss = loss_of(case, operator)

    def one(*fields):
        p = Primal(*fields)
        tangent = jax.jvp(operator, (p,), (step,))[1]
        return tangent, forward_over_reverse(loss, p, step)

    got = fast_jit(vmap(one, axes))(*primal)
    assert_trees_close(got, loop(fast_jit(one), axes, *primal), terms=1000)


def test_jvp_of_vmap_equals_vmap_of_jvp():
    """Check mapped tangents, also of primals that are not mapped."""
    case, axes = BEFORE, (None, 0, 0)
    primal, step = (spread(case, (*axes, None), seed=n)[:3] for n in (8, 9))

    def operator(weights, x, h_0):
        return ours(case)(Primal(weights, x, h_0, None))

    def outside(primal, step):
        return jax.jvp(vmap(operator, axes), primal, step)[1]

    def inside(primal, step):
        def one(*both):
            return jax.jvp(operator, both[:3], both[3:])[1]

        return vmap(one, axes + axes)(*primal, *step)

    assert_trees_close(fast_jit(outside)(primal, step), fast_jit(inside)(primal, step))


def test_vmap_of_size_one_and_of_no_rows():
    case = LSTM
    axes = Primal(0, 0, 0, 0)
    primal = spread(case, axes, 1)
    got = vmap(flat(ours(case)), axes)(*primal)
    want = ours(case)(Primal(*(a[0] for a in primal)))
    assert_trees_close(got, jax.tree.map(lambda a: a[None], want))
    empty = Case("empty", case.spec, 4, 0)
    rows = spread(empty, Primal(None, 0, 0, 0))
    y, h_n, c_n = vmap(flat(ours(empty)), (None, 0, 0, 0))(*rows)
    assert y.shape == (SIZE, 0, 4, 4) and h_n.shape == (SIZE, 4, 0, 2)
    assert c_n.shape == (SIZE, 4, 0, 3)


def test_inputs_of_the_vmap_tests_differ():
    """Check that mapped inputs differ; else a rule could ignore the mapped axis."""
    primal = spread(LSTM, Primal(0, 0, 0, 0))
    made = rounded(make_inputs(LSTM), "float64")
    for a in primal:
        assert np.nanmax(np.abs(a[0] - a[1])) > 0.1
    assert made.weights.shape == primal.weights.shape[1:]


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("mapped", ["h", "x"])
def test_lengths_of_sequences_are_not_those_of_examples(mapped, backend):
    given = {"x": draw(0, 3, 5, 8), "h": draw(1, 3, 8)}
    given[mapped] = jnp.stack([given[mapped] * k for k in (1, 2, -1)])
    p, lengths = draw(2, 8, 8), jnp.array([5, 0, 2])

    def step(p, h, x, t):
        h = jnp.tanh(x + h @ p)
        return h, h

    def loss(p, x, h):
        out = ost.recurrent_net(
            step, x, h, params=p, seq_lengths=lengths, padding="zero", backend=backend
        )
        return jnp.sum(jnp.sin(out.outputs)), out

    slopes = jax.grad(loss, (0, 1, 2), has_aux=True)
    axes = (None, *(0 if name == mapped else None for name in "xh"))
    got = fast_jit(jax.vmap(slopes, axes))(p, *given.values())
    for k in range(3):
        one = {name: a[k] if name == mapped else a for name, a in given.items()}
        assert_same(
            jax.tree.map(lambda a, k=k: a[k], got), fast_jit(slopes)(p, *one.values())
        )


@pytest.mark.parametrize("backend", [None, "xla"])
def test_gradients_of_each_example_of_short_floats(backend):
    """Those of a vector are added up in float32, step by step."""

    def slopes(backend):
        def loss(p, x, h):
            out = ost.recurrent_net(scaled, x, h, params=p, backend=backend).outputs
            return jnp.mean(out.astype(jnp.float32))

        return fast_jit(jax.vmap(jax.grad(loss), (None, 0, None)))(p, x, h)

    sizes = {"w": (8, 8), "b": (8,), "x": (2, 4, 200, 8), "h": (4, 8)}
    given = {name: 0.3 * draw(i, *s) for i, (name, s) in enumerate(sizes.items())}
    given = {name: a.astype(jnp.bfloat16) for name, a in given.items()}
    x, h = given.pop("x"), given.pop("h")
    p = given
    for a, b in zip(*map(jax.tree.leaves, map(slopes, (backend, "scan"))), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(v, float) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0.1, atol=0.002)
