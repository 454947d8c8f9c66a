"""Batches of many sequences, which several tiles share, with rows of a few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import _native

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")

LENGTHS = {
    "whole": lambda rng, n, steps: None,
    "drawn": lambda rng, n, steps: rng.integers(0, steps + 1, n),
    "rising": lambda rng, n, steps: np.sort(rng.integers(0, steps + 1, n)),
    "last": lambda rng, n, steps: np.where(np.arange(n) < n - 1, 1, steps),
}


def drawn(batch, width, steps, dtype):
    rng = np.random.default_rng(batch + width)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    p = {"of_all": jnp.asarray([0.5, -0.3, 0.2], dtype), "of_each": draw(2, width)}
    return rng, p, draw(batch, steps, width), draw(batch, width)


def step(p, h, x, t):
    """Return a state, a number of each sequence, and one that all have alike."""
    a, b, c = p["of_all"]
    gate = jax.nn.sigmoid(a * h + x)
    d, e = p["of_each"][:, None]
    e = e * jnp.cos(d * t.astype(d.dtype))  # also at every step another one
    h = gate * h + b * jnp.tanh(d * h - e * x)
    return h, (
        h,
        jnp.sum(h**2, -1),
        jnp.broadcast_to(jnp.sin(c * t.astype(c.dtype)), h.shape[:1]),
    )


def by_scan(p, x, h_0, lengths):
    """Run a loop that knows nothing of tiles."""
    steps = x.shape[1]
    lengths = np.full(len(x), steps) if lengths is None else lengths

    def one(h, at):
        x, t = at
        new, outputs = step(p, h, x, t)
        valid = t < jnp.asarray(lengths)
        choose = lambda a, b: jnp.where(valid.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        return choose(new, h), jax.tree.map(
            lambda a: choose(a, jnp.zeros_like(a)), outputs
        )

    final, outputs = jax.lax.scan(one, h_0, (jnp.moveaxis(x, 1, 0), jnp.arange(steps)))
    return final, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), outputs)


def natively(p, x, h_0, lengths):
    options = {"seq_lengths": lengths, "padding": "zero", "backend": "cpu"}
    out = ost.recurrent_net(step, x, h_0, params=p, **options)
    return out.states, out.outputs


def values_and_gradients(run, p, x, h_0, lengths):
    def loss(p, x, h_0):
        final, outputs = run(p, x, h_0, lengths)
        seen = [
            jnp.sum(a * jnp.cos(jnp.arange(a.size, dtype=a.dtype).reshape(a.shape)))
            for a in outputs
        ]
        return jnp.sum(final**2) + sum(seen), (final, outputs)

    (_, values), d = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
        p, x, h_0
    )
    return values, d


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("batch", "width"), [(17, 1), (70, 64), (150, 3), (600, 1), (1100, 2), (1100, 9)]
)
def test_values_and_gradients_of_many_sequences(batch, width, lengths, configure):
    rng, p, x, h_0 = drawn(batch, width, 7, jnp.float64)
    lengths = LENGTHS[lengths](rng, batch, 7)
    want = values_and_gradients(by_scan, p, x, h_0, lengths)
    got = values_and_gradients(natively, p, x, h_0, lengths)
    jax.tree.map(lambda a, b: assert_close(a, b, terms=batch * 7), got, want)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("batch", "width", "steps"),
    [(17, 1, 500), (300, 1, 90), (1100, 2, 90), (1100, 9, 20)],
)
def test_bits_of_many_sequences_are_those_of_any_threads(
    batch, width, steps, lengths, configure
):
    rng, p, x, h_0 = drawn(batch, width, steps, jnp.float32)
    lengths = LENGTHS[lengths](rng, batch, steps)
    found = []
    for threads in (1, 2, 5):
        configure(_native.cpu_features().isa, threads)
        results = values_and_gradients(natively, p, x, h_0, lengths)
        found.append(jax.block_until_ready(results))
    for other in found[1:]:
        jax.tree.map(assert_same_bits, other, found[0])
