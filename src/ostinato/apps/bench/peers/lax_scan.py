"""A network as one writes it by hand in JAX: the input product, then `lax.scan`."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import ostinato as ost

from ..problem import Data, Problem
from . import jitted
from .contender import Contender


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender, with one loop for each pseudo-layer."""
    del threads  # XLA uses the CPUs of the process
    layers = jax.tree.map(lambda a: jnp.asarray(a, problem.dtype), data.layers)
    return jitted.contender(
        problem, data, ft.partial(_run, problem), layers, lambda layers: layers
    )


def _run(problem: Problem, layers: list[ost.LayerWeights], x, state, lengths):
    directions = problem.spec.num_directions
    states = jax.tree.map(list, state)  # one item per pseudo-layer
    if problem.mode == "lstm":
        states = list(zip(*states, strict=True))
    valid = None
    if lengths is not None:
        time = jnp.arange(problem.steps, dtype=lengths.dtype)
        valid = (time[:, None] < lengths[None])[..., None]  # [T, N, 1]
    last: list[Any] = []
    for first in range(0, len(layers), directions):
        halves = []
        for p in range(first, first + directions):
            end, y = _direction(problem.mode, layers[p], x, states[p], valid, p - first)
            last.append(end)
            halves.append(y)
        x = jnp.concatenate(halves, axis=-1)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *last)


def _direction(mode: str, weights: ost.LayerWeights, x, state, valid, reverse: int):
    cell = _CELLS[mode]
    gx = x @ weights.w_ih.T
    gx = gx + jnp.broadcast_to(weights.b_ih, gx.shape)
    w_hh = weights.w_hh.T  # XLA would repeat it at every step of the loop

    def step(state, inputs):
        gx, valid = inputs
        gh = (state[0] if mode == "lstm" else state) @ w_hh
        new, h = cell(gx, gh + jnp.broadcast_to(weights.b_hh, gh.shape), state)
        if valid is not None:
            new = jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, state)
            h = jnp.where(valid, h, jnp.zeros_like(h))
        return new, h

    # In reverse the padding comes first; the state passes through it unchanged.
    return lax.scan(step, state, (gx, valid), reverse=bool(reverse))


def _lstm(gx, gh, state):
    i, f, g, o = jnp.split(gx + gh, 4, axis=-1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(gx, gh, h):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (jnp.split(a, 3, axis=-1) for a in (gx, gh))
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * h_n)
    h = n + z * (h - n)
    return h, h


def _rnn_tanh(gx, gh, h):
    h = jnp.tanh(gx + gh)
    return h, h


_CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh}
