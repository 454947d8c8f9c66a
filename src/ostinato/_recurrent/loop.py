"""The loop over the steps: one scan, or a scan over segments. Time comes first here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._segments import scan_segments
from .._typing import Array
from .remat import checkpoint


class Steps(NamedTuple):
    """What the loop reads, one slice a step.

    Attributes:
        inputs: leaves `[T, B, ...]`.
        t: int32 `[T]`.
        valid: bool `[T, B]`, True before a row's end; None for all.
        reset: bool `[T, B]`, True where the row's states become 0; None for none.
    """

    inputs: Any
    t: Array
    valid: Array | None
    reset: Array | None


def where_rows(condition: Array, tree: Any, other: Any = None) -> Any:
    """`tree` where `condition` holds, over its leading axes, else `other` or 0."""

    def pick(a: Array, b: Array | None = None) -> Array:
        mask = jnp.expand_dims(condition, tuple(range(condition.ndim, a.ndim)))
        return jnp.where(mask, a, jnp.zeros((), a.dtype) if b is None else b)

    return jax.tree.map(pick, tree, *([] if other is None else [other]))


def in_segments(
    segment: Callable,
    states: Any,
    steps: Steps,
    size: int,
    reverse: bool,
    policy: Callable[..., bool] | None,
) -> tuple[Any, Any]:
    """Run `segment(states, steps)` on `size` steps at a time and join its results.

    Of a segment nothing is saved for the backward pass but the states before it and
    what `policy` lets through. A number of steps that `size` does not divide has one
    shorter segment, first in time.
    """
    return scan_segments(
        # Inside a scan there is nothing that XLA could merge the second run with.
        checkpoint(segment, policy, prevent_cse=False),
        states,
        steps,
        size,
        reverse,
        odd_segment=checkpoint(segment, policy),
    )
