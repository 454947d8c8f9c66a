"""A scan over segments of steps, whose intermediate values exist one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def near_divisor(length: int, target: int, factor: int = 2) -> int:
    """Return the divisor of `length` that is nearest to `target`.

    If no divisor lies between `target / factor` and `target * factor`, return `target`.
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
        segment: the function that runs inside a scan.
        carry: the carry of the first segment.
        xs: a pytree of arrays with the steps as their first axis.
        size: steps of a segment. If it does not divide the number of steps, one shorter
            segment comes first in time.
        reverse: run the last segment first; results stay in the order of `xs`.
        odd_segment: the function that runs outside a scan, on that shorter segment or
            on a single segment of all steps; None means `segment`.

    Returns:
        The last carry, and the results of all segments, concatenated.
    """
    odd_segment = segment if odd_segment is None else odd_segment
    count, rest = divmod(jax.tree.leaves(xs)[0].shape[0], size)
    if count + (rest > 0) <= 1:
        return odd_segment(carry, xs)
    odd = jax.tree.map(lambda a: a[:rest], xs)
    # Without -1 in the shape, which cannot be solved for if the batch is empty.
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
