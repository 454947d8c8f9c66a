"""Array aliases and the literals that name modes, biases and backends."""

from typing import Any, Literal

import jax

Array = jax.Array
"""A JAX array or tracer."""

ArrayLike = Any
"""Whatever `jax.numpy.asarray` takes: JAX and numpy arrays, numbers, lists."""

Mode = Literal["rnn_relu", "rnn_tanh", "lstm", "gru"]
BiasMode = Literal["double", "input", "recurrent", "none"]
InputMode = Literal["linear", "skip"]
Padding = Literal["zero", "hold", "drop"]
Backend = Literal["xla", "cpu", "cuda"]
State = Array | tuple[Array, ...]
"""`h`, or `(h, c)` for an LSTM: all states of the mode."""
