"""Masks with gaps: the valid steps of each sequence are run one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._padding import select
from .._typing import Array, Bool, Int


def check_with_mask(seq_lengths: Any, padding: Any) -> None:
    """Raise ValueError unless a call with a mask can have these options."""
    if seq_lengths is not None:
        raise ValueError(
            "`mask` must be None where `seq_lengths` is given; the mask of lengths is "
            "arange(T) < seq_lengths[:, None]"
        )
    if padding not in ("zero", "hold"):
        raise ValueError(
            f"`padding` must be 'zero' or 'hold' with a `mask`, got {padding!r}; "
            "'drop' is about sequences that end before T"
        )


class ValidSteps(NamedTuple):
    """The positions of the valid steps of every sequence.

    Attributes:
        mask: True at valid steps.
        order: the valid steps in the order of time, then the others.
        place: for each step the place of the last valid step up to it among all valid
            steps; -1 before the first one.
        lengths: the number of valid steps.
    """

    mask: Bool[Array, "B T"]
    order: Int[Array, "B T"]
    place: Int[Array, "B T"]
    lengths: Int[Array, " B"]

    @classmethod
    def of(cls, mask: Bool[Array, "B T"]) -> ValidSteps:
        """Return the positions of the True elements."""
        count = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
        order = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)
        return cls(mask, order, count - 1, jnp.sum(mask, axis=1, dtype=jnp.int32))

    def gather(self, a: Array, time_axis: int) -> Array:
        """Return `a` with the valid steps of each sequence first."""
        return _take(a, self.order, time_axis)

    def spread(
        self, y: Array, time_axis: int, held_first: Array | None = None
    ) -> Array:
        """Return results of gathered steps at the places of these steps.

        Args:
            y: `[B, T, ...]` or `[T, B, ...]`, the valid steps first.
            time_axis: 1 or 0.
            held_first: `[B, ...]`: masked steps repeat the last valid result, and have
                this before the first one. None: masked steps are 0.
        """
        mask, place = self.mask, self.place
        if time_axis == 0:
            mask, place = mask.T, place.T
        taken = _take(y, jnp.maximum(self.place, 0), time_axis)
        if held_first is None:
            return select(mask, taken)
        return select(place >= 0, taken, jnp.expand_dims(held_first, time_axis))

    def gather_resets(
        self, resets: Bool[Array, "B T"]
    ) -> tuple[Bool[Array, "B T"], Bool[Array, " B"]]:
        """Return resets before the valid steps, and after the last one.

        A reset at a masked step takes effect before the next valid step.
        """
        front = ((0, 0), (1, 0))  # no reset before the first step
        count = jnp.pad(jnp.cumsum(resets, axis=1, dtype=jnp.int32), front)
        at_valid = jnp.pad(_take(count[:, 1:], self.order, 1), front)
        last = jnp.take_along_axis(at_valid, self.lengths[:, None], 1)
        return at_valid[:, 1:] > at_valid[:, :-1], count[:, -1] > last[:, 0]


def _take(a: Array, index: Array, time_axis: int) -> Array:
    """Return `a` with its steps in the order of `index`, `[B, T]`."""
    if time_axis == 0:
        index = index.T
    index = jnp.expand_dims(index, tuple(range(2, a.ndim)))
    return jnp.take_along_axis(a, index, axis=time_axis, mode="clip")
