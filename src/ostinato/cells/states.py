"""Initial states that are learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import Cell


def trainable_state(cell: Cell, dtype: Any = jnp.float32) -> Any:
    """Initial states of one row, zeros to begin with, to learn along with the params.

    Args:
        cell: any cell.
        dtype: of the states.

    Returns:
        As `cell.initial_state`, without the batch axis; `repeat_state` adds it.

    Raises:
        TypeError: `cell` is no cell.

    References:
        Caffe2 gives a recurrent layer such parameters where it gets no initial states.

    >>> import jax, jax.numpy as jnp
    >>> import ostinato as ost
    >>> cell = ost.cells.GRU(3, 4)
    >>> params = {"cell": cell.init(jax.random.key(0)), "h_0": None}
    >>> params["h_0"] = ost.cells.trainable_state(cell)
    >>> def outputs(params, x):
    ...     states = ost.cells.repeat_state(params["h_0"], len(x))
    ...     return ost.recurrent_net(cell, x, states, params=params["cell"]).outputs
    >>> outputs(params, jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """
    if not isinstance(cell, Cell):
        raise TypeError(f"`cell` must be a cell, got {_checks.describe(cell)}")
    return jax.tree.map(lambda a: a[0], cell.initial_state(1, dtype))


def repeat_state(state: Any, batch: int) -> Any:
    """The same state for every row; its gradient is the sum over the rows.

    Args:
        state: a pytree of arrays without a batch axis, as `trainable_state` makes it.
        batch: B.

    Returns:
        The same tree of `[B, ...]`.

    Raises:
        TypeError: `batch` is no integer.

    Holds under every JAX transformation.
    """
    batch = _checks.check_size("batch", batch, 0)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape)), state)
