"""The function `explain` for networks, cells and step functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import _checks
from .._recurrent.explanation import explain_loop, with_defaults
from .._recurrent.protocol import Cell
from .._rnn import backends
from .._rnn.backends import Explanation
from .._rnn.spec import RNNSpec
from . import explanation


def explain(
    network: RNNSpec | Cell | Callable,
    x: Any,
    initial_states: Any = None,
    *,
    params: Any = None,
    **options: Any,
) -> Explanation:
    """Say which backend runs a network, and why.

    Derivatives of a network take the same backend, with two exceptions that run on xla:
    tangents (`jvp`), and anything that is differentiated twice. Exported functions
    (`jax.export`) run on xla too, so that any machine can run them.

    Args:
        network: an `RNNSpec`, as for `rnn`; or a cell or a step function, as for
            `recurrent_net`.
        x: the inputs, or any object with their `shape` and `dtype`; for a spec the
            dtype is enough. They are taken to be where JAX puts new arrays.
        initial_states: of a step function, as for `recurrent_net`; a cell has its own.
        params: of a step function, as for `recurrent_net`; a cell has its own.
        options: the other arguments of `recurrent_net`, for a cell or a function.

    Returns:
        `Explanation(backend, why, rejected)`: of a loop over a step function on the
        cpu, how many operations a step has and what is stored for the gradient; of one
        on xla, the operation that the cpu loop lacks, and its line.

    Raises:
        TypeError: `network` is none of these, or `x` has no dtype, or `recurrent_net`
            no such argument.
        ostinato.BackendError: no backend can run the spec here, or not the one that is
            named for a cell which runs whole sequences.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> def step(w, h, x, t):
        ...     h = jnp.tanh(x + h @ w)
        ...     return h, h
        >>> x, h_0, w = jnp.ones((8, 100, 4)), jnp.zeros((8, 4)), jnp.eye(4)
        >>> told = ost.explain(step, x, h_0, params=w)
        >>> told.backend in ("cpu", "xla")
        True
    """
    if isinstance(network, RNNSpec):
        if options or initial_states is not None or params is not None:
            raise TypeError("an RNNSpec has no further arguments; see ostinato.rnn")
        return backends.explain(network, x)
    if not callable(network):
        raise TypeError(
            "`network` must be an RNNSpec, a cell or a step function, got "
            f"{_checks.describe(network)}"
        )
    options = with_defaults(options)
    if isinstance(network, Cell):
        told = explanation.explain_whole(network, x, options)
        if not isinstance(told, str):
            return told
        if initial_states is None:
            batch = x.shape[1 if options["time_major"] else 0]
            initial_states = network.initial_state(batch, x.dtype)
        if params is None:
            init = lambda key: network.init(key, x.dtype)  # noqa: E731
            params = jax.eval_shape(init, jax.random.key(0))
    return explain_loop(network, x, initial_states, params, options)
