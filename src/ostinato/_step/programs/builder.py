"""Instructions for operations on values, as they are added to a program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from . import values as shapes
from .program import (
    PRODUCT,
    TRANSPOSE,
    Buffer,
    Instruction,
    Phase,
    Place,
    View,
    Weight,
    padded,
)
from .values import (
    Merged,
    Unsupported,
    UnusualOrder,
    Value,
    full_shape,
    merge_axes,
    row_major,
)

_MOST_COPIES = 64
"""An operation on values of many axes is several instructions, so many at most."""
_EXACT = frozenset({"copy", "negate", "abs", "max", "min", "select"})
"""Operations whose results have no more digits than what they are given."""
LINEAR = frozenset({"copy", "negate", "add", "subtract", "multiply", "divide"})


class Window(NamedTuple):
    """What an array has that is 0 elsewhere.

    Attributes:
        shape: of the array.
        at: where the window begins, a number.
        row: the window, once for each place that it may have.
        along: the axis of the array that `at` counts.
    """

    shape: tuple[int, ...]
    at: Value
    row: Value
    along: int


class Builder:
    """A list of instructions, and buffers for their results.

    Attributes:
        batch: the number of sequences.
        steps: the number of steps.
        instructions: the instructions so far.
        joined: values that others were joined to, by these, the axis and the shape.
        narrowed: what a step rounds to bfloat16, and a program does not.
        known: results by what they are of, so that nothing is computed twice.
        placed: arrays that are 0 but for the sum of these windows.
        added: those whose sum over sequences is meant.
        unwritten: those of the latter that no instruction writes.
    """

    def __init__(self, batch: int, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.instructions: list[Instruction] = []
        self.joined: dict[object, Value] = {}
        self.narrowed: set[Buffer] = set()
        self.known: dict[object, Buffer] = {}
        self.placed: dict[Buffer, tuple[Window, ...]] = {}
        self.added: dict[Buffer, tuple[Window, ...]] = {}
        self.unwritten: set[Buffer] = set()
        self._computed: dict[Buffer, tuple[str, Value, tuple[Value, ...]]] = {}
        self._turned: dict[Value, Value] = {}
        self._constants: dict[bytes, Buffer] = {}
        self._with_rows: dict[Buffer, Buffer] = {}

    def constant(self, *numbers: float) -> Value:
        """Return one number, or a vector of several."""
        key = np.array(numbers, np.float64).tobytes()  # 0 and -0 are two constants
        if key not in self._constants:
            self._constants[key] = Buffer(
                Place.CONSTANT, False, len(numbers), numbers=numbers
            )
        shape = () if len(numbers) == 1 else (len(numbers),)
        strides = row_major(shape)
        return Value(self._constants[key], 0, shape, strides, None)

    def constants_along(self, numbers: Iterable[int], axis: int, rank: int) -> Value:
        """Return numbers along an axis of an array of `rank` axes, of size 1 else."""
        value = self.constant(*map(float, numbers))
        count = value.buffer.width
        ones = [1] * rank
        ones[axis] = count
        row = value._replace(shape=(count,), strides=(int(count > 1),))
        return shapes.broadcast(row, ones, (axis,), self.batch)

    def local(self, shape: Sequence[int], axis: int | None) -> Value:
        """Return a new contiguous value that instructions are to write."""
        shape = tuple(shape)
        buffer = Buffer(Place.LOCAL, axis is not None, math.prod(shape))
        return Value(buffer, 0, shape, row_major(shape), axis)

    # ------------------------------------------------------------ element by element

    def elementwise(self, operation: str, *values: Value) -> Value:
        """Return the result of an operation on values of equal shape, or on numbers.

        Its axes are in memory as operands have rows; a copy has its own in order.
        """
        values, axis = self.align(values)
        if any(v.summed for v in values):
            return self._of_sums(operation, values)
        shape = values[0].shape
        values = tuple(map(self._along_rows, values))
        order = [*range(len(shape))]
        if operation != "copy":
            order = shapes.order_of_rows(values)
        key = (operation, shape, axis, values)
        if key not in self.known:
            turned = [shapes.permuted(v, order) for v in values]
            self.known[key] = self.compute(operation, axis, *turned).buffer
        steps = dict(zip(order, row_major([shape[i] for i in order]), strict=True))
        strides = tuple(steps[i] for i in range(len(shape)))
        return Value(self.known[key], 0, shape, strides, axis)

    def compute(self, operation: str, axis: int | None, *values: Value) -> Value:
        """Return a new value of an operation on values of equal shape.

        Args:
            operation: element by element.
            axis: where the result has sequences.
            values: with their axis of sequences in one place, or without one.
        """
        result = self.local(values[0].shape, axis)
        self.write(operation, result, *values)
        self._computed[result.buffer] = operation, result, values
        return result

    def align(self, values: Sequence[Value]) -> tuple[tuple[Value, ...], int | None]:
        """Return values of one shape, and which axis is that of sequences.

        Numbers, and axes of size 1, become as large as those of the others.
        """
        values = self.of_one_axis(values)
        axes = {v.axis for v in values if v.axis is not None}
        if len(axes) > 1:
            raise Unsupported("it combines different sequences")
        axis = next(iter(axes), None)
        if axis is not None:
            values = [self.as_rows(v, axis) for v in values]
        rank = max(len(v.shape) for v in values)
        shapes = [v.shape for v in values if len(v.shape) == rank]
        shape = tuple(
            next((n for n in sizes if n != 1), 1) for sizes in zip(*shapes, strict=True)
        )
        return tuple(_widened(v, shape) for v in values), axis

    def of_one_axis(
        self, values: Sequence[Value], but: Sequence[int] = ()
    ) -> Sequence[Value]:
        """Return values of one sequence with their axis of sequences at one place.

        Any axis of size 1 can be that of the only sequence, and a sum over sequences is
        the value itself.

        Args:
            values: of one rank, or numbers.
            but: axes that stay as they are.
        """
        if self.batch != 1:
            return values
        full = [full_shape(v, 1) for v in values if v.axis is not None or v.summed]
        found = [v.axis for v in values if v.axis is not None and v.axis not in but]
        found += [i for i in range(min(map(len, full), default=0)) if i not in but]
        for axis in found:
            if all(len(s) > axis and s[axis] == 1 for s in full):
                return [self._only_sequence(v, axis) for v in values]
        return values

    def _only_sequence(self, value: Value, axis: int) -> Value:
        if value.axis == axis or (value.axis is None and not value.summed):
            return value
        shape, strides = full_shape(value, 1), list(value.strides)
        if value.axis is not None:
            strides.insert(value.axis, 0)
        return value._replace(
            shape=shape[:axis] + shape[axis + 1 :],
            strides=tuple(strides[:axis] + strides[axis + 1 :]),
            axis=axis,
            summed=False,
        )

    def as_rows(self, value: Value, axis: int) -> Value:
        """Return a value without the axis at which others have sequences."""
        if value.axis is not None or not value.shape or value.summed:
            return value
        if value.shape[axis] == 1 or value.strides[axis] == 0:
            shape = value.shape[:axis] + value.shape[axis + 1 :]
            strides = value.strides[:axis] + value.strides[axis + 1 :]
            return value._replace(shape=shape, strides=strides)
        return self.rows_of(value, axis)

    def rows_of(self, value: Value, axis: int) -> Value:
        """Return an operand that is the same at every step, row by row."""
        buffer, batch = value.buffer, value.shape[axis]
        width = buffer.width // batch
        is_row = value.strides[axis] == width and value.offset < width
        if buffer.place is not Place.INVARIANT or not is_row:
            raise Unsupported("it combines different sequences")
        if buffer not in self._with_rows:
            self._with_rows[buffer] = Buffer(Place.INVARIANT, True, width, buffer.array)
        return value._replace(
            buffer=self._with_rows[buffer],
            shape=value.shape[:axis] + value.shape[axis + 1 :],
            strides=value.strides[:axis] + value.strides[axis + 1 :],
            axis=axis,
        )

    def _of_sums(self, operation: str, values: Sequence[Value]) -> Value:
        """Return an operation on sums over sequences, as a sum of an operation."""
        sums = [v for v in values if v.summed]
        others = [v for v in values if not v.summed]
        linear = operation in LINEAR and (
            not others if operation != "multiply" else len(sums) == 1
        )
        if operation == "divide":
            linear = len(sums) == 1 and values[0].summed
        if not (linear or self.batch == 1) or any(v.axis is not None for v in others):
            raise Unsupported("it combines different sequences")
        # The axis of sequences comes first in what is summed.
        shape = sums[0].shape
        given = [v._replace(axis=0 if v.summed else None, summed=False) for v in values]
        ones = [
            v
            if v.axis == 0
            else v._replace(shape=(1, *v.shape), strides=(0, *v.strides))
            for v in given
        ]
        result = self.elementwise(operation, *ones)
        return result._replace(axis=None, summed=True, shape=shape)

    def write(self, operation: str, result: Value, *values: Value) -> None:
        """Add instructions that write the elements of a value."""
        values = tuple(map(self._along_rows, values))
        if operation in _EXACT and any(v.buffer in self.narrowed for v in values):
            self.narrowed.add(result.buffer)
        if shapes.has_rows(result):
            if operation == "copy" and (turned := shapes.crossing(result, *values)):
                return self.emit(TRANSPOSE, turned, result, values)
            values = tuple(map(self._in_rows, values))
        strides = [v.strides for v in (result, *values)]
        merged = merge_axes(result.shape, strides)
        if any(s and s[-1] not in (0, 1) for s in merged.strides):
            merged = Merged((*merged.shape, 1), [(*s, 0) for s in merged.strides])
        self.emit(operation, merged, result, values)

    def _along_rows(self, value: Value) -> Value:
        """Return a transposed value as one that was written in that order.

        That is possible if it was computed element by element of what has no order,
        such as the factors of an outer product. Any other value stays what it is.
        """
        if value not in self._turned:
            self._turned[value] = self._written_along_rows(value) or value
        return self._turned[value]

    def _in_rows(self, value: Value) -> Value:
        """Return a value in rows; one that only single elements can copy stays.

        An operation on columns would be one for each of them.
        """
        if shapes.has_rows(value):
            return value
        sizes = [n if s else 1 for n, s in zip(value.shape, value.strides, strict=True)]
        once = value._replace(shape=tuple(sizes))
        repeats = once.size < value.size
        if not (repeats or shapes.crossing(self.local(sizes, None), once)):
            return value
        copy = self.elementwise("copy", once)
        steps = [s if n > 1 else 0 for n, s in zip(sizes, copy.strides, strict=True)]
        return copy._replace(shape=value.shape, strides=tuple(steps))

    def _written_along_rows(self, value: Value) -> Value | None:
        if shapes.has_rows(value) or value.buffer not in self._computed:
            return None
        operation, result, values = self._computed[value.buffer]
        order = shapes.permutation(result, value)
        if order is None:
            return None
        turned = []
        for given in values:
            turned.append(self._along_rows(shapes.permuted(given, order)))
            if not shapes.has_rows(turned[-1]):
                return None
        again = self.compute(operation, result.axis, *turned)
        if value.buffer in self.narrowed:
            self.narrowed.add(again.buffer)
        return value._replace(buffer=again.buffer, strides=again.strides)

    # -------------------------------------------------------------------- reductions

    def reduce(self, operation: str, value: Value, axes: Sequence[int]) -> Value:
        """Return `"sum"` or `"max"` of a value over some of `value.shape`'s axes.

        The axis of sequences of the result is that of the value.
        """
        kept = [i for i in range(len(value.shape)) if i not in axes]
        if all(value.shape[i] == 1 for i in axes):
            return value._replace(
                shape=tuple(value.shape[i] for i in kept),
                strides=tuple(value.strides[i] for i in kept),
            )
        order = [*kept, *axes]
        value = value._replace(
            shape=tuple(value.shape[i] for i in order),
            strides=tuple(value.strides[i] for i in order),
        )
        return self.contract(operation, (value,), len(kept), value.axis)

    def contract(
        self, operation: str, values: Sequence[Value], kept: int, axis: int | None
    ) -> Value:
        """Return sums of products of values, or sums or maxima of one.

        Args:
            operation: `"sum"`, `"sum_product"` or `"max"`.
            values: of equal shape, but for the axis of sequences.
            kept: how many axes the result has; it reduces over those that follow.
            axis: where the result has sequences.
        """
        shape = values[0].shape
        if operation == "max" and 0 in shape[kept:]:
            raise Unsupported("it takes a maximum of nothing")
        key = (operation, tuple(values), kept)
        result = self.local(shape[:kept], axis)
        if key not in self.known:
            self.known[key] = result.buffer
            if operation == "max" and values[0].buffer in self.narrowed:
                self.narrowed.add(result.buffer)
            try:
                self._write_reduction(operation, result, values)
            except UnusualOrder:
                values = [
                    v if v.is_contiguous() else self.in_order(v, axis) for v in values
                ]
                self._write_reduction(operation, result, values)
        return result._replace(buffer=self.known[key])

    def in_order(self, value: Value, axis: int | None) -> Value:
        """Return a copy whose elements follow one another, with sequences at `axis`."""
        rows = None if value.axis is None and not value.buffer.rows else axis
        copy = self.local(value.shape, rows)
        self.write("copy", copy, value)
        return copy

    def sum_rows(self, value: Value, target: Value) -> None:
        """Add the sum of a value over all sequences to a result.

        The elements of a sequence are next to each other, or all the same.
        """
        merged = merge_axes(value.shape, [value.strides])
        step = merged.strides[0][0] if merged.shape else 1
        result = View(target.buffer, target.offset, (0, 1))
        given = View(value.buffer, value.offset, (0, step))
        self.instructions.append(
            Instruction("column_sum", True, 1, target.size, result, (given,))
        )

    def _write_reduction(
        self, operation: str, result: Value, values: Sequence[Value]
    ) -> None:
        shape, kept = values[0].shape, len(result.shape)
        outer = merge_axes(
            shape[:kept], [result.strides, *(v.strides[:kept] for v in values)]
        )
        over = merge_axes(
            shape[kept:],
            [(0,) * (len(shape) - kept), *(v.strides[kept:] for v in values)],
        )
        if len(over.shape) > 1:
            raise UnusualOrder("it sums over axes that are apart")
        over = over if over.shape else Merged((1,), [(0,)] * (1 + len(values)))
        if all(s[0] in (0, 1) for s in over.strides):  # along rows
            name, first, last = f"row_{operation}", outer, over
        else:  # over rows whose elements are the last axis of the result
            width = outer if outer.shape else Merged((1,), [(0,)] * (1 + len(values)))
            split = len(width.shape) - 1
            if any(s[-1] not in (0, 1) for s in width.strides):
                raise UnusualOrder("it sums over axes of an unusual order")
            name = f"column_{operation}"
            first = Merged(
                (*width.shape[:split], *over.shape),
                [
                    (*a[:split], *b)
                    for a, b in zip(width.strides, over.strides, strict=True)
                ],
            )
            last = Merged(width.shape[split:], [a[split:] for a in width.strides])
        strides = [(*a, *b) for a, b in zip(first.strides, last.strides, strict=True)]
        self.emit(name, Merged((*first.shape, *last.shape), strides), result, values)

    def emit(
        self, operation: str, merged: Merged, result: Value, values: Sequence[Value]
    ) -> None:
        """Add an instruction, or one for every index of axes that are too many."""
        if any(v.summed for v in values):  # instructions see one sequence
            raise Unsupported("it combines different sequences")
        shape = (1, 1, *merged.shape)[-max(2, len(merged.shape)) :]
        strides = [(0, 0, *s)[-len(shape) :] for s in merged.strides]
        outer = shape[:-2]
        if math.prod(outer) > _MOST_COPIES:
            raise Unsupported("it has values of too many axes")
        for index in itertools.product(*map(range, outer)):
            views = [
                View(
                    v.buffer,
                    v.offset + sum(i * k for i, k in zip(index, s, strict=False)),
                    s[-2:],
                )
                for v, s in zip((result, *values), strides, strict=True)
            ]
            self.instructions.append(
                Instruction(
                    operation,
                    result.axis is not None,
                    shape[-2],
                    shape[-1],
                    views[0],
                    tuple(views[1:]),
                )
            )

    # ---------------------------------------------------------------------- products

    def product(
        self, value: Value, free: Sequence[int], over: int, weight: Weight
    ) -> Value:
        """Return the product of a value and a matrix, `[*free, columns]`.

        Args:
            value: the factor that changes.
            free: its axes that the result has.
            over: its axis that is added up.
            weight: the matrix.
        """
        if weight.depth == 0 or weight.columns == 0:
            raise Unsupported("it has an empty product")
        sizes = tuple(value.shape[i] for i in free)
        strides = tuple(value.strides[i] for i in free)
        merged = merge_axes(sizes, [strides])
        steps_evenly = value.shape[over] == 1 or value.strides[over] == 1
        if len(merged.shape) > 1 or not steps_evenly:
            order = [*free, over]
            ordered = value._replace(
                shape=tuple(value.shape[i] for i in order),
                strides=tuple(value.strides[i] for i in order),
                axis=None if value.axis is None else 0,
            )
            value = self.elementwise("copy", ordered)
            merged = merge_axes(sizes, [value.strides[:-1]])
        key = (PRODUCT, value, weight)
        row = padded(weight.columns)
        inner = merged.shape[0] if merged.shape else 1
        if key not in self.known:
            ahead = inner == 1 and value.buffer.place is Place.INPUT
            place = Place.CHUNK if ahead else Place.LOCAL
            buffer = Buffer(place, value.axis is not None, inner * row)
            step = merged.strides[0][0] if merged.shape else 0
            self.instructions.append(
                Instruction(
                    PRODUCT,
                    value.axis is not None,
                    inner,
                    weight.columns,
                    View(buffer, 0, (row if inner > 1 else 0, 1)),
                    (View(value.buffer, value.offset, (step, 1)),),
                    weight,
                    phase=Phase.AHEAD if ahead else Phase.STEP,
                )
            )
            self.known[key] = buffer
        shape = (*sizes, weight.columns)
        free_strides = tuple(s * row for s in row_major(sizes))
        axis = None if value.axis is None else 0
        return Value(self.known[key], 0, shape, (*free_strides, 1), axis)


def _widened(value: Value, shape: tuple[int, ...]) -> Value:
    if value.shape == shape:
        return value
    sizes = value.shape or (1,) * len(shape)
    strides = value.strides or (0,) * len(shape)
    strides = tuple(0 if n == 1 else s for n, s in zip(sizes, strides, strict=True))
    return value._replace(shape=shape, strides=strides)
