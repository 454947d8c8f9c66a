"""A scan over one example, as the schedules take it."""

from __future__ import annotations

import dataclasses
from typing import Any


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
