"""Type aliases: arrays, and the names of modes, biases, paddings and backends.

Annotations such as `Float[Array, "B T I"]` give shapes by the names of the axes. They
are read by people and checked as `Array`; jaxtyping need not be installed.
"""

from typing import TYPE_CHECKING, Any, Literal

import jax

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import Shaped as Shaped
else:

    class Shaped:
        """Stand in for jaxtyping's types: `Shaped[Array, "B T"]` is `Array`."""

        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            """Return the type of the array, without its shape."""
            return item[0]

    Bool = Float = Int = Shaped

Array = jax.Array
"""A JAX array or tracer."""

ArrayLike = Any
"""A value that `jax.numpy.asarray` accepts: JAX and numpy arrays, numbers, lists."""

Mode = Literal["rnn_relu", "rnn_tanh", "lstm", "gru", "slstm"]
BiasMode = Literal["double", "input", "recurrent", "none"]
InputMode = Literal["linear", "skip"]
Padding = Literal["zero", "hold", "drop"]
Backend = Literal["xla", "cpu", "cuda"]
State = Array | tuple[Array, ...]
"""The states of a mode: `h`, `(h, c)` for an LSTM, `(h, c, n, m)` for an sLSTM."""
