"""Updates of parameters against AdamW in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps import training


def linear(params, batch, key):
    """Return a loss whose gradient is the batch."""
    return jnp.sum(params["a"] * batch)


def test_updates_are_those_of_adamw_with_clipped_gradients():
    start = np.array([0.5, -0.25])
    gradients = [np.array(g) for g in ([0.3, 0.4], [300.0, -400.0], [0.1, 0.2])]
    state = training.init_state(0, lambda key: {"a": jnp.float32(start)})
    clock = jax.device_put(np.zeros(1, np.float32))
    first, second, p, average = np.zeros(2), np.zeros(2), start, start
    for n, g in enumerate(gradients):
        state, told = training.update(
            state, jnp.float32(g), 0.1, clock, loss=linear, seed=0
        )
        np.testing.assert_allclose(told[0], (p * g).sum(), rtol=1e-5)
        g = g / max(1.0, np.linalg.norm(g) / training.CLIP)
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g**2
        moved = (first / (1 - 0.9 ** (n + 1))) / np.sqrt(second / (1 - 0.99 ** (n + 1)))
        p = p - 0.1 * (moved + training.WEIGHT_DECAY * p)
        keep = min(training.AVERAGING, (1 + n) / (10 + n))
        average = keep * average + (1 - keep) * p
        np.testing.assert_allclose(state.params["a"], p, rtol=1e-5)
        np.testing.assert_allclose(state.averaged["a"], average, rtol=1e-5)
    assert state.step == 3


def test_the_learning_rate_rises_and_falls():
    rate = training.learning_rate
    assert rate(2.0, 0, 0.0) == 2.0 / training.WARM_UP
    assert rate(2.0, training.WARM_UP // 2 - 1, 0.0) == 1.0
    assert rate(2.0, training.WARM_UP, 0.0) == 2.0
    assert rate(2.0, training.WARM_UP, 0.75) == 0.5
    assert rate(2.0, 10**6, 1.0) == rate(2.0, 10**6, 1.5) == 0.0


def noisy(params, batch, key):
    return jnp.sum(params["a"]) * 0 + jax.random.uniform(key)


def test_random_numbers_follow_from_the_seed_and_the_step():
    def drawn(seed, step):
        state = training.init_state(0, lambda key: {"a": jnp.zeros(2, jnp.float32)})
        state = state._replace(step=step)
        clock = jax.device_put(np.zeros(1, np.float32))
        batch = jnp.zeros((), jnp.float32)
        _, told = training.update(state, batch, 0.1, clock, loss=noisy, seed=seed)
        return float(told[0])

    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = {place: drawn(*place) for place in places}
    assert len(set(found.values())) == 4
    assert drawn(0, 1) == found[0, 1]  # as in a run that is resumed
