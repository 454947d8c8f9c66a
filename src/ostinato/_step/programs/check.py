"""A check of step programs: every element that is read has been written before.

The native loop trusts a program. It reads memory that instructions share, so that a
mistake in an instruction would go unnoticed, and change numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from .program import (
    ELEMENTWISE,
    PRODUCT,
    TRANSPOSE,
    WRITES_ROW,
    Buffer,
    Gradient,
    Instruction,
    Phase,
    Place,
    View,
    padded,
)
from .values import Unsupported

_GIVEN = frozenset(
    {Place.CONSTANT, Place.INVARIANT, Place.INPUT, Place.STATE, Place.SUM}
)
_RESULTS = frozenset({Place.OUTPUT, Place.NEXT})
_EACH_ONCE = ELEMENTWISE | {PRODUCT, TRANSPOSE}
"""They write as many elements as their axes have."""
_WITHIN_A_STEP = frozenset({Place.LOCAL, Place.STATE, Place.NEXT})


def check(
    instructions: Sequence[Instruction],
    gradients: Iterable[Gradient],
    also: Iterable[Buffer],
    offsets: Mapping[Buffer, int],
) -> None:
    """Check a program; sets of elements are integers, with a bit for each element.

    Args:
        instructions: in their order.
        gradients: of matrices; they read their factors after all instructions.
        also: buffers that no instruction may name; of them results must be written.
        offsets: the places of local buffers, which may share elements.

    Raises:
        Unsupported: the program is at fault. A warning says so as well, since XLA runs
            the step then.
    """
    memory = _Memory(offsets, [b for b in also if b.state and b.state.in_place])
    try:
        for phase in Phase:
            for i in instructions:
                if i.phase is phase:
                    memory.run(i)
        for gradient in gradients:
            for f in (gradient.a, gradient.b):
                memory.read(View(f.buffer, f.offset, (0, 1)), (1, f.width), True)
        for buffer in also:
            if buffer.place in _RESULTS:
                memory.read(View(buffer, 0, (0, 1)), (1, buffer.width), buffer.rows)
    except _Fault as fault:
        warnings.warn(
            f"ostinato made a faulty program of a step: {fault}. XLA runs the step "
            "instead, with right results; please report this.",
            RuntimeWarning,
            stacklevel=2,
        )
        raise Unsupported(f"its program is at fault: {fault}") from None


class _Fault(Exception):
    """What is wrong with a program."""


class _Memory:
    def __init__(
        self, offsets: Mapping[Buffer, int], in_place: Iterable[Buffer]
    ) -> None:
        self.written = {b: (1 << b.width) - 1 for b in in_place}
        self.gone: set[Buffer | None] = set()
        self.offsets = offsets

    def run(self, i: Instruction) -> None:
        """Read and write what an instruction does."""
        if i.phase is not Phase.STEP:
            for view in (i.result, *i.operands):
                if view.buffer.place in _WITHIN_A_STEP:
                    raise _Fault("a chunk of steps needs what one step has")
        axes = i.inner, i.width
        if i.weight is not None:
            self.read(i.operands[0], (i.inner, i.weight.depth), i.rows)
            for vector in i.operands[1:]:
                self.read(vector, (1, i.width), False)
            if i.continues:
                self.read(i.result, axes, i.rows)
        else:
            read = (i.width, i.inner) if i.operation == TRANSPOSE else axes
            for view in i.operands:
                self.read(view, read, i.rows)
            if i.operation in WRITES_ROW:
                self.read(i.result, axes, i.rows)
        self._overwrite(i)
        self._write(i, _written_axes(i))

    def read(self, view: View, axes: tuple[int, int], rows: bool) -> None:
        """Check that elements have been written."""
        buffer = view.buffer
        _check_range(view, axes)
        if buffer.rows and not rows:
            raise _Fault("what all sequences share needs what each has")
        if buffer in self.gone:
            raise _Fault("it reads a state that the next one is written over")
        if buffer.place in _GIVEN:
            return
        if _elements(view, axes) & ~self.written.get(buffer, 0):
            raise _Fault(f"it reads a {buffer.place.name} before it is written")

    def _overwrite(self, i: Instruction) -> None:
        """Forget the buffers whose elements an instruction writes over."""
        target = i.result.buffer
        if target.place is not Place.LOCAL:
            return
        begin = self.offsets[target]
        end = begin + padded(target.width)
        for other in list(self.written):
            start = self.offsets.get(other, -1)
            if (
                other is target
                or start < 0
                or other.rows != target.rows
                or not (start < end and begin < start + other.width)
            ):
                continue
            read = [view for view in i.operands if view.buffer is other]
            in_place = (
                start == begin
                and other.width == target.width
                and all(view[1:] == i.result[1:] for view in read)
            )
            if read and not (in_place and i.operation in ELEMENTWISE):
                raise _Fault("it writes over what it reads")
            del self.written[other]

    def _write(self, i: Instruction, axes: tuple[int, int]) -> None:
        view, buffer = i.result, i.result.buffer
        _check_range(view, axes)
        if i.rows != buffer.rows and buffer.place is not Place.SUM:
            raise _Fault("each sequence writes what all share, or the reverse")
        if buffer.place is Place.SUM:
            return
        if buffer.place in _GIVEN:
            raise _Fault(f"it writes a {buffer.place.name}")
        if buffer.state is not None and buffer.state.in_place:
            self.gone.add(buffer.state)
        elements, touched = _elements(view, axes), 0
        if i.operation in _EACH_ONCE:
            if elements.bit_count() != i.inner * i.width:
                raise _Fault("it writes elements twice")
        if i.operation == PRODUCT and i.phase is Phase.STEP:  # whole vectors
            vectors = i.inner, padded(i.width)
            _check_range(view, vectors)
            touched = _elements(view, vectors)
        self.written[buffer] = self.written.get(buffer, 0) & ~touched | elements


def _written_axes(i: Instruction) -> tuple[int, int]:
    """Return the axes of a result: a sum over nothing writes one element, too."""
    if i.operation.startswith("row_"):
        return i.inner, 1
    return (1 if i.operation.startswith("column_") else i.inner), i.width


def _check_range(view: View, axes: tuple[int, int]) -> None:
    """Check that a view stays in its buffer."""
    (inner, width), (apart, step) = axes, view.strides
    if step not in (0, 1):
        raise _Fault(f"strides are {view.strides}")
    if not inner or not width:
        return
    first, last = sorted((view.offset, view.offset + (inner - 1) * apart))
    if first < 0 or last + (width - 1) * step >= view.buffer.width:
        raise _Fault(f"it goes past the end of a {view.buffer.place.name}")


def _elements(view: View, axes: tuple[int, int]) -> int:
    """Return the elements of a view as bits."""
    # Sizes may come from numpy, whose integers have 64 bits.
    inner, width, offset, apart, step = map(int, (*axes, view.offset, *view.strides))
    if not inner or not width:
        return 0
    found, count = (1 << width) - 1 if step else 1, 1
    while apart and count < inner:
        more = min(count, inner - count)
        found |= found << more * abs(apart)
        count += more
    return found << offset + min(0, (inner - 1) * apart)
