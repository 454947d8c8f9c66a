"""Attention over a padded memory, for tests: cells inside of it, memory, inputs."""

import jax.numpy as jnp
import numpy as np
from cell_cases import BATCH, LENGTHS, STEPS, CellCase, draw, shapes_of
from oracles import cells64

from ostinato import cells

ENTRIES, FEATURES, SIZE = 4, 2, 3  # memory entries; inputs; memory features
MEMORY_LENGTHS = (4, 0, 1)
INNER = {
    "lstm": CellCase(cells.LSTM(FEATURES + SIZE, 5), cells64.lstm),
    "gru-same": CellCase(cells.GRU(FEATURES + SIZE, SIZE), cells64.gru),
    "milstm": CellCase(cells.MILSTM(FEATURES + SIZE, 5), cells64.milstm),
}


def make(kind, inner="lstm", memory_lengths=MEMORY_LENGTHS, dtype="float64"):
    """Make a cell, parameters, inputs, memory and states, with NaN in all padding."""
    rng = np.random.default_rng(5)
    attention = cells.Attention(INNER[inner].cell, kind, memory_size=SIZE)
    memory = rng.standard_normal((BATCH, ENTRIES, SIZE))
    x = rng.standard_normal((BATCH, STEPS, FEATURES))
    for b in range(BATCH):
        memory[b, memory_lengths[b] :] = np.nan
        x[b, LENGTHS[b] :] = np.nan
    bound = attend(attention, jnp.asarray(memory, dtype), memory_lengths)
    params, states = shapes_of(bound, dtype)
    params, states = draw(rng, params, dtype), draw(rng, states, dtype)
    return attention, (
        params,
        jnp.asarray(x, dtype),
        jnp.asarray(memory, dtype),
        states,
    )


def attend(attention, memory, memory_lengths=MEMORY_LENGTHS, **options):
    return attention.attend(memory, np.asarray(memory_lengths, np.int32), **options)
