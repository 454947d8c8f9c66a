"""Initial states that are learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import Cell


def trainable_state(cell: Cell, dtype: Any = jnp.float32) -> Any:
    """Return the initial states of one sequence, to be trained; they begin as zeros.

    Args:
        cell: any cell.
        dtype: of the states.

    Returns:
        States like `cell.initial_state`, but without the batch axis, which
        `repeat_state` adds.

    Raises:
        TypeError: `cell` is not a cell; `dtype` is no dtype of floats.

    References:
        Caffe2, whose recurrent layers have these parameters if they get no initial
        states.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import ostinato as ost
        >>> cell = ost.cells.GRU(3, 4)
        >>> params = {"cell": cell.init(jax.random.key(0)), "h_0": None}
        >>> params["h_0"] = ost.cells.trainable_state(cell)
        >>> def outputs(params, x):
        ...     states = ost.cells.repeat_state(params["h_0"], x.shape[0])
        ...     return ost.recurrent_net(cell, x, states, params=params["cell"]).outputs
        >>> outputs(params, jnp.ones((2, 5, 3))).shape
        (2, 5, 4)
    """
    if not isinstance(cell, Cell):
        raise TypeError(f"`cell` must be a cell, got {_checks.describe(cell)}")
    return jax.tree.map(lambda a: a[0], cell.initial_state(1, dtype))


def repeat_state(state: Any, batch: int) -> Any:
    """Repeat a state for every sequence; its gradient is the sum over sequences.

    Args:
        state: a pytree of arrays without a batch axis, as `trainable_state` makes it.
        batch: B.

    Returns:
        The same tree of `[B, ...]`.

    Raises:
        TypeError: `batch` is not an integer.
        ValueError: `batch` is negative.

    Holds under every JAX transformation.
    """
    batch = _checks.check_batch(batch)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *jnp.shape(a))), state)
