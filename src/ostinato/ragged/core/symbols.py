"""The options of one call of `ragged.vmap`, and the values of its symbols."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..._typing import Array
from .sizes import Range


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that rules look at; the docstring of `ragged.vmap` explains them.

    Attributes:
        scan: `"auto"`, `"padded"` or `"packed"`.
        lanes: the lanes of a packed scan, None to choose.
        tiers: for each symbol its tiers; None for one group.
        prefers_flat: whether flat values are the better choice. Inside of loops and
            tiers, where all values are padded, it is False. No option of the caller.
    """

    scan: str = "auto"
    lanes: int | None = None
    tiers: Any = None
    prefers_flat: bool = True


@dataclasses.dataclass(frozen=True)
class Symbols:
    """The values that the symbols of a trace stand for.

    Attributes:
        values: for each symbol int32 `[batch]`, its value in each example.
        ranges: for each symbol the least and the largest value.
        totals: for each symbol a static bound of its sum over the batch.
        capacities: the capacity of the inputs' flat arrays, by the text of their size.
        least: for each symbol the least value that was promised; a traced value may
            break the promise.
        least_derived: the same by the text of sizes that are made of others, where it
            does not follow from those.
        min_padded: for each symbol the least value that padded arrays are made for, so
            that each of their axes has an element to take.
        present: bool `[batch]`, the examples that are there; the others are empty, and
            count as incomplete. None where all are there.
    """

    values: dict[str, Array]
    ranges: dict[str, Range]
    totals: dict[str, int]
    capacities: dict[str, int]
    least: dict[str, int]
    least_derived: dict[str, int]
    min_padded: dict[str, int] = dataclasses.field(default_factory=dict)
    present: Array | None = None
