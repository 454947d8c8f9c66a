"""From a jaxpr of a step to a step program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from ..gradients import Product
from ..jaxprs import CHECKPOINTS, is_literal, type_of
from . import index_rules, indexed_rows, reduction_rules, rules, shape_rules
from .allocation import allocate
from .builder import Builder
from .check import check
from .fusion import fuse
from .lowered import Given, Lowered, Result
from .program import Buffer, Factor, Gradient, Instruction, Place, encode
from .values import (
    Unsupported,
    Value,
    broadcast,
    full_shape,
    merge_axes,
    most_of,
    row_major,
)

_RULES = rules.RULES | shape_rules.RULES | reduction_rules.RULES | index_rules.RULES
LARGEST_GIVEN = 2**22
"""The largest integer that the native loop is given."""
_LARGEST_STATE, _LARGEST = 2**23, 2**24
"""The largest in a state, and the largest for which a float32 can stand."""
_INLINED = frozenset({
    *CHECKPOINTS, "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "jit", "pjit",
})  # fmt: skip
_MOVES = shape_rules.RULES.keys() | index_rules.RULES.keys() - {"scatter-add"}
_MOVES |= {"clamp", "copy", "max", "min", "select_n", "stop_gradient"}
"""What has some numbers of its operands, and no others, as results."""
PRIMITIVES = frozenset(_RULES) | _INLINED
"""What programs have."""
INDEXING = frozenset(index_rules.RULES)
"""Those of them that read or write at computed places."""


def lower(
    traced: ClosedJaxpr,
    given: Sequence[Given],
    wanted: Sequence[Place],
    batch: int,
    steps: int,
    products: Sequence[Product] = (),
    adds: bool = False,
) -> Lowered:
    """Return the program of a step.

    Args:
        traced: the step, without constants.
        given: what its arguments are. Integers must be at most `LARGEST_GIVEN`.
        wanted: what its results are: `Place.NEXT` for as many as there are states, in
            their order, `OUTPUT`, or `SUM`.
        batch: the number of sequences.
        steps: the number of steps.
        products: products whose matrix is differentiated. For each, the last results
            are the factor that changes and the cotangent of the product.
        adds: whether outputs may be sums over sequences, whose terms are 0 at steps
            that a sequence does not have.

    Raises:
        Unsupported: the step has an operation that programs lack.
    """
    if batch == 0:
        raise Unsupported("there are no sequences")
    return _Lowering(traced, given, batch, steps, adds).finish(wanted, products)


class _Lowering:
    def __init__(
        self,
        traced: ClosedJaxpr,
        given: Sequence[Given],
        batch: int,
        steps: int,
        adds: bool,
    ) -> None:
        self.traced, self.given = traced, tuple(given)
        self.batch, self.adds = batch, adds
        self.builder = Builder(batch, steps)
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
        self.results: list[Result] = []
        self.written: list[Buffer] = []
        self._run(jaxpr.eqns, self.values)

    def _dtype(self) -> Any:
        """Return what the program computes in: float64, or float32 for shorter ones."""
        found = set()
        for variable in (*self.traced.jaxpr.invars, *self.traced.jaxpr.outvars):
            dtype = type_of(variable).dtype
            if jnp.issubdtype(dtype, jnp.floating):
                found.add(jnp.dtype(dtype))
        known = {jnp.dtype(n) for n in ("float32", "float64", "bfloat16")}
        if not found:
            raise Unsupported("it has no floats")
        if not found <= known:
            raise Unsupported(f"it has values of {', '.join(map(str, found))}")
        if jnp.dtype("float64") in found and len(found) > 1:
            raise Unsupported("it has values of float64 and of other types")
        return jnp.dtype("float64" if jnp.dtype("float64") in found else "float32")

    def _argument(self, i: int, aval: Any, kind: Given) -> Value:
        rows = kind.axis is not None
        shape = tuple(n for axis, n in enumerate(aval.shape) if axis != kind.axis)
        if rows and self.batch not in aval.shape[kind.axis :][:1]:
            raise Unsupported("its values have another number of sequences")
        if kind.place is Place.STATE and not rows:
            raise Unsupported("a state has no axis of sequences")
        buffer = Buffer(kind.place, rows, math.prod(shape), i)
        most = kind.most
        if jnp.issubdtype(aval.dtype, jnp.integer) and most is None:
            state = kind.place is Place.STATE
            most = _LARGEST_STATE if state else LARGEST_GIVEN
            most = min(most, _farthest(aval.dtype))
        strides = row_major(shape[::-1])[::-1] if kind.turned else row_major(shape)
        return Value(buffer, 0, shape, strides, kind.axis, most=most)

    def _read(self, atom: Any, values: dict[Any, Value]) -> Value:
        if not is_literal(atom):
            value = values[atom]
            if value.most is not None and value.most > _LARGEST:
                raise Unsupported("it reads numbers of steps above 2^24")
            return value
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
            raise Unsupported(f"`{name}`")
        self._check_dtypes(eqn)
        found = _RULES[name](self.builder, eqn, *given, **eqn.params)
        found = found if isinstance(found, list) else [found]
        for value, variable in zip(found, eqn.outvars, strict=True):
            if full_shape(value, self.batch) != type_of(variable).shape:
                raise Unsupported("its shape is not what was expected")
        return [
            _bounded(value, type_of(variable).dtype, name, given)
            for value, variable in zip(found, eqn.outvars, strict=True)
        ]

    def _check_dtypes(self, eqn: JaxprEqn) -> None:
        for variable in eqn.outvars:
            dtype = type_of(variable).dtype
            wide = jnp.issubdtype(dtype, jnp.floating) and dtype != self.dtype
            if wide and not (dtype == jnp.bfloat16 and self.dtype == jnp.float32):
                raise Unsupported(f"it has values of {dtype}")

    # ------------------------------------------------------------------------- results

    def finish(self, wanted: Sequence[Place], products: Sequence[Product]) -> Lowered:
        """Return the program that writes the results."""
        gradients = self._gradients(products)
        sources = self._write_results(wanted, gradients)
        numbered, matrices = self._number(products, gradients)
        factors = [f.buffer for g in numbered for f in (g.a, g.b)]
        instructions = fuse(self.builder.instructions, factors, self.batch)
        read = {v.buffer for i in instructions for v in i.operands}
        if not self.builder.unwritten.isdisjoint(read):
            raise Unsupported("it computes with the gradient of a large table")
        arguments = self._used_arguments(instructions, factors)
        also = [*self.states, *self.written]
        local = allocate(instructions)
        check(instructions, numbered, also, local.offsets)
        return Lowered(
            encode(instructions, numbered, also, local),
            self.given,
            arguments,
            tuple(self.results),
            tuple(sources),
            tuple(matrices),
            self.batch,
            self.dtype,
        )

    def _write_results(
        self, wanted: Sequence[Place], gradients: Sequence[Gradient | None]
    ) -> list[int | None]:
        """Add instructions that write the results; return `Lowered.sources`."""
        atoms = self.traced.jaxpr.outvars
        # Factors of which the loop makes a gradient are no results of it.
        pairs = [gradient is not None for gradient in gradients for _ in range(2)]
        left_out = [False] * (len(atoms) - len(pairs)) + pairs
        next_state = iter(self.states)
        places: dict[tuple[Any, Place, Any], int] = {}
        sources: list[int | None] = []
        for atom, place, is_left_out in zip(atoms, wanted, left_out, strict=True):
            state = next(next_state) if place is Place.NEXT else None
            source = None
            if not is_left_out:
                source = self._write_result(atom, place, state, places)
            sources.append(source)
        return sources

    def _write_result(
        self,
        atom: Any,
        place: Place,
        state: Buffer | None,
        places: dict[tuple[Any, Place, Any], int],
    ) -> int | None:
        """Add instructions that write a result of the step; return where it is.

        Args:
            atom: the result.
            place: what it is.
            state: the buffer of the state before it, if it is one.
            places: where results have been written, to which this one is added.

        Returns:
            One of `Lowered.sources`.
        """
        value, dtype = self._read(atom, self.values), atom.aval.dtype
        if value.summed and place is not Place.SUM:
            (value,) = self.builder.of_one_axis([value])
        if place is Place.OUTPUT and self._passes(value, dtype):
            return -1 - value.buffer.array
        if place is Place.SUM and value.buffer.numbers == (0.0,):
            return None
        key = (value, place, dtype)
        if place is not Place.NEXT and key in places:
            return places[key]
        if place is Place.NEXT and jnp.issubdtype(dtype, jnp.integer):
            self._check_growth(value)
        places[key] = index = len(self.results)
        buffer, result = self._target(value, atom.aval, place, index, state)
        self.results.append(result)
        self.written.append(buffer)
        self._store(value, buffer, result)
        return index

    def _number(
        self, products: Sequence[Product], gradients: Sequence[Gradient | None]
    ) -> tuple[list[Gradient], list[int | None]]:
        """Add gradients to the results; return them, and `Lowered.matrices`."""
        numbered: list[Gradient] = []
        matrices: list[int | None] = []
        for product, gradient in zip(products, gradients, strict=True):
            if gradient is None:
                matrices.append(None)
                continue
            matrices.append(len(self.results))
            numbered.append(gradient._replace(result=len(self.results)))
            turned = self.given[product.weight].turned
            shape = (gradient.a.width, gradient.b.width)
            result = Result(Place.SUM, None, shape, self.dtype, turned=turned)
            self.results.append(result)
        return numbered, matrices

    def _used_arguments(
        self, instructions: Sequence[Instruction], factors: Sequence[Buffer]
    ) -> tuple[int, ...]:
        """Return which arguments the loop takes, and number their buffers by these."""
        used = {v.buffer for i in instructions for v in (i.result, *i.operands)}
        used |= {i.weight.buffer for i in instructions if i.weight is not None}
        used |= {*self.states, *factors}
        given = (Place.INVARIANT, Place.INPUT, Place.STATE)
        buffers = [b for b in used if b.place in given]
        arguments = sorted({b.array for b in buffers})
        position = {a: i for i, a in enumerate(arguments)}
        for buffer in buffers:
            buffer.array = position[buffer.array]
        return tuple(arguments)

    def _check_growth(self, value: Value) -> None:
        """Check that a state of integers can be counted on until the last step."""
        growth = most_of(value) - _LARGEST_STATE
        if growth * self.builder.steps > _LARGEST_STATE - LARGEST_GIVEN:
            raise Unsupported("a state of integers may become larger than 2^23")

    def _gradients(self, products: Sequence[Product]) -> list[Gradient | None]:
        """Return the gradient of each product's matrix, None if the loop makes none."""
        atoms = self.traced.jaxpr.outvars
        pairs = atoms[len(atoms) - 2 * len(products) :]
        gradients: list[Gradient | None] = []
        for product, x, dy in zip(products, pairs[::2], pairs[1::2], strict=True):
            first = _matrix_axis(product)
            factors = [self._read(v, self.values) for v in (x, dy)]
            if first is None or not _are_rows(product, first, *factors):
                gradients.append(None)
                continue
            rows_first = (first == 0) != self.given[product.weight].turned
            a, b = factors if rows_first else factors[::-1]
            gradients.append(Gradient(self._kept(a), self._kept(b), -1))
        return gradients

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

    def _passes(self, value: Value, dtype: Any) -> bool:
        """Return whether a result of this dtype is a whole input."""
        return (
            value.buffer.place is Place.INPUT
            and self._type_of(value.buffer).dtype == dtype
            and value.size == value.buffer.width
            and value.is_contiguous()
            and value.axis == self.given[value.buffer.array].axis
            and value.shape == self._shape_of(value.buffer)
        )

    def _shape_of(self, buffer: Buffer) -> tuple[int, ...]:
        variable = self.traced.jaxpr.invars[buffer.array]
        return self.values[variable].shape

    def _type_of(self, buffer: Buffer) -> Any:
        return type_of(self.traced.jaxpr.invars[buffer.array])

    def _target(
        self, value: Value, aval: Any, place: Place, index: int, state: Buffer | None
    ) -> tuple[Buffer, Result]:
        """Return the buffer and the description of a result."""
        dtype = self.dtype if place is Place.SUM else aval.dtype
        added: tuple[int, ...] = ()
        if place is Place.SUM and value.axis is None and not value.summed:
            place, added = Place.OUTPUT, (0,)
        elif place is not Place.SUM and value.summed:
            if place is Place.NEXT or not self.adds:
                raise Unsupported("it combines different sequences")
            dtype, added = self.dtype, (1,)
        axis = 0 if value.summed and place is Place.OUTPUT else value.axis
        if place is Place.NEXT:
            if axis not in (None, 0):
                raise Unsupported("it moves the axis of sequences")
            axis = 0
        shape = tuple(aval.shape)
        if axis is not None and not value.summed:
            shape = shape[:axis] + shape[axis + 1 :]
        buffer = Buffer(place, axis is not None, math.prod(shape), index, state)
        full = shape if axis is None else (self.batch, *shape)
        return buffer, Result(place, axis, full, dtype, value.most, added)

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
            if value.summed:
                value = broadcast(value, shape, range(len(value.shape)), self.batch)
                value = value._replace(axis=0, summed=False)
            self.builder.write("copy", target, value)
        elif result.axis is not None:
            self.builder.write("add", target, target, value)
        else:
            self._store_sum(value._replace(shape=shape), target)

    def _store_sum(self, value: Value, target: Value) -> None:
        if windows := indexed_rows.windows_of(self.builder, value):
            return indexed_rows.add_windows(self.builder, target, windows)
        merged = merge_axes(value.shape, [value.strides])
        if len(merged.shape) > 1 or any(s not in (0, 1) for s in merged.strides[0]):
            value = value._replace(axis=0, summed=False)
            value = self.builder.elementwise("copy", value)
        self.builder.sum_rows(value, target)


