"""flax: `nnx.RNN` of its cells, `nnx.Bidirectional` for both directions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import ostinato as ost

from ..problem import Data, Problem
from . import jitted
from .contender import Contender

_CELLS = {
    "lstm": nnx.OptimizedLSTMCell,
    "gru": nnx.GRUCell,
    "rnn_tanh": nnx.SimpleCell,
}


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender, with one `nnx.RNN` for each pseudo-layer."""
    del threads  # XLA uses the CPUs of the process
    network, params = nnx.split(_network(problem, data))

    def sequence(params, x, state, lengths):
        states = _states(problem, state)
        last: list[Any] = []
        for layer in nnx.merge(network, params):
            two = problem.bidirectional
            carry = (states.pop(0), states.pop(0)) if two else states.pop(0)
            carry, x = layer(
                x, initial_carry=carry, seq_lengths=lengths, return_carry=True
            )
            last += carry if two else [carry]
        return x, _stacked(problem, last)

    def step(params, x, state, lengths):
        (layer,) = nnx.merge(network, params)
        carry, y = layer.cell(_states(problem, state)[0], x[0])
        return y, _stacked(problem, [carry])

    return jitted.contender(
        problem,
        data,
        step if problem.kind == "step" else sequence,
        params,
        lambda params: _layers(problem, nnx.merge(network, params)),
    )


def _network(problem: Problem, data: Data) -> nnx.List:
    dtype = jnp.dtype(problem.dtype)
    directions = []
    for p, weights in enumerate(data.layers):
        cell = _CELLS[problem.mode](
            weights.w_ih.shape[1],
            problem.hidden_size,
            dtype=dtype,
            param_dtype=dtype,
            recurrent_kernel_init=nnx.initializers.zeros,  # orthogonal needs float32
            rngs=nnx.Rngs(0),
        )
        cell.dense_i.kernel[...] = weights.w_ih.T.astype(dtype)
        cell.dense_h.kernel[...] = weights.w_hh.T.astype(dtype)
        # Only one of the two products has a bias.
        _biased(problem, cell).bias[...] = (weights.b_ih + weights.b_hh).astype(dtype)
        backward = problem.bidirectional and p % 2 == 1
        options: Any = dict(time_major=True, return_carry=True, rngs=False)
        directions.append(
            nnx.RNN(cell, reverse=backward, keep_order=backward, **options)
        )
    if not problem.bidirectional:
        return nnx.List(directions)
    pairs = zip(directions[::2], directions[1::2], strict=True)
    return nnx.List(
        nnx.Bidirectional(*pair, time_major=True, rngs=False) for pair in pairs
    )


def _biased(problem: Problem, cell: Any) -> Any:
    return cell.dense_h if problem.mode == "lstm" else cell.dense_i


def _layers(problem: Problem, network: Any) -> list[ost.LayerWeights]:
    cells = [
        one.cell
        for layer in network
        for one in (
            (layer.forward_rnn, layer.backward_rnn)
            if problem.bidirectional
            else (layer,)
        )
    ]
    return [
        ost.LayerWeights(
            w_ih=cell.dense_i.kernel[...].T,
            w_hh=cell.dense_h.kernel[...].T,
            b_ih=_biased(problem, cell).bias[...],
            b_hh=None,
            w_hr=None,
        )
        for cell in cells
    ]


def _states(problem: Problem, state: Any) -> list[Any]:
    """Return flax's carries, one per pseudo-layer; an LSTM's is (c, h)."""
    if problem.mode == "lstm":
        return [(c, h) for h, c in zip(*state, strict=True)]
    return list(state)


def _stacked(problem: Problem, carries: list[Any]) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *carries)
    return stacked[::-1] if problem.mode == "lstm" else stacked
