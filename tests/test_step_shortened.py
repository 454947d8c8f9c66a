"""Step programs before and after they are made shorter: numpy gets the same results."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_steps
from hypothesis import given
from step_machine import Machine
from step_programs import PROGRAMS
from test_step import results
from test_step_random import specs

import ostinato as ost
from ostinato._step import loop_programs
from ostinato._step.programs import lower
from ostinato._step.programs.program import Place, views

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
RESULTS = Place.OUTPUT, Place.NEXT, Place.SUM


@pytest.fixture
def compared(monkeypatch):
    """Compares the programs that are lowered, and lists how long they are."""
    fuse, found = lower.fuse, []

    def checked(instructions, factors, batch):
        before = [dataclasses.replace(i) for i in instructions]
        factors = list(factors)
        buffers = {v.buffer for i in before for v in views(i)} | {*factors}
        buffers |= {i.weight.buffer for i in before if i.weight is not None}
        arrays = {buffer: buffer.array for buffer in buffers}
        want = Machine(batch, arrays)
        want.run(before)
        results = [b for b in buffers if b.place in RESULTS]
        after = fuse(instructions, factors, batch)
        got = Machine(batch, arrays)
        got.run(after)
        for buffer in (*results, *factors):
            a, b = (machine.of(buffer) for machine in (got, want))
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9, err_msg=str(buffer))
        found.append((len(before), len(after)))
        return after

    monkeypatch.setattr(lower, "fuse", checked)
    loop_programs.lower_forward.cache_clear()
    loop_programs.lower_backward.cache_clear()
    return found


def lower_gradient(step, params, states, x):
    """Lower a loop and its gradient, and compile neither."""

    def loss(params, states, x):
        out = ost.recurrent_net(
            step, x, states, params=params, time_major=True, backend="cpu"
        )
        leaves = jax.tree.leaves((out.outputs, out.states))
        return sum(a.astype("float64").sum() for a in leaves)

    floats = [
        n
        for n, tree in enumerate((params, states, x))
        if all(
            np.issubdtype(np.asarray(a).dtype, np.floating)
            for a in jax.tree.leaves(tree)
        )
        and jax.tree.leaves(tree)
    ]
    jax.jit(jax.grad(loss, floats)).lower(params, states, x)


@pytest.mark.alike
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compute_the_same(name, sequences, compared):
    program = PROGRAMS[name]
    step, params, states, x = program
    if sequences == 1:
        states = jax.tree.map(lambda a: a[:1], states)
        x = jax.tree.map(lambda a: a[:, :1], x)
        try:
            jax.eval_shape(results(step, "scan"), params, states, x)
        except (TypeError, ValueError):
            pytest.skip("it has parameters for three sequences")
    try:
        lower_gradient(step, params, states, x)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert compared


def wide_lstm(p, states, x, t):
    h, c = states
    i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"], 4, axis=1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), jnp.exp(g) - jnp.exp(o)


def wide_pair(p, states, x, t):
    h, c = states
    gates = (x @ p["w"] + h @ p["u"])[:, :32]
    r, z = jax.nn.sigmoid(gates[:, :16]), jax.nn.sigmoid(gates[:, 16:])
    return (r * h - z * c, jnp.sin(z) + r), (r / 2, z)


@pytest.mark.parametrize("sequences", [1, 3, 17])
@pytest.mark.parametrize("step", [wide_lstm, wide_pair])
def test_neighbours_of_whole_vectors_are_joined(step, sequences, compared):
    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(5, 64)), "u": rng.normal(size=(16, 64))}
    states = rng.normal(size=(sequences, 16)), rng.normal(size=(sequences, 16))
    lower_gradient(step, p, states, rng.normal(size=(3, sequences, 5)))
    assert any(after < before for before, after in compared)


@given(specs())
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_random_programs_compute_the_same(compared, spec):
    step, params, states = random_steps.make(spec)
    x = np.random.default_rng(5).standard_normal((3, spec.batch, spec.inputs))
    try:
        lower_gradient(step, params, states, x)
    except NotImplementedError:
        hypothesis.reject()
