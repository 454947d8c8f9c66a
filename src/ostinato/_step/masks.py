"""Masks of the steps that sequences have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._padding import fill_empty_sequences, is_step, select
from .._typing import Array


class StepMask(NamedTuple):
    """Which sequences have which steps.

    Attributes:
        valid: bool `[T, B]`; None if all have all.
        initial: states at which the step is finite.
    """

    valid: Array | None
    initial: list[Array]

    @classmethod
    def of(
        cls, masked: bool, length: int, operands: Sequence[Array], states: list[Array]
    ) -> StepMask:
        """Return the mask for lengths that are the last operand, or one without."""
        if not masked:
            return cls(None, [])
        lengths = operands[-1]
        valid = is_step(lengths, length, 0)
        return cls(valid, [fill_empty_sequences(a, lengths) for a in states])

    def before(self, valid: Array | None, states: list[Array]) -> list[Array]:
        """Return the states of sequences that have a step, and `initial` of others.

        A sequence that has ended runs its first step again. Its results are finite,
        whereas the step may have a pole at the final states.
        """
        return states if valid is None else select(valid, states, self.initial)
