"""A scan over segments of steps: what a segment makes never exists for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def near_divisor(length: int, target: int, factor: int = 2) -> int:
    """Return the divisor of `length` that is nearest to `target`.

    It is at most `factor` times as large or as small. Where there is none, return
    `target` itself.
    """
    near = range(max(1, target // factor), factor * target + 1)
    divisors = [k for k in near if length % k == 0]
    return min(divisors, key=lambda k: abs(k - target), default=target)


def scan_segments(
    segment: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    size: int,
    reverse: bool,
    odd_segment: Callable[[Any, Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, Any]:
    """Run `segment(carry, xs) -> (carry, ys)` on `size` steps at a time.

    Args:
        segment: what runs inside of a scan.
        carry: what the first segment gets.
        xs: a pytree of arrays with the steps as their first axis.
        size: steps of a segment. Where it does not divide them, one shorter segment
            comes first in time.
        reverse: run the last segment first; results stay in the order of `xs`.
        odd_segment: what runs outside of a scan, on that shorter segment or on one that
            is everything; None: `segment`.

    Returns:
        The last carry, and the results of all segments joined.
    """
    odd_segment = segment if odd_segment is None else odd_segment
    count, rest = divmod(jax.tree.leaves(xs)[0].shape[0], size)
    if count + (rest > 0) <= 1:
        return odd_segment(carry, xs)
    odd = jax.tree.map(lambda a: a[:rest], xs)
    # Counts are spelled out: a -1 cannot be solved for where the batch is empty.
    blocks = jax.tree.map(lambda a: a[rest:].reshape(count, size, *a.shape[1:]), xs)

    def run_blocks(carry: Any) -> tuple[Any, Any]:
        carry, ys = lax.scan(segment, carry, blocks, reverse=reverse)
        return carry, jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:]), ys)

    if not rest:
        return run_blocks(carry)
    if reverse:
        carry, ys = run_blocks(carry)
        carry, odd_ys = odd_segment(carry, odd)
    else:
        carry, odd_ys = odd_segment(carry, odd)
        carry, ys = run_blocks(carry)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), odd_ys, ys)
