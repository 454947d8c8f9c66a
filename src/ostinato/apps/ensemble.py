"""Ensembles: models that differ in their seed, trained as one and averaged in use.

The parameters of an ensemble have a leading axis of members in every array; those of a
single model have none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MOST_MEMBERS = 64


def init_members(init: Callable[[jax.Array], Any], members: int, key: jax.Array) -> Any:
    """Draw the parameters of every member, or of a single model, from one key."""
    return init(key) if members == 1 else jax.vmap(init)(jax.random.split(key, members))


def with_axis(params: Any, members: int) -> Any:
    """Return the parameters with an axis of members, also if there is only one."""
    return jax.tree.map(lambda a: a[None], params) if members == 1 else params


def mean_probability(log_probs: jax.Array) -> jax.Array:
    """Return the logarithm of the mean over members, the leading axis."""
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(log_probs))
