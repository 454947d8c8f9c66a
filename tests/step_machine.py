"""A machine in numpy that runs step programs, each buffer in memory of its own."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import special

from ostinato._step.programs.program import (
    PRODUCT,
    TRANSPOSE,
    Buffer,
    Instruction,
    Phase,
    Place,
    View,
)

_GIVEN = (Place.INVARIANT, Place.INPUT, Place.STATE)
_FUNCTIONS: dict[str, Callable] = {
    "copy": lambda a: a,
    "negate": np.negative,
    "sigmoid": special.expit,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "is_finite": lambda a: np.isfinite(a) * 1.0,
    "erf": special.erf,
    "erfc": special.erfc,
    "max": np.maximum,
    "min": np.minimum,
    "equal": lambda a, b: (a == b) * 1.0,
    "less": lambda a, b: (a < b) * 1.0,
    "less_equal": lambda a, b: (a <= b) * 1.0,
    "remainder": np.fmod,
    "multiply_add": lambda a, b, c: a * b + c,
    "multiply_subtract": lambda a, b, c: c - a * b,
    "select": lambda a, b, c: np.where(a != 0, b, c),
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "atan2": np.arctan2,
}


class Machine:
    """Runs instructions on one step of some sequences.

    Args:
        batch: the number of sequences.
        arrays: which array of the loop each buffer is, as of the given ones; numbers
            are drawn by these.
    """

    def __init__(self, batch: int, arrays: dict[Buffer, int]) -> None:
        self.batch, self.arrays = batch, arrays
        self.memory: dict[Buffer, np.ndarray] = {}

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Run instructions by phase, and in a phase in their order."""
        instructions = list(instructions)
        with np.errstate(all="ignore"):
            for phase in Phase:
                for i in instructions:
                    if i.phase is phase:
                        self._run(i)

    def of(self, buffer: Buffer) -> np.ndarray:
        """Return the elements of a buffer, `[sequences or 1, elements]`."""
        if buffer not in self.memory:
            if buffer.state is not None and buffer.state.in_place:
                self.memory[buffer] = self.of(buffer.state)
                return self.memory[buffer]
            rows = self.batch if buffer.rows else 1
            self.memory[buffer] = self._first(buffer, rows).reshape(rows, -1)
        return self.memory[buffer]

    def _first(self, buffer: Buffer, rows: int) -> np.ndarray:
        """Return what a buffer has before the step: NaN where nobody has written."""
        count = rows * buffer.width
        if buffer.place is Place.CONSTANT:
            return np.array(buffer.numbers)
        if buffer.place in _GIVEN:
            rng = np.random.default_rng([buffer.place, self.arrays[buffer]])
            return rng.uniform(-1.2, 1.2, count)
        return np.zeros(count) if buffer.place is Place.SUM else np.full(count, np.nan)

    def _at(self, view: View, inner: int, width: int) -> tuple[Any, np.ndarray]:
        """Return the place of a view: all sequences, and elements `[inner, width]`."""
        apart, step = view.strides
        elements = np.arange(inner)[:, None] * apart + np.arange(width) * step
        return slice(None), view.offset + elements

    def _read(self, view: View, inner: int, width: int) -> np.ndarray:
        return self.of(view.buffer)[self._at(view, inner, width)]

    def _run(self, i: Instruction) -> None:
        if i.weight is not None:
            return self._multiply(i)
        if i.operation == TRANSPOSE:
            rows = self._read(i.operands[0], i.width, i.inner)
            place = self._at(i.result, i.inner, i.width)
            self.of(i.result.buffer)[place] = np.swapaxes(rows, 1, 2)
            return None
        given = [self._read(v, i.inner, i.width) for v in i.operands]
        if i.operation in ("take_row", "set_row", "add_row"):
            return self._at_row(i, *given)
        if not i.operation.startswith(("row_", "column_")):
            function = _FUNCTIONS.get(i.operation) or getattr(np, i.operation)
            place = self._at(i.result, i.inner, i.width)
            self.of(i.result.buffer)[place] = function(*given)
            return None
        terms = given[0] * given[1] if len(given) == 2 else given[0]
        axis = 2 if i.operation.startswith("row") else 1
        most = i.operation.endswith("max")
        found = (
            terms.max(axis, keepdims=True) if most else terms.sum(axis, keepdims=True)
        )
        place = self._at(i.result, *found.shape[1:])
        result = self.of(i.result.buffer)
        if i.result.buffer.place is Place.SUM:
            rows = found.sum(0, keepdims=True) if not i.result.buffer.rows else found
            result[place] += rows
        else:
            result[place] = found
        return None

    def _at_row(self, i: Instruction, given: np.ndarray, index: np.ndarray) -> None:
        rows = np.arange(i.inner)[None, :, None] == index[:, :1, :1]
        if i.operation == "take_row":
            found = np.where(rows, given, 0).sum(1, keepdims=True)
            self.of(i.result.buffer)[self._at(i.result, 1, i.width)] = found
            return
        place = self._at(i.result, i.inner, i.width)
        if i.result.buffer.place is Place.SUM:
            added = np.where(rows, given, 0).sum(0, keepdims=True)
            self.of(i.result.buffer)[place] += added
            return
        old = self.of(i.result.buffer)[place]
        new = given if i.operation == "set_row" else old + given
        self.of(i.result.buffer)[place] = np.where(rows, new, old)

    def _multiply(self, i: Instruction) -> None:
        assert i.operation == PRODUCT and i.weight is not None
        w = i.weight
        depth, columns = np.arange(w.depth)[:, None], np.arange(w.columns)
        turned = columns * w.stride + depth
        at = w.offset + (turned if w.transposed else depth * w.stride + columns)
        found = (
            self._read(i.operands[0], i.inner, w.depth) @ self.of(w.buffer).ravel()[at]
        )
        for vector in i.operands[1:]:
            found = found + self._read(vector, 1, i.width)
        if i.continues:
            found = found + self._read(i.result, i.inner, i.width)
        self.of(i.result.buffer)[self._at(i.result, i.inner, i.width)] = found
