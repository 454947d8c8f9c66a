"""The loop over the steps: one scan, or a scan over segments. Time comes first here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._segments import scan_segments
from .._typing import Array
from .remat import checkpoint


class LoopInputs(NamedTuple):
    """The arrays that the loop reads, one slice a step.

    Attributes:
        inputs: leaves `[T, B, ...]`.
        t: int32 `[T]`.
        valid: bool `[T, B]`, True before the end of a sequence; None: always.
        reset: bool `[T, B]`, True where the sequence's states become 0; None: never.
    """

    inputs: Any
    t: Array
    valid: Array | None
    reset: Array | None


def in_segments(
    segment: Callable,
    states: Any,
    steps: LoopInputs,
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
