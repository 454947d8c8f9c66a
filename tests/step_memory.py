"""Check of step programs: each reads only what it has written for the same value.

The native loop checks that programs stay inside of their memory, not that somebody
wrote what they read: there, an element that nobody wrote has an old number.
"""

import numpy as np

from ostinato._step.programs import lower, program
from ostinato._step.programs.program import PRODUCT, Phase, Place

_OWN = (Place.LOCAL, Place.CHUNK)


def watch() -> None:
    """Check all programs that are encoded from now on."""
    encode = lower.encode

    def checked(instructions, gradients, also):
        found = faults(instructions, gradients, also)
        assert not found, "\n".join(found)
        return encode(instructions, gradients, also)

    lower.encode = checked


def faults(instructions, gradients, also) -> list[str]:
    """Return reads of elements that hold no value, or one of another buffer.

    Results that are not written in all elements are faults, too.
    """
    memory = _Memory(program._allocate(instructions).offsets)
    found = []
    for phase in Phase:
        for i in (i for i in instructions if i.phase is phase):
            for view in (i.result, *i.operands):
                last = _read(i, view).max(initial=-1)
                if last >= program.padded(view.buffer.width) or last < -1:
                    found.append(f"{i.operation} leaves the buffer of {view}")
            for view in _reads(i):
                if not memory.holds(view.buffer, _read(i, view)):
                    found.append(f"{i.operation} reads what nobody wrote in {view}")
            memory.write(i.result.buffer, _written(i))
    for factor in (factor for g in gradients for factor in (g.a, g.b)):
        elements = factor.offset + np.arange(factor.width)
        if not memory.holds(factor.buffer, elements):
            found.append(f"a gradient reads what nobody wrote in {factor}")
    written: dict = {}
    for i in instructions:
        written.setdefault(i.result.buffer, set()).update(_written(i).tolist())
    for buffer in (b for b in also if b.place in (Place.OUTPUT, Place.NEXT)):
        if not written.get(buffer, set()).issuperset(range(buffer.width)):
            found.append(f"nobody writes all of {buffer}")
    return found


class _Memory:
    """Which buffer each element of the memory was last written for."""

    def __init__(self, offsets):
        self.offsets, self.owners = offsets, {}

    def write(self, buffer, elements):
        if buffer.place in _OWN:
            self.owners |= dict.fromkeys(self._places(buffer, elements), buffer)

    def holds(self, buffer, elements):
        return buffer.place not in _OWN or all(
            self.owners.get(place) is buffer for place in self._places(buffer, elements)
        )

    def _places(self, buffer, elements):
        if buffer.place is Place.CHUNK:
            return [(buffer, n) for n in elements.tolist()]
        return [(buffer.rows, self.offsets[buffer] + n) for n in elements.tolist()]


def _reads(i):
    yield from i.operands
    if i.continues:
        yield i.result


def _read(i, view):
    product = i.operation == PRODUCT and view is i.operands[0]
    return _elements(view, i.inner, i.weight.depth if product else i.width)


def _written(i):
    """Return the elements that an instruction writes: of sums, not all of its axes."""
    inner = 1 if i.operation.startswith("column_") else i.inner
    width = 1 if i.operation.startswith("row_") else i.width
    if i.operation == PRODUCT:
        width = program.padded(width)
    return _elements(i.result, inner, width)


def _elements(view, inner, width):
    rows = view.offset + view.strides[0] * np.arange(inner)[:, None]
    return np.unique(rows + view.strides[1] * np.arange(width))
