"""`ost.rnn` of one sequence under `ragged.vmap`: one fused call on concatenated tokens.

Against the loop over examples, in every form in which the operator can stand in a
function; then that no padded copy is made where none is needed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jaxprs import equations_in
from ragged_loop import check, draw_inputs, length_sets, ragged_inputs
from ragged_programs.program import D, programs
from test_transforms import assert_trees_close

import ostinato as ost
from ostinato import ragged
from ostinato._rnn.call import Packed

LSTM = ost.RNNSpec("lstm", D, 2, num_layers=2, bidirectional=True, proj_size=1)
SMALL = ost.RNNSpec("lstm", D, 2)
GRU = ost.RNNSpec("gru", D, 3)


def weights(spec, scale):
    return scale * jax.random.normal(jax.random.key(1), (spec.num_params,))


def run(spec, x, scale, *args, **options):
    return ost.rnn(spec, weights(spec, scale), x, *args, **options)


def two(x):
    """Run a batch within an example."""
    return jnp.stack([x, jnp.sin(x)])


def gradient(x, scale):
    """Return for each example the gradient of weights that all share."""

    def loss(w, x):
        y, (h, c) = ost.rnn(SMALL, w, x, recompute=True)
        return jnp.sum(y**2) + jnp.sum(h * c.sum())

    return jax.grad(loss, (0, 1))(weights(SMALL, scale), x)


def tangent(x, scale):
    return jax.jvp(lambda s, x: run(SMALL, x, s).y, (scale, x), (1.0, jnp.sin(x)))


def curvature(x, scale):
    """Return forward mode over reverse mode."""

    def slope(x):
        return jax.grad(lambda x: jnp.sum(run(GRU, x, 0.3 * scale).y ** 2))(x)

    return jax.jvp(slope, (x,), (jnp.sin(x),))


def passes(x, scale):
    w = weights(GRU, scale)
    out, reserve = ost.rnn_forward(GRU, w, two(x))
    return ost.rnn_backward(GRU, w, reserve, jnp.cos(out.y), out.state)


def ensemble(x, scale):
    many = jnp.stack([weights(GRU, scale), weights(GRU, 2 * scale)])
    own = jax.vmap(lambda w, x: ost.rnn(GRU, w, x).y)(many, two(x))
    return own + jax.vmap(lambda w: ost.rnn(GRU, w, x).y)(many)


ON_ROWS = {
    "plain": lambda x, scale: run(LSTM, x, scale),
    "in_a_batch": lambda x, scale: run(LSTM, two(x), scale),
    "time_major": lambda x, scale: run(
        LSTM, jnp.swapaxes(two(x), 0, 1), scale, time_major=True
    ),
    "own_length": lambda x, one_of_n, scale: run(
        LSTM, x, scale, seq_lengths=one_of_n, padding="hold"
    ),
    "fixed_length": lambda x, scale: run(GRU, x, scale, seq_lengths=2, padding="drop"),
    "size_as_length": lambda x, scale: run(GRU, x, scale, seq_lengths=x.shape[0]),
    "resets": lambda x, scale: run(GRU, x, scale, resets=x[:, 0] > 0),
    "more_tokens": lambda x, scale: run(LSTM, jnp.concatenate([x[:1], x]), scale),
    "ensemble": ensemble,
}
PADDED = {
    "gradient": gradient,
    "passes": passes,
    "own_weights": lambda x, e, scale: run(LSTM, x, scale * e),
    "table_of_sequences": lambda x, y, scale: run(
        GRU, x[:, None] * jnp.sin(y)[None], scale
    ),
}
# Tangents that are differentiated once more are no longer the operator's.
ON_XLA = {"tangent": tangent, "curvature": curvature}
DENSE = {
    "rows_as_batch": lambda x, scale: run(GRU, jnp.stack([x, x**2], 1), scale),
    "rows_as_batch_own_lengths": lambda x, scale: run(
        LSTM,
        jnp.stack([x, x**2], 1),
        scale,
        seq_lengths=(x[:, 0] > 0).astype(jnp.int32),
    ),
    "no_tokens": lambda d, x, scale: run(GRU, jnp.stack([d, d**2]), scale).y + x.sum(),
}
PROGRAMS = [
    *programs({n: f for n, f in ON_ROWS.items() if n != "plain"}),
    *programs({"plain": ON_ROWS["plain"]}, at_least=0),
    *programs(PADDED | DENSE | ON_XLA),
]
BY_NAME = {program.name: program for program in PROGRAMS}


@pytest.mark.alike
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_program_equals_the_loop(program):
    check(program, {})


def layouts_of(name):
    """Return the layouts in which the operator runs in a program: packed, or None."""
    program = BY_NAME[name]
    inputs = ragged_inputs(
        program, draw_inputs(program, length_sets(program)[0], seed=0)
    )
    axes = tuple(None if a.shared else 0 for a in program.inputs.values())
    jaxpr = jax.make_jaxpr(ragged.vmap(program.fn, axes))(*inputs.values())
    return [e.params["call"].packed for e in calls_in(jaxpr.jaxpr)]


def calls_in(jaxpr):
    return [e for e in equations_in(jaxpr) if e.primitive.name.startswith("ostinato")]


@pytest.mark.parametrize("name", [*ON_ROWS, "tangent"])
def test_operator_runs_on_tokens(name):
    forms = layouts_of(name)
    assert forms
    assert all(isinstance(form, Packed) for form in forms)


@pytest.mark.parametrize("name", [*PADDED, *DENSE])
def test_operator_runs_padded_only_where_it_must(name):
    forward = {"gradient": {Packed(7, 1)}, "passes": {Packed(7, 2)}}.get(name, set())
    assert set(layouts_of(name)) == {None} | forward


def test_nothing_as_large_as_a_padded_batch_is_made():
    """32 sequences of up to 64 steps in 128 tokens, with the gradient."""
    spec = ost.RNNSpec("lstm", 3, 4)
    lengths = np.r_[64, np.full(31, 2)]
    batch = ragged.RaggedArray(
        jnp.ones((128, 3)), jnp.asarray(lengths, jnp.int32), max_length=64
    )

    def loss(w, data):
        out = ragged.vmap(lambda w, x: ost.rnn(spec, w, x).y, (None, 0))(
            w, batch.with_data(data)
        )
        return jnp.sum(out.data**2)

    grad = jax.grad(loss, (0, 1))
    jaxpr = jax.make_jaxpr(grad)(jnp.ones(spec.num_params), batch.data)
    equations = list(equations_in(jaxpr.jaxpr))
    assert "ostinato_rnn_bwd" in [e.primitive.name for e in equations]
    largest = max(np.prod(v.aval.shape) for e in equations for v in e.outvars)
    assert largest == 128 * 4 * spec.hidden_size < 32 * 64 * 3


def test_unused_capacity_changes_no_gradient():
    """Zeros there would have no direction, and a NaN as gradient."""
    data = jax.random.normal(jax.random.key(0), (6, D))
    table = jnp.eye(GRU.hidden_size)

    def directions(table, w, x):
        y = ost.rnn(GRU, w, x).y
        return y / jnp.sqrt(jnp.sum(y**2, axis=-1, keepdims=True)) @ table

    @jax.grad
    def gradient(both, unused):
        tokens = jnp.concatenate([data, jnp.full((unused, D), jnp.nan)])
        batch = ragged.RaggedArray(tokens, jnp.array([3, 1, 2]), max_length=4)
        out = ragged.vmap(directions, (None, None, 0))(*both, batch)
        return jnp.sum(jnp.sin(out.data[:6]))

    both = table, weights(GRU, 1.0)
    assert_trees_close(gradient(both, 3), gradient(both, 0))


def outer(weights, data, lengths):
    """Return a loss, and the outputs on the way."""
    batch = ragged.RaggedArray(data, lengths, max_length=5)
    out = ragged.vmap(lambda w, x: ost.rnn(GRU, w, x), (None, 0))(weights, batch)
    there = jnp.arange(data.shape[0]) < jnp.sum(lengths)
    y = jnp.where(there[:, None], out.y.data, 0)
    return jnp.sum(out.state) + jnp.sum(y**2), y


@pytest.mark.parametrize("mapped_over", ["weights", "data", "both"])
def test_vmap_of_ragged_vmap_equals_a_loop(mapped_over):
    keys = jax.random.split(jax.random.key(0), 2)
    many = jax.vmap(lambda k: jax.random.normal(k, (GRU.num_params,)))(keys)
    data = jax.vmap(lambda k: jax.random.normal(k, (10, D)))(keys)
    lengths = jnp.array([[3, 1, 5], [2, 2, 2]], jnp.int32)
    over_weights, over_data = mapped_over != "data", mapped_over != "weights"
    axes = (0 if over_weights else None, *[0 if over_data else None] * 2)
    value_and_gradients = jax.value_and_grad(outer, (0, 1), has_aux=True)
    given = [
        a if axis == 0 else a[0]
        for a, axis in zip((many, data, lengths), axes, strict=True)
    ]
    got = fast_jit(jax.vmap(value_and_gradients, axes))(*given)
    one = fast_jit(value_and_gradients)
    for i in range(2):
        want = one(
            *(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True))
        )
        assert_trees_close(jax.tree.map(lambda a, i=i: a[i], got), want)
