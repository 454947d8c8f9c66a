"""The loop over the steps, as a scan over segments; arrays are time-major here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._segments import scan_segments
from .._typing import Array
from .remat import checkpoint


class LoopInputs(NamedTuple):
    """The arrays of which the loop reads one slice at each step.

    Attributes:
        inputs: leaves `[T, B, ...]`.
        t: int32 `[T]`.
        valid: bool `[T, B]`, True before the end of a sequence; None if always True.
        reset: bool `[T, B]`, True where the states of a sequence become 0 before the
            step; None if always False.
    """

    inputs: Any
    t: Array
    valid: Array | None
    reset: Array | None


def run_in_segments(
    segment: Callable,
    states: Any,
    steps: LoopInputs,
    size: int,
    reverse: bool,
    policy: Callable[..., bool] | None,
) -> tuple[Any, Any]:
    """Run `segment(states, steps)` on `size` steps at a time and join its results.

    Each segment saves for the backward pass only the states before it, and the values
    that `policy` lets it save. If `size` does not divide the number of steps, one
    shorter segment comes first in time.
    """
    return scan_segments(
        # Inside a scan, XLA cannot merge the recomputation with the first run.
        checkpoint(segment, policy, prevent_cse=False),
        states,
        steps,
        size,
        reverse,
        odd_segment=checkpoint(segment, policy),
    )
