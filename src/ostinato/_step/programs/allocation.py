"""Places of local buffers, which those share that are not alive together."""

from __future__ import annotations

from collections.abc import Sequence

from .program import (
    ELEMENTWISE,
    PRODUCT,
    Buffer,
    Instruction,
    Local,
    Phase,
    Place,
    padded,
    views,
)


def allocate(instructions: Sequence[Instruction]) -> Local:
    """Give local buffers their places.

    The native loop runs a stretch of instructions for some sequences, then for others:
    what was there before it, or is read after it, shares its place with nothing in it.
    """
    stretches = _stretches(instructions)
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for i, instruction in enumerate(instructions):
        for view in views(instruction):
            first.setdefault(view.buffer, i)
            last[view.buffer] = i
    local = [b for b in first if b.place is Place.LOCAL]
    crossing = {
        b for b in local if not b.rows or stretches[first[b]] != stretches[last[b]]
    }
    ends = {stretch: i for i, stretch in enumerate(stretches)}
    spaces = {True: _Space(), False: _Space()}
    offsets: dict[Buffer, int] = {}
    held: dict[Buffer, int] = {}  # until where a place is not free
    begun = set()
    for i, (instruction, stretch) in enumerate(
        zip(instructions, stretches, strict=True)
    ):
        if stretch not in begun:
            begun.add(stretch)
            for b in local:
                if b in crossing and stretches[first[b]] == stretch:
                    offsets[b] = spaces[b.rows].take(b.width)
                    held[b] = ends[stretches[last[b]]]
        read = dict.fromkeys(view.buffer for view in instruction.operands)
        ending = [b for b in read if b in offsets and last[b] == i]
        target = instruction.result.buffer
        # An element that is read where it is written may be written over.
        if (
            target.place is Place.LOCAL
            and target not in offsets
            and _may_overwrite(instruction, ending)
        ):
            (old,) = ending
            offsets[target] = offsets[old]
            held[target] = max(held.pop(old, i), last[target])
        if target.place is Place.LOCAL and target not in offsets:
            offsets[target] = spaces[target.rows].take(target.width)
            held[target] = last[target]
        for b in [b for b, end in held.items() if end == i]:
            spaces[b.rows].free(offsets[b], b.width)
            del held[b]
    return Local(offsets, (spaces[True].size, spaces[False].size))


def _stretches(instructions: Sequence[Instruction]) -> list[tuple[Phase, int]]:
    """Return for each instruction the stretch that it belongs to.

    A stretch is one product, or all that is between two of them.
    """
    count, found = 0, []
    for i in instructions:
        product = i.operation == PRODUCT and i.phase is Phase.STEP
        count += product
        found.append((i.phase, count if i.phase is Phase.STEP else 0))
        count += product
    return found


def _may_overwrite(instruction: Instruction, ending: Sequence[Buffer]) -> bool:
    if len(ending) != 1 or instruction.operation not in ELEMENTWISE:
        return False
    (old,), new = ending, instruction.result
    return (
        old.rows == new.buffer.rows
        and old.width == new.buffer.width
        and all(
            view[1:] == new[1:] for view in instruction.operands if view.buffer is old
        )
    )


class _Space:
    """Places in a space that grows as needed; each begins at a multiple of 16."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[tuple[int, int]] = []

    def take(self, width: int) -> int:
        width = padded(width)
        for i, (start, size) in enumerate(self._holes):
            if size >= width:
                self._holes[i] = (start + width, size - width)
                return start
        self.size += width
        return self.size - width

    def free(self, start: int, width: int) -> None:
        merged: list[tuple[int, int]] = []
        holes = [*self._holes, (start, padded(width))]
        for begin, size in sorted(holes):
            if size and merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            elif size:
                merged.append((begin, size))
        self._holes = merged
