"""The loop over the steps: one scan, or a scan over segments. Time comes first here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def near_divisor(length: int, target: int) -> int:
    """A divisor of `length` near `target`, at least half and at most twice as large.

    `target` itself where there is none.
    """
    near = range(max(1, target // 2), 2 * target + 1)
    divisors = [k for k in near if length % k == 0]
    return min(divisors, key=lambda k: abs(k - target), default=target)


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
    once = checkpoint(segment, policy)
    # Inside a scan there is nothing that XLA could merge the second run with.
    inner = checkpoint(segment, policy, prevent_cse=False)
    count, rest = divmod(steps.t.shape[0], size)
    if count + (rest > 0) == 1:
        return once(states, steps)
    odd = jax.tree.map(lambda a: a[:rest], steps)
    # Counts are spelled out: a -1 cannot be solved for where the batch is empty.
    blocks = jax.tree.map(lambda a: a[rest:].reshape(count, size, *a.shape[1:]), steps)

    def run_blocks(states: Any) -> tuple[Any, Any]:
        states, results = lax.scan(inner, states, blocks, reverse=reverse)
        join = lambda a: a.reshape(count * size, *a.shape[2:])  # noqa: E731
        return states, jax.tree.map(join, results)

    if not rest:
        return run_blocks(states)
    if reverse:
        states, results = run_blocks(states)
        states, odd_results = once(states, odd)
    else:
        states, odd_results = once(states, odd)
        states, results = run_blocks(states)
    join = lambda a, b: jnp.concatenate([a, b])  # noqa: E731
    return states, jax.tree.map(join, odd_results, results)
