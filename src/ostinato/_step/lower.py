"""From a jaxpr of a step to a step program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from . import rules, shape_rules
from .builder import Builder
from .fusion import fuse
from .gradients import Product
from .jaxprs import is_literal, type_of
from .program import Buffer, Factor, Gradient, Place, Program, encode
from .values import Unsupported, Value, broadcast, merge_axes, row_major

_RULES = rules.RULES | shape_rules.RULES
_INLINED = frozenset({
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "jit", "pjit", "remat", "remat2",
})  # fmt: skip


class Given(NamedTuple):
    """An argument of a step.

    Attributes:
        place: `Place.INVARIANT`, `INPUT` or `STATE`.
        axis: which axis is that of sequences; None if it has none, or, of an invariant
            value, if that is not known.
        most: the largest absolute value of an integer, if it is known.
        turned: whether the native loop reads the transpose of a matrix in its place.
    """

    place: Place
    axis: int | None
    most: int | None = None
    turned: bool = False


class Result(NamedTuple):
    """A result of a loop.

    Attributes:
        place: `Place.OUTPUT`, `NEXT` or `SUM`.
        axis: which axis of the result of the step is that of sequences; the native loop
            has it first.
        shape: of the step's result, as the native loop has it.
        dtype: its dtype.
        turned: whether the native loop writes the transpose of a matrix in its place.
    """

    place: Place
    axis: int | None
    shape: tuple[int, ...]
    dtype: Any
    turned: bool = False


class Lowered(NamedTuple):
    """A step program and how to call it.

    Attributes:
        program: the program.
        given: the arguments of the step.
        arguments: the arguments, by position, that are operands of the loop.
        results: the results of the loop.
        sources: for every result of the step, where it is among the results of the
            loop; or as a negative number `-1 - i`, that it is argument `i`; or None,
            if it is zero or not a result of the loop.
        matrices: for every product, where the gradient of its matrix is among the
            results; None if the loop returns its factors instead.
        batch: the number of sequences.
        dtype: what it computes in.
    """

    program: Program
    given: tuple[Given, ...]
    arguments: tuple[int, ...]
    results: tuple[Result, ...]
    sources: tuple[int | None, ...]
    matrices: tuple[int | None, ...]
    batch: int
    dtype: Any


def lower(
    traced: ClosedJaxpr,
    given: Sequence[Given],
    wanted: Sequence[Place],
    batch: int,
    products: Sequence[Product] = (),
) -> Lowered:
    """Return the program of a step.

    Args:
        traced: the step, without constants.
        given: what its arguments are.
        wanted: what its results are: `Place.NEXT` for as many as there are states, in
            their order, `OUTPUT`, or `SUM`.
        batch: the number of sequences.
        products: products whose matrix is differentiated. For each, the last results
            are the factor that changes and the cotangent of the product.

    Raises:
        Unsupported: the step has an operation that programs lack.
    """
    if batch == 0:
        raise Unsupported("there are no sequences")
    return _Lowering(traced, given, batch).finish(wanted, products)


class _Lowering:
    def __init__(self, traced: ClosedJaxpr, given: Sequence[Given], batch: int) -> None:
        self.traced, self.given, self.batch = traced, tuple(given), batch
        self.builder = Builder(batch)
        self.dtype = self._dtype()
        jaxpr = traced.jaxpr
        self.values: dict[Any, Value] = {}
        self.kept: dict[Value, Value] = {}
        for i, (variable, kind) in enumerate(zip(jaxpr.invars, given, strict=True)):
            self.values[variable] = self._argument(i, variable.aval, kind)
        self.states = [
            self.values[v].buffer
            for v, kind in zip(jaxpr.invars, given, strict=True)
            if kind.place is Place.STATE
        ]
        self._run(jaxpr.eqns, self.values)

    def _dtype(self) -> Any:
        """Return what the program computes in: float64, or float32 for shorter ones."""
        found = set()
        for variable in (*self.traced.jaxpr.invars, *self.traced.jaxpr.outvars):
            dtype = type_of(variable).dtype
            if jnp.issubdtype(dtype, jnp.floating):
                found.add(jnp.dtype(dtype))
        known = {jnp.dtype(n) for n in ("float32", "float64", "bfloat16")}
        if not found or not found <= known:
            raise Unsupported(f"it has values of {', '.join(map(str, found))}")
        if jnp.dtype("float64") in found and len(found) > 1:
            raise Unsupported("it has values of float64 and of other types")
        return jnp.dtype("float64" if jnp.dtype("float64") in found else "float32")

    def _argument(self, i: int, aval: Any, kind: Given) -> Value:
        rows = kind.axis is not None
        shape = tuple(n for axis, n in enumerate(aval.shape) if axis != kind.axis)
        if rows and aval.shape[kind.axis] != self.batch:
            raise Unsupported("its values have another number of sequences")
        if kind.place is Place.STATE and not rows:
            raise Unsupported("a state has no axis of sequences")
        buffer = Buffer(kind.place, rows, math.prod(shape), i)
        most = kind.most
        if jnp.issubdtype(aval.dtype, jnp.integer) and most is None:
            most = 2**62  # any operation on it is too much
        strides = row_major(shape[::-1])[::-1] if kind.turned else row_major(shape)
        return Value(buffer, 0, shape, strides, kind.axis, most=most)

    def _read(self, atom: Any, values: dict[Any, Value]) -> Value:
        if not is_literal(atom):
            return values[atom]
        array = np.asarray(atom.val)
        if array.size != 1 or jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise Unsupported("it has arrays as literals")
        value = self.builder.constant(float(array.reshape(())))
        ones = (1,) * len(type_of(atom).shape)
        return value._replace(shape=ones, strides=(0,) * len(ones))

    def _run(self, eqns: Sequence[JaxprEqn], values: dict[Any, Value]) -> None:
        for eqn in eqns:
            given = [self._read(atom, values) for atom in eqn.invars]
            try:
                found = self._apply(eqn, given)
            except Unsupported as error:
                if error.args[1:]:
                    raise
                raise Unsupported(str(error), eqn) from None
            values.update(zip(eqn.outvars, found, strict=True))

    def _apply(self, eqn: JaxprEqn, given: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _INLINED:
            inner = next(iter(jaxprs_in_params(eqn.params)))
            closed = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
            consts = getattr(closed, "consts", ())
            if consts:
                raise Unsupported("a function inside of it has constants")
            values = dict(zip(inner.invars, given, strict=True))
            self._run(inner.eqns, values)
            return [self._read(atom, values) for atom in inner.outvars]
        if name not in _RULES:
            raise Unsupported(f"it has `{name}`")
        if any(v.most is not None and v.most > 2**24 for v in given):
            raise Unsupported("it has integers that may be larger than 2^24")
        self._check_dtypes(eqn)
        found = _RULES[name](self.builder, eqn, *given, **eqn.params)
        return found if isinstance(found, list) else [found]

    def _check_dtypes(self, eqn: JaxprEqn) -> None:
        for variable in eqn.outvars:
            dtype = type_of(variable).dtype
            wide = jnp.issubdtype(dtype, jnp.floating) and dtype != self.dtype
            if wide and not (dtype == jnp.bfloat16 and self.dtype == jnp.float32):
                raise Unsupported(f"it has values of {dtype}")

    # ------------------------------------------------------------------------- results

    def finish(self, wanted: Sequence[Place], products: Sequence[Product]) -> Lowered:
        """Return the program that writes the results."""
        atoms = self.traced.jaxpr.outvars
        gradients, matrices = self._gradients(products)
        states = self.states
        results: list[Result] = []
        sources: list[int | None] = []
        also: list[Buffer] = list(states)
        next_state = iter(states)
        written: dict[tuple[Any, Place], int] = {}
        first_pair = len(atoms) - 2 * len(products)
        for i, (atom, place) in enumerate(zip(atoms, wanted, strict=True)):
            value = self._read(atom, self.values)
            if value.summed and place is not Place.SUM:
                (value,) = self.builder.of_one_axis([value])
            if i >= first_pair and matrices[(i - first_pair) // 2]:
                sources.append(None)
                continue
            key = (value, place)
            if place is Place.OUTPUT and not is_literal(atom) and self._passes(value):
                sources.append(-1 - value.buffer.array)
                continue
            if place is Place.SUM and value.buffer.numbers == (0.0,):
                sources.append(None)
                continue
            if place is not Place.NEXT and key in written:
                sources.append(written[key])
                continue
            written[key] = len(results)
            sources.append(len(results))
            state = next(next_state) if place is Place.NEXT else None
            buffer, result = self._target(value, atom.aval, place, len(results), state)
            results.append(result)
            also.append(buffer)
            self._store(value, buffer, result)
        where: list[int | None] = []
        found = iter(gradients)
        finished = []
        for is_matrix in matrices:
            if not is_matrix:
                where.append(None)
                continue
            where.append(len(results))
            finished.append(next(found)._replace(result=len(results)))
            turned = self.given[products[len(where) - 1].weight].turned
            shape = tuple(f.width for f in finished[-1][:2])
            results.append(Result(Place.SUM, None, shape, self.dtype, turned))
        factors = [f.buffer for g in finished for f in (g.a, g.b)]
        instructions = fuse(self.builder.instructions, factors)
        used = {v.buffer for i in instructions for v in (i.result, *i.operands)}
        used |= {i.weight.buffer for i in instructions if i.weight is not None}
        used |= {*states, *factors}
        arguments = sorted(
            {
                b.array
                for b in used
                if b.place in (Place.INVARIANT, Place.INPUT, Place.STATE)
            }
        )
        position = {a: i for i, a in enumerate(arguments)}
        for buffer in used:
            if buffer.place in (Place.INVARIANT, Place.INPUT, Place.STATE):
                buffer.array = position[buffer.array]
        return Lowered(
            encode(instructions, finished, also),
            self.given,
            tuple(arguments),
            tuple(results),
            tuple(sources),
            tuple(where),
            self.batch,
            self.dtype,
        )

    def _gradients(
        self, products: Sequence[Product]
    ) -> tuple[list[Gradient], list[bool]]:
        """Return gradients of matrices, and for which products there is one."""
        atoms = self.traced.jaxpr.outvars
        pairs = atoms[len(atoms) - 2 * len(products) :]
        gradients, found = [], []
        for product, x, dy in zip(products, pairs[::2], pairs[1::2], strict=True):
            first = _matrix_axis(product)
            factors = [self._read(v, self.values) for v in (x, dy)]
            found.append(first is not None and all(map(_is_row, factors)))
            if found[-1]:
                rows_first = (first == 0) != self.given[product.weight].turned
                a, b = factors if rows_first else factors[::-1]
                gradients.append(Gradient(self._kept(a), self._kept(b), -1))
        return gradients, found

    def _kept(self, value: Value) -> Factor:
        """Return elements that live as long as a chunk of steps."""
        if value.buffer.place not in (Place.INPUT, Place.CHUNK):
            if value not in self.kept:
                buffer = Buffer(Place.CHUNK, True, value.size)
                strides = row_major(value.shape)
                target = Value(buffer, 0, value.shape, strides, value.axis)
                self.builder.write("copy", target, value)
                self.kept[value] = target
            value = self.kept[value]
        return Factor(value.buffer, value.offset, value.size)

    def _passes(self, value: Value) -> bool:
        """Return whether a value is a whole input."""
        return (
            value.buffer.place is Place.INPUT
            and value.size == value.buffer.width
            and value.is_contiguous()
            and value.axis == self.given[value.buffer.array].axis
            and value.shape == self._shape_of(value.buffer)
        )

    def _shape_of(self, buffer: Buffer) -> tuple[int, ...]:
        variable = self.traced.jaxpr.invars[buffer.array]
        return self.values[variable].shape

    def _target(
        self, value: Value, aval: Any, place: Place, index: int, state: Buffer | None
    ) -> tuple[Buffer, Result]:
        """Return the buffer and the description of a result."""
        if place is Place.SUM and value.axis is None and not value.summed:
            raise Unsupported("it adds up what all sequences share")
        if place is not Place.SUM and value.summed:
            raise Unsupported("it combines different sequences")
        axis = value.axis
        if place is Place.NEXT:
            if axis not in (None, 0):
                raise Unsupported("it moves the axis of sequences")
            axis = 0
        shape = tuple(n for i, n in enumerate(aval.shape) if i != axis)
        buffer = Buffer(place, axis is not None, math.prod(shape), index, state)
        full = shape if axis is None else (self.batch, *shape)
        dtype = self.dtype if place is Place.SUM else aval.dtype
        return buffer, Result(place, axis, full, dtype)

    def _store(self, value: Value, buffer: Buffer, result: Result) -> None:
        """Add instructions that write a result."""
        shape = result.shape if result.axis is None else result.shape[1:]
        if value.axis is None and not value.summed:
            if result.axis is not None and value.shape == (self.batch, *shape):
                value = self.builder.as_rows(value, 0)
            if value.shape != shape:
                value = broadcast(value, shape, range(len(value.shape)), self.batch)
        target = Value(buffer, 0, shape, row_major(shape), result.axis)
        if result.place is not Place.SUM:
            self.builder.write("copy", target, value)
        elif result.axis is not None:
            self.builder.write("add", target, target, value)
        else:
            self._store_sum(value._replace(shape=shape), target)

    def _store_sum(self, value: Value, target: Value) -> None:
        merged = merge_axes(value.shape, [value.strides])
        if len(merged.shape) > 1 or any(s not in (0, 1) for s in merged.strides[0]):
            value = value._replace(axis=0, summed=False)
            value = self.builder.elementwise("copy", value)
        self.builder.sum_rows(value, target)


def _matrix_axis(product: Product) -> int | None:
    """Return which axis of a product's matrix is added up; None if it is no matrix."""
    eqn = product.eqn
    if eqn.primitive.name != "dot_general":
        return None
    over, (batch, _) = eqn.params["dimension_numbers"]
    matrix = 1 - product.changing
    if batch or len(over[matrix]) != 1 or len(type_of(eqn.invars[matrix]).shape) != 2:
        return None
    return over[matrix][0]


def _is_row(value: Value) -> bool:
    """Return whether the elements of a sequence are one row."""
    one = len(value.shape) == 1 and value.is_contiguous()
    return one and value.axis is not None and not value.summed
