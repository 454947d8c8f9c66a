"""Instructions on parts that stand next to each other, joined to one on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from .program import ELEMENTWISE, Buffer, Instruction, Place, View, padded


def join_neighbours(
    instructions: list[Instruction], factors: set[Buffer], one: bool
) -> None:
    """Join operations on neighbouring parts, such as the gates of a cell, in place.

    Args:
        instructions: in their order, which stays.
        factors: the buffers that gradients of matrices read.
        one: whether there is one sequence. The results of some parts of a value are
            then as good as those of all; of several sequences, rows would stand apart.
    """
    for i in list(instructions):
        if not _has_part(i) or i not in instructions:
            continue
        group = _neighbours(i, instructions)
        whole = all(
            view.strides[1] == 0 or view.buffer.width == i.width * len(group)
            for view in i.operands
        )
        if (
            len(group) > 1
            and (one or whole)
            and _may_join(group, instructions, factors)
        ):
            _join(i, group, instructions)


def _has_part(i: Instruction) -> bool:
    return (
        i.operation in ELEMENTWISE
        and i.inner == 1
        and i.width == padded(i.width) > 0
        and i.result.strides == (0, 1)
        and any(v.strides[1] == 1 and v.buffer.width > i.width for v in i.operands)
    )


def _neighbours(
    i: Instruction, instructions: Sequence[Instruction]
) -> list[Instruction]:
    """Return `i` and instructions after it that do the same to neighbouring parts."""
    found = {0: i}
    for j in instructions[instructions.index(i) + 1 :]:
        shift = _shift(i, j)
        if shift is not None:
            found.setdefault(shift, j)
    first = last = 0
    while first - i.width in found:
        first -= i.width
    while last + i.width in found:
        last += i.width
    return [found[shift] for shift in range(first, last + 1, i.width)]


def _shift(i: Instruction, j: Instruction) -> int | None:
    """Return by how many elements all that `j` reads is shifted from what `i` reads."""
    same = (i.operation, i.rows, i.inner, i.width) == (
        j.operation, j.rows, j.inner, j.width
    )  # fmt: skip
    if not same or i.result.strides != j.result.strides:
        return None
    shifts = set()
    for a, b in zip(i.operands, j.operands, strict=True):
        if a.buffer is not b.buffer or a.strides != b.strides:
            return None
        if a.strides[1] == 1:
            shifts.add(b.offset - a.offset)
        elif a.offset != b.offset:
            return None
    return shifts.pop() if len(shifts) == 1 else None


def _may_join(
    group: Sequence[Instruction],
    instructions: Sequence[Instruction],
    factors: set[Buffer],
) -> bool:
    results = {i.result.buffer for i in group}
    operands = {view.buffer for i in group for view in i.operands}
    first = min(map(instructions.index, group))
    for later in instructions[first:]:
        # All that they read is there when the first of them runs.
        if later.result.buffer in operands:
            return False
        # Instructions that write results of the loop at once stay apart.
        copies = later.operation == "copy" and later.result.buffer.place in (
            Place.OUTPUT, Place.NEXT
        )  # fmt: skip
        if copies and later.operands[0].buffer in results:
            return False
    if len(results) == 1:
        offsets = [i.result.offset for i in group]
        start, width = offsets[0], group[0].width
        return offsets == [start + k * width for k in range(len(group))]
    writers = [i for i in instructions if i.result.buffer in results]
    return (
        len(results) == len(group) == len(writers)
        and results.isdisjoint(factors)
        and all(b.place is Place.LOCAL and b.width == group[0].width for b in results)
    )


def _join(
    i: Instruction, group: Sequence[Instruction], instructions: list[Instruction]
) -> None:
    """Let `i` do what the group does, whose other instructions go."""
    first, width = group[0], i.width * len(group)
    if len({j.result.buffer for j in group}) > 1:
        joined = Buffer(Place.LOCAL, i.rows, width)
        offsets = {j.result.buffer: k * i.width for k, j in enumerate(group)}
        for reader in instructions:
            reader.operands = tuple(
                View(joined, view.offset + offsets[view.buffer], view.strides)
                if view.buffer in offsets
                else view
                for view in reader.operands
            )
        result = View(joined, 0, i.result.strides)
    else:
        result = first.result
    i.result, i.operands, i.width = result, first.operands, width
    for j in group:
        if j is not i:
            instructions.remove(j)
