"""ostinato itself, on the backend that it chooses."""

import jax.numpy as jnp

import ostinato as ost

from ..problem import Data, Problem
from . import jitted
from .contender import Contender


def build(problem: Problem, data: Data, threads: int) -> Contender:
    del threads  # from OSTINATO_NUM_THREADS, read when the library was loaded
    spec = problem.spec

    def sequence(weights, x, state, lengths):
        return ost.rnn(spec, weights, x, state, seq_lengths=lengths, time_major=True)

    def step(weights, x, state, lengths):
        return ost.rnn_step(spec, weights, x[0], state)

    return jitted.contender(
        problem,
        data,
        step if problem.kind == "step" else sequence,
        ost.pack_weights(data.layers, spec),
        lambda weights: ost.unpack_weights(weights, spec),
        ost.explain(spec, jnp.empty(0, problem.dtype)).backend,
    )
