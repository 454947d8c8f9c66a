"""A linear recurrence whose steps are split over devices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Backend, Bool, Shaped
from .api import LinearOutput, linear_recurrence


def linear_recurrence_over_devices(
    a: Shaped[Array, "*factors"],
    b: Shaped[Array, "B T *F"],
    h_0: Shaped[Array, " B *F"] | None = None,
    *,
    axis_name: str,
    reverse: bool = False,
    resets: Bool[Array, "B T"] | None = None,
    time_major: bool = False,
    backend: Backend | None = None,
) -> LinearOutput:
    """Run `linear_recurrence` inside of `jax.shard_map` that splits the steps.

    Every device runs its own steps from the state 0. They exchange one state and one
    product of factors for each sequence, and then add what the state before their steps
    contributes. There are no lengths; in the padding of sequences, factors of 1 and
    inputs of 0 keep the state.

    Args:
        a: the factors of this device's steps, or the same at every step.
        b: the inputs of this device's steps.
        h_0: the states before the first step of all, the same on every device.
        axis_name: the axis of the mesh along which the steps are split.
        reverse: as for `linear_recurrence`.
        resets: as for `linear_recurrence`, of this device's steps.
        time_major: as for `linear_recurrence`.
        backend: as for `linear_recurrence`.

    Returns:
        `LinearOutput(h, h_n)`: the states of this device's steps, and the last states
        of all, the same on every device.

    Raises:
        TypeError, ValueError, ostinato.BackendError: as for `linear_recurrence`; no
            `jax.shard_map` around the call has the axis.

    Holds under the same transformations as `linear_recurrence`. Where the product of a
    device's factors is more than the dtype holds, a state is infinite or NaN that is
    finite in `linear_recurrence`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import ostinato as ost
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> run = jax.shard_map(
        ...     lambda a, x: ost.linear_recurrence_over_devices(a, x, axis_name="t"),
        ...     mesh=jax.make_mesh((1,), ("t",), axis_types=(AxisType.Auto,)),
        ...     in_specs=(P(), P(None, "t")),
        ...     out_specs=ost.LinearOutput(P(None, "t"), P()),
        ... )
        >>> run(jnp.array([0.5]), jnp.ones((1, 4, 1))).h[0, :, 0].tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    try:
        count = lax.axis_size(axis_name)
    except (NameError, TypeError, IndexError, ValueError):
        raise ValueError(
            "`axis_name` must be an axis of the mesh of a jax.shard_map around the "
            f"call, got {axis_name!r}"
        ) from None
    options: dict = dict(reverse=reverse, backend=backend)
    of_steps: dict = options | dict(time_major=time_major, resets=resets)
    own, last = linear_recurrence(a, b, **of_steps)
    start = jnp.zeros(last.shape, last.dtype) if h_0 is None else h_0
    if own.size == 0:  # XLA cannot compile shards whose operands are all empty
        return LinearOutput(b, start)
    nothing = jnp.zeros_like(own)

    def moved(state: Array) -> LinearOutput:
        """Run the factors alone."""
        return linear_recurrence(a, nothing, state, **of_steps)

    matrices = a.ndim - own.ndim in (1, -1)
    if matrices:
        unit = jnp.eye(b.shape[-1], dtype=b.dtype)
        columns = [moved(jnp.broadcast_to(column, last.shape)).h_n for column in unit]
        factor = jnp.stack(columns, -1)
    else:
        factor = moved(jnp.ones_like(last)).h_n
    cut = None if resets is None else jnp.any(resets, 0 if time_major else 1)
    factors, lasts, cuts = lax.all_gather((factor, last, cut), axis_name)
    states, _ = linear_recurrence(
        factors, lasts, start, time_major=True, resets=cuts, **options
    )
    index = lax.axis_index(axis_name)
    before = index + 1 if reverse else index - 1
    first = before == (count if reverse else -1)
    carry = jnp.where(first, start, states[jnp.clip(before, 0, count - 1)])
    h = own + moved(carry).h
    ends = index == (0 if reverse else count - 1)
    h_n = jnp.where(ends, states[index], jnp.zeros((), states.dtype))
    return LinearOutput(h, lax.psum(h_n, axis_name))
