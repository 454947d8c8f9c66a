"""Gradients that are sums over very many tokens keep the digits of float32.

A single chain of additions loses them: at a million tokens of one sign, it had an error
of 6e-4, at four million one of 2e-2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from oracles import loop64, scan_jax
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import _native

needs_native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
SPEC = ost.RNNSpec("rnn_tanh", 1, 2)
SIZES = {  # sequences and steps: of many chunks, of large ones, and about 4096 tokens
    "long": (512, 2048),
    "one": (1, 300_000),
    "wide": (200_000, 3),
    "part": (64, 64),
    "part and one": (17, 241),
    "two parts": (256, 32),
    "more than two": (2731, 3),
}


def drawn(sequences, steps):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SPEC.num_params) * 0.1
    return weights, rng.standard_normal((sequences, steps, 1)) * 0.1 + 0.5


def of_operator(backend):
    return lambda w, x: ost.rnn(SPEC, w, x, backend=backend).y


def of_net(weights, x):
    def step(p, h, x, t):
        x = x * p.w_ih[:, 0][None] + p.b_ih[None]
        h = jnp.tanh(x + h @ p.w_hh.T + p.b_hh[None])
        return h, h

    (params,) = ost.unpack_weights(weights, SPEC)
    h_0 = jnp.zeros((x.shape[0], SPEC.hidden_size), x.dtype)
    return ost.recurrent_net(step, x, h_0, params=params, backend="cpu").outputs


def plain(spec, weights, x, **options):
    """Return the outputs of the operator by an oracle that sums in its own way."""
    fields = (field.name for field in dataclasses.fields(loop64.Spec))
    spec = loop64.Spec(**{name: getattr(spec, name) for name in fields})
    parts = spec.num_layers * spec.num_directions
    h_0 = jnp.zeros((parts, len(x), spec.output_size))
    c_0 = jnp.zeros((parts, len(x), spec.hidden_size))
    return scan_jax.run(spec, weights, x, h_0, c_0, **options).y


def gradient(run, weights, x):
    return fast_jit(jax.grad(lambda w: run(w, x).astype(jnp.float64).sum()))(weights)


RUNS = {"cpu": of_operator("cpu"), "xla": of_operator("xla"), "net": of_net}


@pytest.mark.parametrize(
    ("size", "run"),
    # A bias of one long sequence in a net is JAX's sum, which has a single chain.
    [
        pytest.param(s, r, marks=() if r == "xla" else needs_native)
        for s in SIZES
        for r in RUNS
        if (s, r) != ("one", "net")
    ],
)
def test_weight_gradients_over_many_tokens(run, size):
    weights, x = drawn(*SIZES[size])
    oracle = functools.partial(plain, SPEC)
    want = np.asarray(gradient(oracle, jnp.asarray(weights), jnp.asarray(x)))
    got = np.asarray(gradient(RUNS[run], jnp.float32(weights), jnp.float32(x)))
    parts = [np.split(a, [2, 6, 8]) for a in (got, want)]
    for a, b in zip(*parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@needs_native
@pytest.mark.parametrize(
    "size", [(1_000_000, 1), (40_000, 5), (2, 1_000_000), (1, 1_000_000)], ids=str
)
def test_gradients_of_values_that_a_step_uses_elementwise(size):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*size, 2)) * 0.1 + 0.5)

    def step(p, h, x, t):
        h = jnp.tanh(0.5 * x + p[None] * h + 0.3)
        return h, h

    def run(p, x):
        h_0 = jnp.zeros((x.shape[0], 2), x.dtype)
        return ost.recurrent_net(step, x, h_0, params=p, backend="cpu").outputs

    def oracle(p, x):
        h_0, steps = jnp.zeros((x.shape[0], 2), x.dtype), jnp.moveaxis(x, 1, 0)
        return jax.lax.scan(lambda h, x: step(p, h, x, 0), h_0, steps)[1]

    want = np.asarray(gradient(oracle, jnp.array([0.1, -0.2]), x))
    got = np.asarray(gradient(run, jnp.float32([0.1, -0.2]), jnp.float32(x)))
    np.testing.assert_allclose(got, want, rtol=5e-6)


@pytest.mark.parametrize(
    ("inputs", "hidden", "heads"), [(2, 3, 1), (3, 2, 1), (2, 3, 3)]
)
def test_matrices_of_few_rows_and_columns_on_xla(inputs, hidden, heads):
    spec = ost.RNNSpec("rnn_tanh", inputs, hidden, num_heads=heads)
    rng = np.random.default_rng(4)
    weights = rng.standard_normal(spec.num_params) * 0.1
    x = rng.standard_normal((400_000, 2, inputs)) * 0.1 + 0.5
    oracle = functools.partial(plain, spec)
    want = np.asarray(gradient(oracle, jnp.asarray(weights), jnp.asarray(x)))
    run = functools.partial(ost.rnn, spec, backend="xla")
    got = gradient(lambda w, x: run(w, x).y, jnp.float32(weights), jnp.float32(x))
    layers = (ost.unpack_weights(jnp.asarray(a), spec) for a in (got, want))
    for a, b in zip(*map(jax.tree.leaves, layers), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max())


@needs_native
@pytest.mark.parametrize("mode", ["gru", "lstm"])
def test_directions_projections_and_lengths_over_many_tokens(mode):
    spec = ost.RNNSpec(mode, 3, 5, 2, True, proj_size=2 if mode == "lstm" else 0)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(spec.num_params) * 0.1
    x = rng.standard_normal((300, 100, 3)) * 0.1 + 0.5
    lengths = rng.integers(0, 101, 300)

    def run(w, x):
        return ost.rnn(spec, w, x, seq_lengths=lengths, backend="cpu").y

    oracle = functools.partial(plain, spec, seq_lengths=jnp.asarray(lengths))
    want = np.asarray(gradient(oracle, jnp.asarray(weights), jnp.asarray(x)))
    got = np.asarray(gradient(run, jnp.float32(weights), jnp.float32(x)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


REDUCTIONS = {
    "sum": lambda h: h.sum(-1, keepdims=True),
    "product": lambda h: jnp.einsum("bi,bi->b", h, h)[:, None],
    "middle": lambda h: h.reshape(1, -1, 2).sum(1),
}


@needs_native
@pytest.mark.parametrize("name", REDUCTIONS)
def test_sums_over_a_large_axis_of_a_step(name):
    def step(p, h, x, t):
        return h * p + x, REDUCTIONS[name](h)

    x, p = jnp.zeros((1, 2, 1), jnp.float32), jnp.float32(1.1)
    h = np.full((1, 600_001 * 2), 0.1)
    h_0 = jnp.float32(h)
    got = ost.recurrent_net(step, x, h_0, params=p, backend="cpu").outputs
    want = jnp.stack([REDUCTIONS[name](jnp.asarray(h * s)) for s in (1.0, 1.1)], 1)
    np.testing.assert_allclose(got, want, rtol=5e-5)


@pytest.mark.parametrize("time_major", [False, True])
def test_advantages_over_many_steps(time_major):
    discount = np.float32(1 - 2**-17)
    rng = np.random.default_rng(0)
    rewards = jnp.asarray(rng.standard_normal((3, 200_000)) * 0.1 + 0.5)
    values = jnp.asarray(rng.standard_normal((3, 200_000)))
    if time_major:
        rewards, values = rewards.T, values.T

    def run(rewards, values):
        last = jnp.zeros(3, rewards.dtype)
        options = {"discounts": discount, "lambda_": 1.0}
        return ost.gae(
            rewards, values, last, time_major=time_major, **options
        ).advantages

    want = np.zeros(rewards.shape)
    steps = [a if time_major else a.T for a in map(np.asarray, (rewards, values, want))]
    advantage = after = np.zeros(3)
    for reward, value, to in zip(*(a[::-1] for a in steps), strict=True):
        advantage = reward + discount * (after + advantage) - value
        to[:], after = advantage, value
    got = run(jnp.float32(rewards), jnp.float32(values))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4 * np.abs(want).max())


@needs_native
@pytest.mark.parametrize("size", [4, 48])
def test_long_sums_have_the_same_bits_on_every_run(size, configure):
    """One thread follows the other through the steps, as far as these have come."""
    rng = np.random.default_rng(2)
    p = {
        "w": jnp.float32(rng.standard_normal((size, size)) * 0.1),
        "u": jnp.float32(rng.standard_normal((size, size)) * 0.1),
        "b": jnp.float32(rng.standard_normal(size)),
        "s": jnp.float32(rng.standard_normal(size)),
    }
    x = jnp.float32(rng.standard_normal((1, 30_000, size)))

    def loss(p):
        def step(p, h, x, t):
            h = jnp.tanh(x @ p["w"] + p["s"][None] * (h @ p["u"]) + p["b"][None] * h)
            return h, h

        h_0 = jnp.zeros((1, size), jnp.float32)
        out = ost.recurrent_net(step, x, h_0, params=p, backend="cpu").outputs
        return jnp.sum(out**2)

    run, found = jax.jit(jax.grad(loss)), []
    for threads in (1, 2, 2, 2, 3):
        configure(_native.cpu_features().isa, threads)
        found.append(jax.block_until_ready(run(p)))
    for other in found[1:]:
        jax.tree.map(assert_same_bits, other, found[0])


native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "xla"])
@pytest.mark.parametrize("lengths", [None, [600, 0]], ids=["whole", "lengths"])
def test_gradients_of_members_add_up_narrow_steps_in_float32(backend, lengths):
    """In bfloat16, 256 + 1 is 256."""

    def step(p, h, x, t):
        u, b = p
        h = jnp.zeros((), h.dtype) * (h @ u) + x
        return h, h + b[None]

    def loss(b, x):
        u, h = jnp.eye(2, dtype=x.dtype), jnp.zeros((2, 2), x.dtype)
        options = {"padding": "zero", "seq_lengths": lengths, "backend": backend}
        out = ost.recurrent_net(step, x, h, params=(u, b), **options)
        return jnp.sum(out.outputs, dtype=jnp.float32)

    b, x = jnp.zeros((3, 2), jnp.bfloat16), jnp.zeros((3, 2, 600, 2), jnp.bfloat16)
    got = jax.jit(jax.vmap(jax.grad(loss)))(b, x)
    assert got.dtype == jnp.bfloat16
    want = 1200 if lengths is None else 600
    np.testing.assert_array_equal(got.astype(float), np.full((3, 2), want))
