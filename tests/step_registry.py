"""The table of step functions that the tests run, and how they draw their arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

T, B, F, H = 5, 3, 2, 4


class Program(NamedTuple):
    """A step function and its arguments; `inputs` are time-major."""

    step: Callable
    params: Any
    states: Any
    inputs: Any


class Draw:
    """Draws arrays, all different and asymmetric."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape, scale=0.7):
        return jax.device_put(scale * self.rng.standard_normal(shape))


PROGRAMS: dict[str, Program] = {}


def program(make):
    """Register `make(draw) -> (step, params, states)`; inputs are drawn."""
    draw = Draw(len(PROGRAMS))
    made = make(draw)
    inputs = made[3] if len(made) > 3 else draw(T, B, F)
    PROGRAMS[make.__name__] = Program(*made[:3], inputs)
    return make