def _bounded(value: Value, dtype: Any, name: str, given: Sequence[Value]) -> Value:
    """Return a value that knows how large it may be, if it has integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return value
    most = value.most
    if most is None:
        if name not in shape_rules.RULES and not value.buffer.numbers:
            raise Unsupported(f"`{name}` of integers")
        most = max(map(most_of, (*given, value)))
    # The least int8 has no counterpart, and only what moves it leaves it as it is.
    limit = min(_LARGEST, _farthest(dtype) if name in _MOVES else jnp.iinfo(dtype).max)
    if most > limit:
        of = "2^24" if limit == _LARGEST else limit
        raise Unsupported(f"it has {dtype} that may be larger than {of}")
    return value._replace(most=most)


def _farthest(dtype: Any) -> int:
    """Return the largest absolute value of a type of integers."""
    return max(jnp.iinfo(dtype).max, -jnp.iinfo(dtype).min)


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


def _are_rows(product: Product, first: int, x: Value, dy: Value) -> bool:
    """Return whether a sequence has one row of each factor; see `_matrix_axis`."""
    matrix = type_of(product.eqn.invars[1 - product.changing]).shape
    return all(
        value.size == size
        and value.is_contiguous()
        and value.axis is not None
        and not value.summed
        for value, size in ((x, matrix[first]), (dy, matrix[1 - first]))
    )
