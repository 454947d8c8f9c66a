"""Tests with a mode that exists here only: a row of the table, a cell, its equations.

The mode `leaky` has three states, a number that no other mode has:
`n' = n / 2 + tanh(pre_a)`, `c' = sigmoid(pre_b) c + n'`, `h' = tanh(c')`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import ragged
from ostinato._rnn import modes
from ostinato._rnn.cell import ModeCell


class Leaky(ModeCell):
    saved = ("a", "b")

    def _pre(self, states, gx):
        w = self.weights
        gh = self.recurrent_product(states[0], w.w_hh, w.b_hh)
        return self.add_bias(gx, w.b_ih) + gh

    def _equations(self, pre, c, n):
        a, b = jnp.split(pre, 2, axis=-1)
        a, b = jnp.tanh(a), jax.nn.sigmoid(b)
        n = n / 2 + a
        c = b * c + n
        return (jnp.tanh(c), c, n), jnp.concatenate([a, b], axis=-1)

    def step(self, states, gx):
        (h, c, n), gates = self._equations(self._pre(states, gx), *states[1:])
        return (self.narrow(h), c, n), self.narrow(gates)

    def step_tangent(self, at, terms, dstates):
        (dg,), (dh, dc, dn) = terms, dstates
        dg = dg + self.recurrent_product(dh, self.weights.w_hh)
        da, db = jnp.split(dg, 2, axis=-1)
        a, b = jnp.split(self.widen(at.gates), 2, axis=-1)
        dn = dn / 2 + (1 - a * a) * da
        dc = b * dc + b * (1 - b) * db * at.before[1] + dn
        return (1 - self.widen(at.after[0]) ** 2) * dc, dc, dn

    def step_backward(self, at, dstates):
        dh, dc, dn = dstates
        a, b = jnp.split(self.widen(at.gates), 2, axis=-1)
        dc = dc + dh * (1 - self.widen(at.after[0]) ** 2)
        dn = dn + dc
        da, db = dn * (1 - a * a), dc * at.before[1] * b * (1 - b)
        dg = jnp.concatenate([da, db], axis=-1)
        dh = self.recurrent_gradient(dg, self.weights.w_hh)
        return (dg,), (dh, dc * b, dn / 2)


@pytest.fixture(autouse=True)
def leaky_mode(monkeypatch):
    row = modes.Mode(gates=("a", "b"), states=("h", "c", "n"), cell=Leaky)
    monkeypatch.setitem(modes.MODES, "leaky", row)


def spec_of(layers=2, bidirectional=True):
    return ost.RNNSpec("leaky", 2, 3, layers, bidirectional)  # type: ignore[arg-type]


class Arguments(NamedTuple):
    weights: jax.Array
    x: jax.Array
    state: tuple


B, T, LENGTHS = 3, 5, (5, 0, 2)


def arguments(spec, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))  # noqa: E731
    state = tuple(draw(*shape) for shape in spec.state_shape(B))
    return Arguments(draw(spec.num_params), draw(B, T, 2), state)


def oracle(spec, weights, x, state):
    """Run one sequence after another, one step after another."""
    h_0, c_0, n_0 = state
    ys, finals = [], []
    for b, length in enumerate(LENGTHS):
        layer, final = x[b, :length], []
        for index in range(spec.num_layers):
            outs = []
            for d in range(spec.num_directions):
                p = index * spec.num_directions + d
                w = ost.unpack_weights(weights, spec)[p]
                h, c, n = h_0[p, b], c_0[p, b], n_0[p, b]
                rows = []
                for t in range(length)[:: -1 if d else 1]:
                    pre = w.w_ih @ layer[t] + w.b_ih + w.w_hh @ h + w.b_hh
                    n = n / 2 + jnp.tanh(pre[:3])
                    c = jax.nn.sigmoid(pre[3:]) * c + n
                    h = jnp.tanh(c)
                    rows.append(h)
                rows = rows[:: -1 if d else 1]
                outs.append(jnp.stack(rows) if rows else jnp.zeros((0, 3)))
                final.append((h, c, n))
            layer = jnp.concatenate(outs, axis=-1)
        ys.append(jnp.pad(layer, ((0, T - length), (0, 0))))
        finals.append([jnp.stack(parts) for parts in zip(*final, strict=True)])
    states = (jnp.stack(parts, axis=1) for parts in zip(*finals, strict=True))
    return ost.RNNOutput(jnp.stack(ys), tuple(states))


def operator(spec, **options):
    def run(weights, x, state):
        return ost.rnn(spec, weights, x, state, seq_lengths=LENGTHS, **options)

    return run


def loss_of(run):
    def loss(arguments):
        y, state = run(*arguments)
        return jnp.sum(jnp.sin(y)) + sum(jnp.sum(i * s) for i, s in enumerate(state))

    return loss


def same(got, want, terms=200):
    jax.tree.map(lambda g, w: assert_close(g, w, terms=terms), got, want)


@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients_are_those_of_a_loop(recompute):
    spec = spec_of()
    run = loss_of(operator(spec, recompute=recompute))
    want = loss_of(lambda *a: oracle(spec, *a))
    given = arguments(spec)
    same(operator(spec)(*given), oracle(spec, *given))
    same(fast_jit(jax.grad(run))(given), fast_jit(jax.grad(want))(given))


def test_tangents_and_second_derivatives():
    spec = spec_of(1, False)
    run, want = (loss_of(f) for f in (operator(spec), lambda *a: oracle(spec, *a)))
    given, step = arguments(spec), arguments(spec, seed=1)

    def both(loss):
        slope = lambda a: jax.jvp(loss, (a,), (step,))[1]  # noqa: E731
        return fast_jit(jax.value_and_grad(slope))(given)

    same(both(run), both(want))


def test_an_ensemble_and_explicit_passes():
    spec = spec_of(1)
    members = [arguments(spec, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *members)
    got = jax.vmap(operator(spec))(*stacked)
    for i, member in enumerate(members):
        same(jax.tree.map(lambda a, i=i: a[i], got), operator(spec)(*member))
    output, reserve = ost.rnn_forward(spec, *members[0], seq_lengths=LENGTHS)
    dstate = tuple(i * jnp.ones_like(s) for i, s in enumerate(output.state))
    got = ost.rnn_backward(spec, members[0].weights, reserve, jnp.cos(output.y), dstate)
    dweights, dx, dstates = jax.grad(loss_of(operator(spec)))(members[0])
    same(got, ost.RNNGrads(dx, dweights, dstates))


def test_steps_bfloat16_and_ragged_vmap():
    spec = spec_of(1, False)
    weights, x, _ = arguments(spec)
    whole, state = ost.rnn(spec, weights, x), None
    for t in range(T):
        y, state = ost.rnn_step(spec, weights, x[:, t], state)
        same(y, whole.y[:, t])
    same(state, whole.state)
    narrow = ost.rnn(spec, weights.astype("bfloat16"), x.astype("bfloat16"))
    assert [s.dtype for s in narrow.state] == ["bfloat16"] * 3
    batch = ragged.RaggedArray.from_list([x[0], x[1, :2], x[2, :4]])
    outs = ragged.vmap(lambda s: ost.rnn(spec, weights, s).y)(batch).to_list()
    for got, alone in zip(outs, (x[0], x[1, :2], x[2, :4]), strict=True):
        same(jnp.asarray(got), ost.rnn(spec, weights, alone).y)


def test_who_runs_it_and_what_bad_states_get():
    spec = spec_of(1, False)
    weights, x, state = arguments(spec)
    told = ost.explain(spec, x)
    assert (
        told.backend == "xla" and "no kernels for mode 'leaky'" in told.rejected["cpu"]
    )
    with pytest.raises(ost.BackendError, match="no kernels for mode 'leaky'"):
        ost.rnn(spec, weights, x, backend="cpu")
    with pytest.raises(TypeError, match=r"`initial_state` must be \(h, c, n\)"):
        ost.rnn(spec, weights, x, state[:2])
    assert_same_bits(ost.prepare(spec, weights).weights, weights)
    assert ost.prepare(spec, weights).packed is None
