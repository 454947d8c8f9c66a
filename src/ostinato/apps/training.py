"""One update of the parameters: gradient, clipping, AdamW, averaged parameters.

An ensemble is updated as one; its members do not influence each other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

Params = Any
"""A pytree of arrays."""
WARM_UP = 200  # updates until the learning rate reaches its peak
CLIP = 1.0  # largest norm of the gradient
WEIGHT_DECAY = 0.01
AVERAGING = 0.998  # share of the old average that an update keeps

_CLIPPING = optax.clip_by_global_norm(CLIP)  # without a state
_OPTIMIZER = optax.chain(
    optax.scale_by_adam(b2=0.99),
    optax.add_decayed_weights(WEIGHT_DECAY),
)


class State(NamedTuple):
    """The state of training; `step` also determines the next batch."""

    step: int
    params: Params
    averaged: Params  # the parameters to evaluate and save: less noisy than `params`
    optimizer: Any


def init_state(seed: int, init: Callable[[jax.Array], Params]) -> State:
    """Return the state before the first update; `init` draws parameters from a key."""
    params = jax.jit(init)(jax.random.key(seed))
    return State(0, params, params, init_optimizer(params))


def init_optimizer(params: Params) -> Any:
    """Return the state of the optimizer before the first update."""
    return _OPTIMIZER.init(params)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Return the rate: a warm-up in updates, then a linear decay to 0 at progress 1."""
    return peak * min(1.0, (step + 1) / WARM_UP, max(0.0, 1 - progress))


def update(
    state: State,
    batch: Any,
    rate: float,
    clock: Any,
    *,
    loss: Callable[[Params, Any, jax.Array], jax.Array],
    seed: int,
    members: int = 1,
    everywhere: NamedSharding | None = None,
) -> tuple[State, jax.Array]:
    """Update the parameters once; return the new state, the loss and the time.

    `loss(params, batch, key)` is a method of a hashable model, or another function that
    stays the same: its gradient is compiled once per batch shape, everything else once.
    The dropout key depends on the seed and the step only, so that a resumed run draws
    the same masks, and so do several devices.

    Args:
        state: the old state, the same on all devices.
        batch: the batch, which may be dealt out to devices; see `Devices.split`.
        rate: the learning rate.
        clock: float32 `[devices]`; see `Devices.clock`.
        loss: the function to minimise, of the parameters of one member.
        seed: that of the run.
        members: how many models the parameters hold; see `ensemble`.
        everywhere: see `Devices.everywhere`.

    Returns:
        The new state, and `[2]`: the mean loss of the members, and the time of the
        first device.
    """
    places = np.int32(seed + 1), np.int32(state.step)
    told, grads = _gradient(
        state.params,
        batch,
        places,
        clock,
        loss=loss,
        members=members,
        everywhere=everywhere,
    )
    keep = min(AVERAGING, (1 + state.step) / (10 + state.step))
    moved = _apply(state[1:], grads, np.float32(rate), np.float32(keep))
    return State(state.step + 1, *moved), told


@partial(jax.jit, static_argnames=("loss", "members", "everywhere"))
def _gradient(
    params: Params,
    batch: Any,
    places: tuple,
    clock: jax.Array,
    *,
    loss: Callable,
    members: int,
    everywhere: NamedSharding | None,
) -> tuple:
    seed, step = places
    key = jax.random.fold_in(jax.random.key(seed), step)

    def of_one(params: Params, key: jax.Array) -> tuple[jax.Array, Params]:
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        return value, _CLIPPING.update(grads, optax.EmptyState())[0]

    if members == 1:
        value, grads = of_one(params, key)
    else:
        values, grads = jax.vmap(of_one)(params, jax.random.split(key, members))
        value = jnp.mean(values)
    found = jnp.stack([value, clock[0]]), grads
    if everywhere is not None:
        found = jax.lax.with_sharding_constraint(found, everywhere)
    return found


@jax.jit
def _apply(state: tuple, grads: Params, rate: jax.Array, keep: jax.Array) -> tuple:
    params, averaged, optimizer = state
    updates, optimizer = _OPTIMIZER.update(grads, optimizer, params)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    averaged = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, averaged, params)
    return params, averaged, optimizer
