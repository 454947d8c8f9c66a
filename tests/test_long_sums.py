"""Gradients that are sums over very many tokens keep the digits of float32.

A single chain of additions loses them: at a million tokens of one sign, it had an error
of 6e-4, at four million one of 2e-2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost

SPEC = ost.RNNSpec("rnn_tanh", 1, 2)
SIZES = {  # sequences and steps: of many chunks, of large ones, and about 4096 tokens
    "long": (512, 2048),
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
        h = jnp.tanh(x * p.w_ih[:, 0][None] + p.b_ih[None] + h @ p.w_hh.T)
        return h, h

    (params,) = ost.unpack_weights(weights, SPEC)
    h_0 = jnp.zeros((x.shape[0], SPEC.hidden_size), x.dtype)
    return ost.recurrent_net(step, x, h_0, params=params, backend=None).outputs


def gradient(run, weights, x):
    return fast_jit(jax.grad(lambda w: run(w, x).astype(jnp.float64).sum()))(weights)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "run",
    [of_operator("cpu"), of_operator("xla"), of_net],
    ids=["cpu", "xla", "net"],
)
def test_weight_gradients_over_many_tokens(run, size):
    weights, x = drawn(*SIZES[size])
    want = np.asarray(gradient(run, jnp.asarray(weights), jnp.asarray(x)))
    got = np.asarray(gradient(run, jnp.float32(weights), jnp.float32(x)))
    parts = [np.split(a, [2, 6, 8]) for a in (got, want)]
    for a, b in zip(*parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("mode", ["gru", "lstm"])
def test_directions_projections_and_lengths_over_many_tokens(mode):
    spec = ost.RNNSpec(mode, 3, 5, 2, True, proj_size=2 if mode == "lstm" else 0)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(spec.num_params) * 0.1
    x = rng.standard_normal((300, 100, 3)) * 0.1 + 0.5
    lengths = rng.integers(0, 101, 300)

    def run(w, x):
        return ost.rnn(spec, w, x, seq_lengths=lengths, backend="cpu").y

    want = np.asarray(gradient(run, jnp.asarray(weights), jnp.asarray(x)))
    got = np.asarray(gradient(run, jnp.float32(weights), jnp.float32(x)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())
