"""One call of `ragged.vmap`: its options, and what the symbols of its trace mean."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..._typing import Array
from .sizes import Range


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `ragged.vmap` that rules look at; its docstring explains them.

    `prefers_rows` is none: inside of loops and tiers, where all is padded, it is False.
    """

    scan: str = "auto"
    lanes: int | None = None
    tiers: Any = None
    prefers_rows: bool = True


@dataclasses.dataclass(frozen=True)
class Symbols:
    """What the symbols of a trace stand for.

    Attributes:
        values: for each symbol int32 `[batch]`, its value in each example.
        ranges: for each symbol the least and largest value.
        totals: for each symbol a static bound of its sum over the batch.
        capacities: the rows of the inputs' flat arrays, by the text of their size.
        least: for each symbol what no value is below, except maybe a traced one.
        room: for each symbol a value that its largest one is not below, so that padded
            arrays have an element along each axis: from none, none could be taken.
    """

    values: dict[str, Array]
    ranges: dict[str, Range]
    totals: dict[str, int]
    capacities: dict[str, int]
    least: dict[str, int]
    room: dict[str, int] = dataclasses.field(default_factory=dict)

    def with_room(self, room: dict[str, int]) -> Symbols:
        """With ranges that reach that far."""
        ranges = {
            name: r._replace(high=max(r.high, room.get(name, 1)))
            for name, r in self.ranges.items()
        }
        return dataclasses.replace(self, ranges=ranges, room=room)
