"""Step programs: what the native loop runs at each step, as lists of instructions.

native/cpu/step/program.h has the same structures and says what they mean.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPERATIONS = tuple(
    "copy negate abs tanh sigmoid exp expm1 log log1p sqrt rsqrt floor round sign "
    "is_finite sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc cbrt "
    "add subtract multiply divide max min equal less less_equal power atan2 remainder "
    "multiply_add multiply_subtract select transpose row_sum row_sum_product row_max "
    "column_sum column_sum_product column_max take_row set_row add_row".split()
)
"""The order of `OSTINATO_STEP_OPERATIONS` in native/cpu/kernels/step_kernels.h."""
TRANSPOSE = "transpose"
ELEMENTWISE = frozenset(OPERATIONS[: OPERATIONS.index(TRANSPOSE)])
WRITES_ROW = frozenset({"set_row", "add_row"})
"""They change one row of their result, and leave all else in it."""
PRODUCT = "product"
_VECTOR = 16
"""Results of products have rows of a multiple of this many elements."""


class Place(enum.IntEnum):
    """Where the values of a buffer are."""

    CONSTANT = 0
    INVARIANT = 1
    INPUT = 2
    OUTPUT = 3
    STATE = 4
    NEXT = 5
    LOCAL = 6
    SUM = 7
    CHUNK = 8


class Phase(enum.IntEnum):
    """When an instruction runs: before the steps of a chunk, in them, or after them."""

    AHEAD = 0
    STEP = 1
    AFTER = 2


@dataclasses.dataclass(eq=False)
class Buffer:
    """Where values of a program are; compared by identity.

    Attributes:
        place: what kind of values.
        rows: whether there is a row for every sequence, or one for all.
        width: the elements of a row.
        array: the operand or result of the loop, if it is one.
        state: for the state after a step, the buffer of the state before it.
        numbers: the values of a constant.
        in_place: of a state, whether the next one is written over it.
    """

    place: Place
    rows: bool
    width: int
    array: int = -1
    state: Buffer | None = None
    numbers: tuple[float, ...] = ()
    in_place: bool = False


class View(NamedTuple):
    """Elements of a buffer: what an instruction reads or writes for a sequence.

    Attributes:
        buffer: the buffer.
        offset: of the first element.
        strides: from element to element, for each axis of the instruction.
    """

    buffer: Buffer
    offset: int
    strides: tuple[int, ...]


class Weight(NamedTuple):
    """A matrix in an operand that products multiply with.

    Attributes:
        buffer: the operand.
        offset: of the first element.
        depth: the number of elements that are added up.
        columns: the number of results.
        stride: from row to row; a row has all columns, or if transposed all depth.
        transposed: see there.
        half: whether it and the factors of its products have bfloat16.
    """

    buffer: Buffer
    offset: int
    depth: int
    columns: int
    stride: int
    transposed: bool
    half: bool


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction, for one sequence.

    Attributes:
        operation: one of `OPERATIONS`, or `PRODUCT`.
        rows: whether it computes something for every sequence.
        inner: the number of rows of a sequence.
        width: the elements of a row.
        result: what it writes; strides are those of `(inner, width)`.
        operands: what it reads. Those of a product after the first are vectors that
            all sequences share, which its sum starts from. That of a transpose has
            `width` rows of `inner` elements, and strides of these.
        weight: of a product.
        continues: whether a product adds to what stands in its result.
        phase: when it runs.
    """

    operation: str
    rows: bool
    inner: int
    width: int
    result: View
    operands: tuple[View, ...]
    weight: Weight | None = None
    continues: bool = False
    phase: Phase = Phase.STEP


class Factor(NamedTuple):
    """Some elements of every sequence at every step."""

    buffer: Buffer
    offset: int
    width: int


class Gradient(NamedTuple):
    """The gradient of a matrix: sums of products of the elements of two factors.

    Attributes:
        a: its rows.
        b: its columns.
        result: which result of the loop it is.
    """

    a: Factor
    b: Factor
    result: int


class Local(NamedTuple):
    """Where local buffers are, and the elements for a sequence and for all."""

    offsets: dict[Buffer, int]
    elements: tuple[int, int]


class Program(NamedTuple):
    """An encoded program.

    Attributes:
        numbers: as native/cpu/step/program.cc reads them.
        constants: the values of constants.
        instructions: what is encoded.
        gradients: see there.
    """

    numbers: tuple[int, ...]
    constants: tuple[float, ...]
    instructions: tuple[Instruction, ...]
    gradients: tuple[Gradient, ...]


def padded(columns: int) -> int:
    """Return how many elements a row of a product's result takes."""
    return -(-columns // _VECTOR) * _VECTOR


def encode(
    instructions: Sequence[Instruction],
    gradients: Sequence[Gradient],
    also: Sequence[Buffer],
    local: Local,
) -> Program:
    """Return the program of instructions in their order.

    Args:
        instructions: in their order.
        gradients: of matrices.
        also: buffers that no instruction may name, such as states.
        local: the places of local buffers.
    """
    buffers = dict.fromkeys(also)
    weights: dict[Weight, int] = {}
    for instruction in instructions:
        buffers |= dict.fromkeys(view.buffer for view in views(instruction))
        if instruction.weight is not None:
            weights.setdefault(instruction.weight, len(weights))
    for gradient in gradients:
        buffers |= {gradient.a.buffer: None, gradient.b.buffer: None}
    constants: list[float] = []
    places = {}
    for buffer in buffers:
        if buffer.place is Place.CONSTANT:
            places[buffer] = len(constants)
            constants += buffer.numbers
        elif buffer.place is Place.NEXT:
            places[buffer] = buffer.array
    places |= local.offsets
    number = {buffer: i for i, buffer in enumerate(buffers)}
    numbers = [len(buffers), len(weights), len(instructions), len(gradients)]
    numbers += local.elements
    for b in buffers:
        array = number[b.state] if b.state is not None else b.array
        numbers += [b.place, array, b.rows, b.width, b.width, places.get(b, 0)]
        numbers.append(b.in_place)
    for w in weights:
        numbers += [w.buffer.array, *w[1:]]
    for i in instructions:
        code = 0 if i.operation == PRODUCT else 1 + OPERATIONS.index(i.operation)
        numbers += [code, i.rows, i.inner, i.width]
        missing = [None] * (3 - len(i.operands))
        for view in (i.result, *i.operands, *missing):
            numbers += _encode_view(view, i.width, number)
        numbers += [0 if i.weight is None else weights[i.weight], i.continues]
        numbers.append(i.phase)
    for g in gradients:
        for factor in (g.a, g.b):
            numbers += [number[factor.buffer], factor.offset, factor.width]
        numbers.append(g.result)
    return Program(
        tuple(map(int, numbers)),
        tuple(constants),
        tuple(instructions),
        tuple(gradients),
    )


def views(instruction: Instruction) -> Iterator[View]:
    """Iterate over the result of an instruction and what it reads."""
    yield instruction.result
    yield from instruction.operands


def _encode_view(
    view: View | None, width: int, number: dict[Buffer, int]
) -> Sequence[int]:
    if view is None:
        return 0, 0, 0, 0, 0
    row = view.buffer.width if view.buffer.rows else 0
    inner, last = view.strides
    splat = last == 0 and width > 1
    return 1 + number[view.buffer], view.offset, row, inner, splat
