"""Shorter programs that compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .join import join_neighbours
from .phases import run_by_chunk
from .program import (
    ELEMENTWISE,
    PRODUCT,
    WRITES_ROW,
    Buffer,
    Instruction,
    Phase,
    Place,
    View,
    padded,
    views,
)

_MOST_OPERANDS = 3
_BOUNDED = ("tanh", "sigmoid")
_SUMS = {"row_sum": "row_sum_product", "column_sum": "column_sum_product"}

_MOVABLE = frozenset({Place.LOCAL, Place.OUTPUT})
"""Where instructions write that may run earlier."""


def fuse(
    instructions: Sequence[Instruction], factors: Iterable[Buffer], batch: int
) -> list[Instruction]:
    """Return instructions with the same results, without those that nothing needs.

    Those that are given may be changed.

    Args:
        instructions: in their order.
        factors: the buffers that gradients of matrices read.
        batch: the number of sequences.
    """
    factors, one = set(factors), batch == 1
    program = _Fusion(_needed(instructions, set(factors)), factors)
    join_neighbours(program.instructions, factors, one)
    for shorten in (
        program.start_product,
        program.fuse_sum,
        program.join_products,
        program.write_in_place,
    ):
        for instruction in list(program.instructions):
            if instruction in program.instructions:
                shorten(instruction)
    join_neighbours(program.instructions, factors, one)
    program.leave_out_copies()
    program.run_after()
    for instruction in list(program.instructions):
        if instruction.operation == PRODUCT and instruction.phase is Phase.AHEAD:
            program.write_chunk(instruction)
    if one:
        run_by_chunk(program.instructions)
    return program.instructions


def _needed(
    instructions: Sequence[Instruction], read: set[Buffer]
) -> list[Instruction]:
    """Leave out the instructions whose results nothing reads."""
    inside = (Place.LOCAL, Place.CHUNK)
    kept = []
    for i in reversed(instructions):
        if i.result.buffer.place not in inside or i.result.buffer in read:
            kept.append(i)
            read.update(view.buffer for view in i.operands)
    return kept[::-1]


def _axes(i: Instruction) -> tuple[bool, int, int]:
    return i.rows, i.inner, i.width


def _is_whole(copy: Instruction) -> bool:
    """Return whether an instruction reads and writes whole buffers of one layout."""
    old, new = copy.operands[0], copy.result
    return (
        old.offset == new.offset == 0
        and old.strides == new.strides
        and copy.inner * copy.width == old.buffer.width == new.buffer.width
    )


class _Fusion:
    def __init__(self, instructions: list[Instruction], factors: set[Buffer]) -> None:
        self.instructions, self.factors = instructions, factors

    # ---------------------------------------------------------------- multiply and add

    def fuse_sum(self, i: Instruction) -> None:
        """Compute a product of elements together with what it is added to."""
        if i.operation in ("add", "subtract"):
            for k in (1, 0) if i.operation == "add" else (1,):
                if source := self._source(i, k, "multiply"):
                    add = i.operation == "add"
                    i.operands = (*source.operands, i.operands[1 - k])
                    i.operation = "multiply_add" if add else "multiply_subtract"
                    self.instructions.remove(source)
                    return
        elif i.operation == "multiply":
            for k in (0, 1):  # a (1 - b) = a - a b, unless a may be infinite
                source, a = self._source(i, k, "subtract"), i.operands[1 - k]
                if (
                    source
                    and source.operands[0].buffer.numbers == (1.0,)
                    and self._is_bounded(a.buffer)
                ):
                    i.operation = "multiply_subtract"
                    i.operands = (a, source.operands[1], a)
                    self.instructions.remove(source)
                    return
        elif i.operation in _SUMS and (source := self._source(i, 0, "multiply")):
            i.operation, i.operands = _SUMS[i.operation], source.operands
            self.instructions.remove(source)

    def _source(
        self, reader: Instruction, k: int, operation: str
    ) -> Instruction | None:
        """Return the instruction that operand `k` is the result of, if only it is."""
        view = reader.operands[k]
        writers = self._writers(view.buffer)
        if (
            view.buffer.place in (Place.LOCAL, Place.CHUNK)
            and len(writers) == 1
            and writers[0].operation == operation
            and writers[0].result == view
            and _axes(writers[0]) == _axes(reader)
            and self._reads(view.buffer) == 1
        ):
            return writers[0]
        return None

    # ------------------------------------------------------------------------ products

    def start_product(self, i: Instruction) -> None:
        """Let a product start from a vector of all sequences that is added to it.

        Between the two, other values may be added.
        """
        result = i.result.buffer
        if i.operation != "add" or result.place is not Place.LOCAL:
            return
        for vector, rest in (i.operands, i.operands[::-1]):
            shared = vector.buffer.place is Place.INVARIANT and not vector.buffer.rows
            if (
                not shared
                or vector.strides != (0, 1)
                or rest[1:] != i.result[1:]
                or rest.buffer.width != result.width
                or rest.buffer.rows != result.rows
                or len(self._writers(result)) != 1
            ):
                continue
            product = self._summand(i, rest)
            if product is not None:
                product.operands += (vector,)
                self.instructions.remove(i)
                self._rename(result, rest.buffer)
                return

    def _summand(self, reader: Instruction, view: View) -> Instruction | None:
        """Return a product among the values that were added up to an operand."""
        k = reader.operands.index(view)
        product = self._source(reader, k, PRODUCT)
        if product is not None:
            free = not product.continues and len(product.operands) < _MOST_OPERANDS
            return product if free and product.inner == 1 else None
        total = self._source(reader, k, "add")
        if total is None:
            return None
        found = (self._summand(total, v) for v in total.operands)
        return next((product for product in found if product is not None), None)

    def join_products(self, i: Instruction) -> None:
        """Let a product add to what is added to it."""
        result = i.result.buffer
        if i.operation != "add" or i.inner != 1 or result.place is not Place.LOCAL:
            return
        if result.width != i.width or len(self._writers(result)) != 1:
            return
        for k in (1, 0):
            source = self._source(i, k, PRODUCT)
            if (
                source is not None
                and not source.continues
                and source.phase is Phase.STEP
                and self._give_start(source, i, 1 - k)
            ):
                self.instructions.remove(source)
                at = self.instructions.index(i)
                start, target = i.operands[1 - k], source.result
                copy = Instruction("copy", i.rows, 1, i.width, target, (start,))
                source.continues = True
                self.instructions[at : at + 1] = [copy, source]
                self._rename(result, target.buffer)
                self._continue_product(copy)
                return

    def _give_start(self, product: Instruction, i: Instruction, k: int) -> bool:
        """Let the product that is operand `k` start from what another starts from.

        Return whether the other one starts from nothing now.
        """
        vectors = product.operands[1:]
        first = self._source(i, k, PRODUCT) if vectors else None
        if first is not None and not first.continues:
            free = _MOST_OPERANDS - len(first.operands)
            if first.inner == 1 and len(vectors) <= free:
                first.operands += vectors
                product.operands = product.operands[:1]
        return len(product.operands) == 1

    def _continue_product(self, copy: Instruction) -> None:
        """Let a product go on in the result of another one instead of in a copy."""
        first = self._source(copy, 0, PRODUCT)
        if first is not None and first.result.buffer.width == copy.result.buffer.width:
            self.instructions.remove(copy)
            # What a product makes for a chunk of steps stays there.
            buffers = [first.result.buffer, copy.result.buffer]
            old, new = sorted(buffers, key=lambda b: b.place is Place.CHUNK)
            self._rename(old, new)

    # -------------------------------------------------------------------------- copies

    def write_in_place(self, copy: Instruction) -> None:
        """Let an instruction write where its result would be copied to."""
        if copy.operation != "copy":
            return
        source, target = copy.operands[0], copy.result
        old, new = source.buffer, target.buffer
        writers = self._writers(old)
        if old.place is not Place.LOCAL or old.rows != new.rows or not writers:
            return
        if any(w.operation == PRODUCT for w in writers) and (
            padded(copy.width) != copy.width
            or copy.inner != 1
            or (new.place is Place.OUTPUT and self._reads(old) == 1)
        ):
            return  # products write whole vectors, and may run after the steps
        if _is_whole(copy) and len(self._writers(new)) == 1:
            self.instructions.remove(copy)
            self._rename(old, new)
        elif (
            len(writers) == 1
            and self._reads(old) == 1
            and writers[0].result == source
            and _axes(writers[0]) == _axes(copy)
            and writers[0].operation in ELEMENTWISE
        ):  # a part of a larger value; the axes of a sum are those of what it adds up
            (writer,) = writers
            writer.result = target
            self.instructions.remove(writer)
            self.instructions[self.instructions.index(copy)] = writer

    def leave_out_copies(self) -> None:
        """Let rows be written into a value itself where nothing else needs it."""
        for copy in self.instructions[::-1]:
            old, new = copy.operands[0].buffer, copy.result.buffer
            if copy.operation != "copy" or old.rows != new.rows or not _is_whole(copy):
                continue
            if new.place is not Place.NEXT:
                continue
            if new.state is old:
                self._read_early(copy, old, new)
            if not self._ends_with(copy, old, new):
                continue
            if new.state is old:
                self.instructions.remove(copy)
                old.in_place = True
            elif old.place is Place.LOCAL and self._writes_rows(old, new):
                self.instructions.remove(copy)
                self._rename(old, new)

    def _read_early(self, copy: Instruction, old: Buffer, new: Buffer) -> None:
        """Move what reads a value before its copy, unless it needs that, too.

        It moves with all that it needs, if each of these values has one writer.
        """
        place = self.instructions.index(copy)
        before, later = self.instructions[:place], self.instructions[place + 1 :]
        needed: set[Buffer] = set()
        moved: list[Instruction] = []
        for i in reversed(later):
            reads, result = {v.buffer for v in i.operands}, i.result.buffer
            if old not in reads and result not in needed:
                continue
            alone = len(self._writers(result)) == 1 and i.phase is Phase.STEP
            if new in reads or not alone or result.place not in _MOVABLE:
                return
            needed |= reads
            moved.insert(0, i)
        rest = [i for i in later if i not in moved]
        self.instructions[:] = [*before, *moved, copy, *rest]

    def _writes_rows(self, old: Buffer, new: Buffer) -> bool:
        """Return whether rows of a copy are written, and of a value no products."""
        products = any(i.operation == PRODUCT for i in self._writers(old))
        return not products and any(
            i.operation in WRITES_ROW for i in self._writers(new)
        )

    def _ends_with(self, copy: Instruction, old: Buffer, new: Buffer) -> bool:
        """Return whether nothing needs a value once something needs its copy."""
        rest = [i for i in self.instructions if i is not copy]
        uses = [n for n, i in enumerate(rest) if any(v.buffer is new for v in views(i))]
        begin = min(uses, default=len(rest))
        later = rest[begin:]
        return (
            {old, new}.isdisjoint(self.factors)
            and begin >= self.instructions.index(copy)
            and not any(v.buffer is old for i in later for v in views(i))
        )

    # -------------------------------------------------------------------------- phases

    def run_after(self) -> None:
        """Let products that no step reads run for a chunk of steps at once.

        Their factor is kept for the chunk.
        """
        for i in list(self.instructions):
            if i.operation != PRODUCT or i.phase is not Phase.STEP or i.inner != 1:
                continue
            readers = self._readers(i.result.buffer)
            kept = i.operands[0].buffer.place in (Place.CHUNK, Place.OUTPUT)
            if (
                kept
                and i.rows
                and not i.continues
                and i.result.buffer.place is Place.LOCAL
                and len(self._writers(i.result.buffer)) == 1
                and all(
                    r.operation == "copy"
                    and r.inner == 1
                    and r.result.buffer.place is Place.OUTPUT
                    and not self._readers(r.result.buffer)
                    for r in readers
                )
            ):
                chunk = Buffer(Place.CHUNK, True, i.result.buffer.width)
                self._rename(i.result.buffer, chunk)
                for later in (i, *readers):
                    later.phase = Phase.AFTER
                self.write_chunk(i)

    def write_chunk(self, product: Instruction) -> None:
        """Let a product of a chunk write where its result would be copied to."""
        old = product.result.buffer
        if old in self.factors:
            return
        for copy in self._readers(old):
            new = copy.result.buffer
            if (
                copy.operation == "copy"
                and new.place is Place.OUTPUT
                and new.rows == old.rows
                and copy.operands[0].offset == copy.result.offset == 0
                and copy.operands[0].strides == copy.result.strides
                and (copy.inner, copy.width) == (1, new.width)
                and new.width == product.width
                and self._writers(old) == [product]
                and self._writers(new) == [copy]
            ):
                self.instructions.remove(copy)
                self._rename(old, new)
                return

    # ------------------------------------------------------------------------- helpers

    def _readers(self, buffer: Buffer) -> list[Instruction]:
        return [
            i
            for i in self.instructions
            if any(view.buffer is buffer for view in i.operands)
        ]

    def _writers(self, buffer: Buffer) -> list[Instruction]:
        return [i for i in self.instructions if i.result.buffer is buffer]

    def _is_bounded(self, buffer: Buffer) -> bool:
        writers = self._writers(buffer)
        return bool(writers) and all(i.operation in _BOUNDED for i in writers)

    def _reads(self, buffer: Buffer) -> int:
        operands = (view for i in self.instructions for view in i.operands)
        return sum(view.buffer is buffer for view in operands) + (
            buffer in self.factors
        )

    def _rename(self, old: Buffer, new: Buffer) -> None:
        def renamed(view: View) -> View:
            return view._replace(buffer=new) if view.buffer is old else view

        for i in self.instructions:
            if any(view.buffer is old for view in views(i)):
                i.result = renamed(i.result)
                i.operands = tuple(map(renamed, i.operands))
