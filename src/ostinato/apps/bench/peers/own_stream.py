"""The sessions of `ostinato.stream`, which keep the states themselves."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import ostinato as ost

from ..problem import Data, Problem
from . import own
from .contender import Contender, Unsupported, results


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender, whose first call begins at the problem's initial state.

    Raises:
        Unsupported: the problem is not a step of streams.
    """
    del threads
    if problem.kind != "step":
        raise Unsupported("it is for steps of streams")
    dtype = jnp.dtype(problem.dtype)
    session = ost.stream(problem.spec, own.flat_weights(problem, data), problem.batch)
    session.state = data.state
    x = data.x[0].astype(dtype)

    def translated(y: Any) -> dict[str, np.ndarray]:
        return results(problem, data, y[None], session.state)

    return Contender(lambda: session.step(x), translated, session.backend)
