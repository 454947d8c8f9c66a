"""Parameters, closed-over arrays, inputs and states of a small net, for tests."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

T, B, I, H = 5, 3, 2, 3  # noqa: E741


class Arguments(NamedTuple):
    params: Any
    closed: Any
    x: Any
    states: Any


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))  # noqa: E731
    states = {"h": draw(B, H), "total": draw(B)}
    return Arguments({"w": draw(I, H)}, draw(H, H), draw(B, T, I), states)
