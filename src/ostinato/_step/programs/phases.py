"""What the native loop runs for a chunk of steps at once, for one sequence.

Steps that follow one another are then rows of one instruction, which takes much less
time than an instruction for every step, and the threads share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .program import ELEMENTWISE, PRODUCT, Buffer, Instruction, Phase, Place

_GIVEN = frozenset({Place.CONSTANT, Place.INVARIANT, Place.INPUT})
_SUMS = frozenset({"column_sum", "column_sum_product"})
_BY_ROWS = ELEMENTWISE | {"row_sum", "row_sum_product", "row_max"}


def run_by_chunk(instructions: Sequence[Instruction]) -> None:
    """Let all run ahead of the steps that needs no state, and after what none reads."""
    _run_ahead(instructions)
    _run_after(instructions)
    for i in instructions:
        if i.phase is not Phase.STEP:
            for view in (i.result, *i.operands):
                if view.buffer.place is Place.LOCAL:
                    view.buffer.place = Place.CHUNK


def _run_ahead(instructions: Sequence[Instruction]) -> None:
    """Choose the most instructions that need only what is given, and each other."""
    chosen = {i for i in instructions if i.phase is Phase.STEP and _by_rows(i)}
    chosen = {i for i in chosen if i.result.buffer.place is not Place.SUM}
    writers = _by_buffer((i.result.buffer, i) for i in instructions)

    def is_ready(buffer: Buffer) -> bool:
        if buffer.place in _GIVEN or buffer not in writers:
            return buffer.place in _GIVEN
        return all(i in chosen or i.phase is Phase.AHEAD for i in writers[buffer])

    def may(i: Instruction) -> bool:
        return all(is_ready(view.buffer) for view in (i.result, *i.operands))

    _reduce(chosen, may)
    for i in chosen:
        i.phase = Phase.AHEAD


def _run_after(instructions: Sequence[Instruction]) -> None:
    """Choose the most instructions that only each other and the results need."""
    chosen = {i for i in instructions if i.phase is Phase.STEP and _by_rows(i)}
    writers = _by_buffer((i.result.buffer, i) for i in instructions)
    readers = _by_buffer((v.buffer, i) for i in instructions for v in i.operands)

    def may(i: Instruction) -> bool:
        to = i.result.buffer
        users = [*readers.get(to, ()), *([] if to.place is Place.SUM else writers[to])]
        return all(u in chosen or u.phase is Phase.AFTER for u in users) and not any(
            view.buffer.place in (Place.STATE, Place.NEXT) for view in i.operands
        )

    _reduce(chosen, may)
    for i in chosen:
        i.phase = Phase.AFTER


def _reduce(chosen: set[Instruction], may: Callable[[Instruction], bool]) -> None:
    """Take out what may not be chosen, until all may."""
    while refused := {i for i in chosen if not may(i)}:
        chosen -= refused


def _by_rows(i: Instruction) -> bool:
    """Return whether steps can be rows of an instruction."""
    place = i.result.buffer.place
    if i.inner != 1 or place is Place.NEXT:
        return False
    if i.operation == PRODUCT:
        return not i.continues and place in (Place.LOCAL, Place.CHUNK)
    if place is Place.SUM:
        return i.operation in _SUMS and not i.result.buffer.rows
    return i.operation in _BY_ROWS


def _by_buffer(
    pairs: Iterable[tuple[Buffer, Instruction]],
) -> dict[Buffer, list[Instruction]]:
    found: dict[Buffer, list[Instruction]] = {}
    for buffer, i in pairs:
        found.setdefault(buffer, []).append(i)
    return found
