"""The text of a kernel that runs a loop over a step, made of the step's jaxpr.

The text is found backwards: of every element that a thread writes, back to the elements
that it reads. So operations on shapes cost nothing, and a step is supported if each of
its elements depends on those of one thread.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..jaxprs import is_literal, type_of
from ..programs.values import Unsupported
from . import operations
from .indices import Index, Indices, Places, Shape, moved, over

Step = tuple[int, int, int]
"""How many arguments of a step are invariant, inputs and states."""
_BYTES_AHEAD, _MOST_AHEAD = 64, 8
"""Loads under way at once of each thread, and the steps that they are of."""
_STEP_OF = "const Index t = loop.reverse ? length - 1 - (k + i) : k + i;"


class When(enum.IntEnum):
    """When a value is computed: once for all steps, or at each of them."""

    ONCE = 0
    STEP = 1


class Value(NamedTuple):
    """A value of a thread: its name in C++, and when it is computed."""

    name: str
    when: When


class Written(NamedTuple):
    """A generated text.

    Attributes:
        code: what follows `_cuda/text/step.h`.
        arguments: the arguments of the step, by position, that the kernel reads.
    """

    code: str
    arguments: tuple[int, ...]


def write(
    jaxpr: Jaxpr, counts: Step, num_outputs: int, masked: bool, places: Places
) -> Written:
    """Write the kernel of a loop over a step.

    Its parameters are the arrays that it reads, lengths if `masked`, the results, and
    a `Loop`. Results are the final states, outputs of all steps, and sums over steps.

    Args:
        jaxpr: from invariant values, inputs and states, to new states, outputs and
            values to add up; without inner jaxprs.
        counts: of its arguments.
        num_outputs: how many outputs there are; what follows them is added up.
        masked: whether sequences have lengths.
        places: the elements of the states.

    Raises:
        Unsupported: an element depends on those of several threads.
    """
    writer = Writer(jaxpr, counts, masked, places)
    states = range(counts[2])
    outputs = range(len(states), len(states) + num_outputs)
    sums = range(outputs.stop, len(jaxpr.outvars))
    new = [writer.read(jaxpr.outvars[i], writer.state_place(i)) for i in states]
    stored = [writer.dealt(jaxpr.outvars[i]) for i in outputs]
    added = [writer.dealt(jaxpr.outvars[i]) for i in sums]
    return writer.text(new, stored, added)


class _Load(NamedTuple):
    """An element of an input that each step reads.

    Attributes:
        argument: which input.
        kind: its type in the array.
        offset: where it is in the array of a step.
    """

    argument: int
    kind: str
    offset: str


class Writer:
    """The text that is found so far."""

    def __init__(
        self, jaxpr: Jaxpr, counts: Step, masked: bool, places: Places
    ) -> None:
        self.jaxpr, self.counts, self.places = jaxpr, counts, places
        self.masked = masked
        self.makers = {
            v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)
        }
        self.arguments = {v: i for i, v in enumerate(self.jaxpr.invars)}
        self.lines: dict[When, list[str]] = {When.ONCE: [], When.STEP: []}
        self.loads: dict[_Load, str] = {}
        self.used: dict[int, None] = {}
        self.values: dict[tuple[Any, Indices], Value] = {}

    # ------------------------------------------------------------------------- values

    def state_place(self, i: int) -> Indices:
        """Return the element of a state that a thread holds."""
        variable = self.jaxpr.invars[sum(self.counts[:2]) + i]
        shape = type_of(variable).shape
        if shape != self.places.shape[: len(shape)]:
            raise Unsupported("it has states of several shapes")
        return self.places.own()[: len(shape)]

    def dealt(self, atom: Any) -> list[tuple[Indices, Value]]:
        """Return the elements of a result that a thread has, and their values."""
        reason = Unsupported("a result has too many elements")
        for layout in self.places.layouts(type_of(atom).shape):
            known = dict(self.values), {w: list(x) for w, x in self.lines.items()}
            loads, used = dict(self.loads), dict(self.used)
            try:
                found = [(indices, self.read(atom, indices)) for indices in layout]
                self._check_owners(found)
                return found
            except Unsupported as error:
                reason = error
                self.values, self.lines = known
                self.loads, self.used = loads, used
        raise reason

    def _check_owners(self, found: list[tuple[Indices, Value]]) -> None:
        """Check that each thread writes of its own sequence, whose length it has."""
        own = self.places.own()[:1]
        if self.masked and any(indices[:1] != own for indices, _ in found):
            raise Unsupported("sequences of several lengths share a result")

    def read(self, atom: Any, indices: Indices) -> Value:
        """Return the value of an element."""
        if is_literal(atom):
            return Value(operations.literal(atom.val, atom.aval.dtype), When.ONCE)
        key = atom, indices
        if key not in self.values:
            found = self._argument if atom in self.arguments else self._computed
            self.values[key] = found(atom, indices)
        return self.values[key]

    def _argument(self, variable: Any, indices: Indices) -> Value:
        i, aval = self.arguments[variable], type_of(variable)
        kind, fixed, inputs = operations.stored_type(aval.dtype), *self.counts[:2]
        if i >= fixed + inputs:
            state = i - fixed - inputs
            if indices != self.state_place(state):
                raise Unsupported("a unit sees the states of others")
            self.used[i] = None
            return Value(f"s{state}", When.STEP)
        if i >= fixed:
            self._check_sequence(aval.shape, indices)
        self.used[i] = None
        offset = self.number(self.places.flat(indices, aval.shape))
        if i < fixed:
            return self._named(When.ONCE, aval, f"Widen(Load(a{i} + {offset}))")
        load = _Load(i, kind, offset)
        name = self.loads.setdefault(load, f"x{len(self.loads)}")
        return Value(f"at.{name}", When.STEP)

    def _check_sequence(self, shape: Shape, indices: Indices) -> None:
        """Check that a thread reads inputs of its own sequence, whose length it has."""
        # Where inputs have an axis of sequences, it comes first.
        of_sequences = self.masked and shape[:1] == self.places.shape[:1]
        if of_sequences and indices[0] != self.places.own()[0]:
            raise Unsupported("it may read the inputs of other sequences")

    def _computed(self, variable: Any, indices: Indices) -> Value:
        eqn, result = self.makers[variable]
        name = eqn.primitive.name
        if name in _SHAPES:
            return _SHAPES[name](self, eqn, indices)
        if name == "split":
            axis, sizes = eqn.params["axis"], eqn.params["sizes"]
            by = int(sum(sizes[:result]))
            return self.read(eqn.invars[0], moved(indices, axis, by))
        if name == "unstack":
            axis, part = eqn.params["axis"], self.places.constant(result)
            return self.read(eqn.invars[0], (*indices[:axis], part, *indices[axis:]))
        shape = type_of(variable).shape
        shapes = [type_of(v).shape for v in eqn.invars]
        if name not in operations.NAMES or not all(
            not each or _is_like(each, shape) for each in shapes
        ):
            raise Unsupported(f"`{name}`", eqn)
        given = [self.read(v, self._of_operand(v, indices)) for v in eqn.invars]
        dtypes = [type_of(v).dtype for v in (*eqn.invars, variable)]
        if name in operations.IDENTITIES:
            return given[0]
        names = [value.name for value in given]
        text = operations.expression(name, eqn.params, dtypes, names)
        if text is None:
            raise Unsupported(f"`{name}`", eqn)
        if dtypes[0] != dtypes[-1]:  # a conversion
            text = operations.rounded(text, dtypes[-1])
        when = max((value.when for value in given), default=When.ONCE)
        return self._named(when, type_of(variable), text)

    def _of_operand(self, atom: Any, indices: Indices) -> Indices:
        """Return the indices of an operand, maybe a scalar or one with short axes."""
        shape = type_of(atom).shape
        return tuple(
            self.places.constant(0) if size == 1 else index
            for index, size in zip(indices, shape, strict=False)
        )

    def _named(self, when: When, aval: Any, text: str) -> Value:
        lines = self.lines[when]
        name = f"{'cv'[when]}{len(lines)}"
        lines.append(f"const {operations.type_of(aval.dtype)} {name} = {text};")
        return Value(name, when)

    def reduced(self, eqn: JaxprEqn, indices: Indices, join: str) -> Value:
        """Return the sum, or another union, of elements along short axes."""
        (operand,), axes = eqn.invars, eqn.params["axes"]
        shape = type_of(operand).shape
        found = None
        for at in over(shape, axes):
            full, rest = [], iter(indices)
            inside = dict(zip(axes, at, strict=True))
            for axis in range(len(shape)):
                fixed = inside.get(axis)
                full.append(
                    next(rest) if fixed is None else self.places.constant(fixed)
                )
            value = self.read(operand, tuple(full))
            if found is None:
                found = value
            else:
                text = join.format(found.name, value.name)
                when = max(found.when, value.when)
                found = self._named(when, type_of(eqn.outvars[0]), text)
        if found is None:
            raise Unsupported(f"`{eqn.primitive.name}` of nothing", eqn)
        return found

    # --------------------------------------------------------------------------- text

    def number(self, index: Index) -> str:
        """Return an index in C++."""
        parts = [
            f"p{k}" if f == 1 else f"p{k} * {f}"
            for k, f in enumerate(index.factors)
            if f
        ]
        if index.constant or not parts:
            parts.append(str(index.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def text(
        self,
        new: list[Value],
        stored: list[list[tuple[Indices, Value]]],
        added: list[list[tuple[Indices, Value]]],
    ) -> Written:
        """Return the whole text."""
        step, (fixed, inputs, states) = self.jaxpr, self.counts
        kinds = [operations.stored_type(type_of(v).dtype) for v in step.invars]
        first = fixed + inputs
        read = [i for i in self.used if i < first]
        arguments = (*sorted(read), *range(first, first + states))
        results = [type_of(v) for v in step.outvars]
        out_kinds = [
            operations.stored_type(aval.dtype)
            if i < states + len(stored)
            else operations.SUMS[aval.dtype.name]
            for i, aval in enumerate(results)
        ]
        parameters = [f"const {kinds[i]}* a{i}" for i in arguments]
        parameters += ["const int* lengths"] * self.masked
        parameters += [f"{kind}* r{i}" for i, kind in enumerate(out_kinds)]
        body = [
            *self._place(),
            *self.lines[When.ONCE],
            *self._begin(first, added, out_kinds[states + len(stored) :]),
            *self._steps(new, stored, added, results[states:]),
            *self._end(added, len(stored), states),
        ]
        fields = [
            f"  {operations.type_of(type_of(step.invars[load.argument]).dtype)} {name};"
            for load, name in self.loads.items()
        ]
        signature = ", ".join([*parameters, "const Loop loop"])
        code = "\n".join(
            [
                "struct Inputs {",
                *fields,
                "};",
                f"OSTINATO_KERNEL void step_loop({signature}) {{",
                *(f"  {line}" for line in body),
                "}",
            ]
        )
        return Written(code, arguments)

    def _place(self) -> list[str]:
        """Return the lines that find the place of the thread."""
        shape = self.places.shape
        lines = [
            "Index place = Block() * ThreadsOfBlock() + ThreadOfBlock();",
            f"if (place >= {self._size(shape)}) return;",
        ]
        for k in range(len(shape) - 1, 0, -1):
            lines.append(f"const Index p{k} = place % {shape[k]};")
            lines.append(f"place /= {shape[k]};")
        lines.append("const Index p0 = place;")
        lines.append("Index length = loop.steps;")
        if self.masked:
            lines.append("const Index given = Load(lengths + p0);")
            lines.append(
                "length = given < 0 ? 0 : given < loop.steps ? given : loop.steps;"
            )
        return lines

    def _begin(
        self,
        first: int,
        added: list[list[tuple[Indices, Value]]],
        sum_kinds: Sequence[str],
    ) -> list[str]:
        """Return the lines before the loop: states, sums and arrays."""
        lines = []
        for i in range(self.counts[2]):
            aval = type_of(self.jaxpr.invars[first + i])
            where = self.number(self.places.flat(self.state_place(i), aval.shape))
            kind = operations.type_of(aval.dtype)
            lines.append(f"{kind} s{i} = Widen(Load(a{first + i} + {where}));")
        for i, (each, kind) in enumerate(zip(added, sum_kinds, strict=True)):
            lines += [f"{kind} sum{i}_{j} = 0;" for j in range(len(each))]
        for load, name in self.loads.items():
            lines.append(
                f"const {load.kind}* const from_{name} = a{load.argument} + "
                f"{load.offset};"
            )
        return lines

    def _steps(
        self,
        new: list[Value],
        stored: list[list[tuple[Indices, Value]]],
        added: list[list[tuple[Indices, Value]]],
        results: Sequence[Any],
    ) -> list[str]:
        """Return the lines of the loop."""
        ahead = self._ahead()
        states = self.counts[2]
        loads = [
            f"next[i].{name} = Widen(Load(from_{name} + t * {self._stride(load)}));"
            for load, name in self.loads.items()
        ]
        stores, clears = [], []
        for i, (each, aval) in enumerate(zip(stored, results, strict=False)):
            for indices, value in each:
                where = self.number(self.places.flat(indices, aval.shape))
                stride = self._size(aval.shape)
                place = f"r{states + i} + ({where}) + t * {stride}"
                guard = self._guard(indices)
                kind = operations.type_of(aval.dtype)
                stores.append(f"{guard}Put({place}, {value.name});")
                clears.append(f"{guard}Put({place}, {kind}(0));")
        sums = [
            f"sum{i}_{j} += {value.name};"
            for i, each in enumerate(added)
            for j, (_, value) in enumerate(each)
        ]
        # New states are all found before the first one is overwritten.
        dtypes = [type_of(v).dtype for v in self.jaxpr.outvars[:states]]
        moves = [
            f"const {operations.type_of(d)} n{i} = {operations.rounded(v.name, d)};"
            for i, (v, d) in enumerate(zip(new, dtypes, strict=True))
        ]
        moves += [f"s{i} = n{i};" for i in range(states)]
        inside = [*self.lines[When.STEP], *stores, *sums, *moves]
        return [
            f"for (Index k = 0; k < length; k += {ahead}) {{",
            f"  Inputs next[{ahead}];",
            "  OSTINATO_UNROLL",
            f"  for (int i = 0; i < {ahead}; ++i) {{",
            "    if (k + i < length) {",
            f"      {_STEP_OF}",
            *(f"      {line}" for line in loads),
            "    }",
            "  }",
            "  OSTINATO_UNROLL",
            f"  for (int i = 0; i < {ahead}; ++i) {{",
            "    if (k + i < length) {",
            f"      {_STEP_OF}",
            "      const Inputs at = next[i];",
            *(f"      {line}" for line in inside),
            "    }",
            "  }",
            "}",
            "for (Index t = length; t < loop.steps; ++t) {",
            *(f"  {line}" for line in clears),
            "}",
        ]

    def _end(
        self,
        added: list[list[tuple[Indices, Value]]],
        num_outputs: int,
        states: int,
    ) -> list[str]:
        """Return the lines after the loop."""
        lines = []
        for i in range(states):
            shape = type_of(self.jaxpr.outvars[i]).shape
            indices = self.state_place(i)
            where = self.number(self.places.flat(indices, shape))
            lines.append(f"{self._guard(indices)}Put(r{i} + {where}, s{i});")
        for i, each in enumerate(added):
            result = states + num_outputs + i
            shape = type_of(self.jaxpr.outvars[result]).shape
            for j, (indices, _) in enumerate(each):
                where = self.number(self.places.flat(indices, shape))
                guard = self._guard(indices)
                lines.append(f"{guard}Put(r{result} + {where}, sum{i}_{j});")
        return lines

    def _ahead(self) -> int:
        """Return the steps whose loads are under way at once."""
        count, ahead = max(1, len(self.loads)), 1
        while ahead < _MOST_AHEAD and 2 * ahead * count * 4 <= _BYTES_AHEAD:
            ahead *= 2
        return ahead

    def _stride(self, load: _Load) -> str:
        return self._size(type_of(self.jaxpr.invars[load.argument]).shape)

    def _size(self, shape: Shape) -> str:
        """Return the number of elements, the same text for any number of sequences."""
        if shape and shape[0] == self.places.shape[0]:
            return f"loop.batch * {math.prod(shape[1:])}"
        return str(math.prod(shape))

    def _guard(self, indices: Indices) -> str:
        """Return the condition that a thread writes an element that several have."""
        owners = " && ".join(f"p{k} == 0" for k in self.places.owners(indices))
        return f"if ({owners}) " if owners else ""


def _is_like(shape: Shape, result: Shape) -> bool:
    """Return whether an operand has the shape of a result, or axes of size 1."""
    return len(shape) == len(result) and all(
        a in (1, b) for a, b in zip(shape, result, strict=True)
    )


# ---------------------------------------------------------------- operations on shapes


def _broadcast(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    operand, axes = eqn.invars[0], eqn.params["broadcast_dimensions"]
    shape = type_of(operand).shape
    found = tuple(
        w.places.constant(0) if size == 1 else indices[axis]
        for size, axis in zip(shape, axes, strict=True)
    )
    return w.read(operand, found)


def _reshape(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    operand, shape = eqn.invars[0], type_of(eqn.outvars[0]).shape
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        raise Unsupported("`reshape` in another order", eqn)
    flat = w.places.flat(indices, shape)
    return w.read(operand, w.places.unflat(flat, type_of(operand).shape))


def _transpose(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    order = eqn.params["permutation"]
    found = [indices[order.index(axis)] for axis in range(len(order))]
    return w.read(eqn.invars[0], tuple(found))


def _slice(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    begins = eqn.params["start_indices"]
    steps = eqn.params["strides"] or (1,) * len(begins)
    found = [
        index.times(step) + begin
        for index, step, begin in zip(indices, steps, begins, strict=True)
    ]
    return w.read(eqn.invars[0], tuple(found))


def _rev(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    found, shape = list(indices), type_of(eqn.outvars[0]).shape
    for axis in eqn.params["dimensions"]:
        found[axis] = found[axis].times(-1) + (shape[axis] - 1)
    return w.read(eqn.invars[0], tuple(found))


def _concatenate(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    axis, begin = eqn.params["dimension"], 0
    for operand in eqn.invars:
        size = type_of(operand).shape[axis]
        inside = moved(indices, axis, -begin)
        if w.places.fits(inside[axis], size):
            return w.read(operand, inside)
        begin += size
    raise Unsupported("it joins arrays that each have a part of the units", eqn)


def _stack(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    axis = eqn.params["axis"]
    which = indices[axis]
    if any(which.factors):
        raise Unsupported("it joins arrays that each have a part of the units", eqn)
    rest = (*indices[:axis], *indices[axis + 1 :])
    return w.read(eqn.invars[which.constant], rest)


def _pad(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    operand, padding = eqn.invars
    found = []
    for index, size, (low, _, between) in zip(
        indices, type_of(operand).shape, eqn.params["padding_config"], strict=True
    ):
        index = index + -low
        least, most = w.places.bounds(index)
        outside = most < 0 or least > (size - 1) * (between + 1)
        if outside:
            return w.read(padding, ())
        if between or not w.places.fits(index, size):
            raise Unsupported("it pads arrays in an unusual way", eqn)
        found.append(index)
    return w.read(operand, tuple(found))


def _iota(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    index, aval = indices[eqn.params["dimension"]], type_of(eqn.outvars[0])
    kind = operations.type_of(aval.dtype)
    return w._named(When.ONCE, aval, f"{kind}({w.number(index)})")


def _sum(w: Writer, eqn: JaxprEqn, indices: Indices) -> Value:
    dtype = type_of(eqn.outvars[0]).dtype
    join = operations.expression("add", {}, [dtype] * 3, ["{}", "{}"])
    assert join is not None, dtype
    return w.reduced(eqn, indices, join)


_SHAPES: dict[str, Callable[[Writer, JaxprEqn, Indices], Value]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "iota": _iota,
    "pad": _pad,
    "reduce_max": lambda w, eqn, at: w.reduced(eqn, at, "Max({}, {})"),
    "reduce_min": lambda w, eqn, at: w.reduced(eqn, at, "Min({}, {})"),
    "reduce_sum": _sum,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
"""Operations that only say which elements are meant, and sums over short axes."""
