"""Gradients of XLA's loop, whose products exist for one block of steps at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost

B, T, H = 3, 150, 32


def matrix(p, h, x, t):
    """Multiply by a matrix of sums for each sequence, a large value that is stored."""
    z = jnp.tanh(h + x @ p["w"])
    sums = jnp.cumsum(z[:, :, None] * jnp.cos(z @ p["dense"])[:, None], 1)
    return z + 0.1 * jnp.einsum("bh,bhj->bj", z, sums), z


def dense(p, h, x, t):
    h = jnp.tanh(x @ p["w"] + h @ p["dense"])
    return h, h


def slopes(step, backend, lengths):
    def loss(p, x, h):
        options = {"params": p, "seq_lengths": lengths, "padding": "zero"}
        out = ost.recurrent_net(step, x, h, backend=backend, **options)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states)

    return jax.value_and_grad(loss, (0, 1, 2))


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.4 * rng.standard_normal(shape)  # noqa: E731
    params = {"w": draw(5, H), "dense": draw(H, H) / 4}  # not chaotic
    return params, draw(B, T, 5), draw(B, H)


@pytest.mark.parametrize("lengths", [None, (150, 0, 70)], ids=["whole", "lengths"])
@pytest.mark.parametrize("step", [matrix, dense])
def test_values_and_gradients_equal_those_of_scan(step, lengths):
    found = [fast_jit(slopes(step, b, lengths))(*arguments()) for b in ("xla", "scan")]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("step, loops", [(matrix, 2), (dense, 4)])
def test_what_is_larger_than_the_products_is_not_copied_to_blocks(step, loops):
    """A loop over blocks has one over their steps inside."""
    text = jax.jit(slopes(step, "xla", None)).lower(*arguments()).as_text()
    assert text.count("stablehlo.while") == loops
