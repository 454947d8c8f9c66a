"""Memories whose places come before their sequences, and integers that count down."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_step_hunt import B, T, assert_same, both, draw, gradient_of

import ostinato as ost

M = 6

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


@pytest.mark.parametrize("more, backend", [(-1, "cpu"), (1 - 2**22, "xla")])
def test_counts_that_fall_far_below_zero_are_not_kept_as_floats(more, backend):
    """The constant that a step adds is negative, and the count odd below -2^24."""

    def step(p, states, x, t):
        h, count = states
        h = jnp.tanh(h @ p + x)
        return (h, count + jnp.int32(more)), (h, count)

    states = draw(0, B, 8), jnp.full((B, 2), 3, jnp.int32)
    given = step, draw(1, B, 2 * T, 8), states
    assert ost.explain(*given, params=draw(2, 8, 8)).backend == backend
    _, counts = ost.recurrent_net(*given, params=draw(2, 8, 8)).outputs
    for t in range(2 * T):
        np.testing.assert_array_equal(counts[:, t], 3 + t * more)


AT_PLACES = {
    "read": lambda m, t, row: m * 0.9 + m[t % M][None],
    "read a place of two axes": lambda m, t, row: (
        m + jnp.reshape(m, (M // 2, 2, B, 3))[t % 3, t % 2][None]
    ),
    "read some": lambda m, t, row: (
        m + jnp.tile(lax.dynamic_slice_in_dim(m, t % 4, 3), (2, 1, 1))
    ),
    "write": lambda m, t, row: m.at[t % M].set(row),
    "write some": lambda m, t, row: lax.dynamic_update_slice_in_dim(
        m, jnp.sin(m[:3]) + row[None], t % 4, 0
    ),
    "add": lambda m, t, row: m.at[t % M].add(row),
    "add at a place of two axes": lambda m, t, row: jnp.reshape(
        jnp.reshape(m, (M // 2, 2, B, 3)).at[t % 3, t % 2].add(row), m.shape
    ),
}


@pytest.mark.parametrize("name", AT_PLACES)
def test_a_memory_whose_places_come_before_its_sequences(name):
    def step(p, states, x, t):
        h, m = states
        h = jnp.tanh(h @ p + x)
        m = AT_PLACES[name](m.swapaxes(0, 1), t, h).swapaxes(0, 1)
        return (h, jnp.sin(m)), m.sum(1)

    given = draw(0, 3, 3), draw(1, B, 7, 3), (draw(2, B, 3), draw(3, B, M, 3))
    assert_same(*both(gradient_of(step), *given))
