"""A scan over one example, as the schedules take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._typing import Array
from ..core.context import Context
from ..types.checks import check_padded


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan over one example.

    Attributes:
        jaxpr: the jaxpr of the body, `(consts, carry, x) -> (carry, y)`.
        num_carry: the number of its results that are carried on.
        length: the number of steps, maybe symbolic.
        reverse: as in `jax.lax.scan`.
        unroll: as in `jax.lax.scan`.
        shapes: the shapes of all results of one example.
    """

    jaxpr: Any
    num_carry: int
    length: Any
    reverse: bool
    unroll: Any
    shapes: list[tuple[Any, ...]]


def tokens_of_steps(ctx: Context, y: Array, dim: Any) -> Array:
    """Return the tokens of results of steps, `[T, batch, ...]`, for the size `dim`."""
    check_padded(ctx.batch, y.shape[0])
    segments = ctx.segments(dim)
    tokens = segments.position * ctx.batch + segments.ids
    tokens = jnp.clip(tokens, 0, y.shape[0] * ctx.batch - 1)
    return jnp.take(lax.collapse(y, 0, 2), tokens, 0)
