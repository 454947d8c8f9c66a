"""The operator of ostinato, on the backend that it chooses."""

from typing import Any

import ostinato as ost

from ..problem import Data, Problem
from . import jitted
from .contender import Contender


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender; the number of threads is that of the native library."""
    del threads
    return contender(problem, data, flat_weights(problem, data))


def flat_weights(problem: Problem, data: Data) -> Any:
    """Return the weights of the problem as one vector of its dtype."""
    return ost.pack_weights(data.layers, problem.spec).astype(problem.dtype)


def contender(
    problem: Problem, data: Data, weights: Any, backend: Any = None
) -> Contender:
    """Make a contender with the flat vector, or with prepared weights."""
    spec = problem.spec

    def sequence(weights, x, state, lengths):
        return ost.rnn(
            spec,
            weights,
            x,
            state,
            seq_lengths=lengths,
            time_major=True,
            backend=backend,
        )

    def step(weights, x, state, lengths):
        return ost.rnn_step(spec, weights, x[0], state, backend=backend)

    return jitted.contender(
        problem,
        data,
        step if problem.kind == "step" else sequence,
        weights,
        lambda weights: ost.unpack_weights(weights, spec),
        backend or chosen(problem, data),
    )


def chosen(problem: Problem, data: Data) -> str:
    """Return the backend that ostinato chooses for the problem."""
    return ost.explain(problem.spec, flat_weights(problem, data)).backend
