"""Type aliases: arrays, and the names of modes, biases, paddings and backends."""

from typing import Any, Literal

import jax

Array = jax.Array
"""A JAX array or tracer."""

ArrayLike = Any
"""A value that `jax.numpy.asarray` accepts: JAX and numpy arrays, numbers, lists."""

Mode = Literal["rnn_relu", "rnn_tanh", "lstm", "gru"]
BiasMode = Literal["double", "input", "recurrent", "none"]
InputMode = Literal["linear", "skip"]
Padding = Literal["zero", "hold", "drop"]
Backend = Literal["xla", "cpu", "cuda"]
State = Array | tuple[Array, ...]
"""The states of a mode: `h`, or `(h, c)` for an LSTM."""
