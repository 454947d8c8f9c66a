"""A step, taken apart: what each thread of a kernel does, and what XLA does after it.

What is added up over all sequences becomes a sum of each thread over its own steps,
which XLA adds up. A result that depends on several threads, such as the gradient of a
number that all units of a sequence share, is computed after the loop, for all steps at
once, of what the threads have written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..jaxprs import (
    evaluate,
    is_literal,
    jaxpr_of,
    needed,
    split_at,
    struct,
    type_of,
    variables,
)
from ..programs.values import Unsupported
from . import operations, text
from .indices import Places

_LINEAR = frozenset(
    "add_any broadcast_in_dim concatenate convert_element_type copy neg reduce_sum "
    "reshape rev slice split squeeze transpose".split()
)
"""Operations that may follow after all steps have been added up."""
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = frozenset(
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit "
    "remat2".split()
)


class Parts(NamedTuple):
    """A step, taken apart.

    Attributes:
        step: what threads do: from invariant values, inputs and states, to new states,
            outputs, and what is added up over all steps.
        counts: how many of its arguments are invariant, inputs and states.
        num_outputs: how many outputs it has.
        places: the elements of its states.
        totals: the positions of further states, which only have something added to
            them: they are the first of the sums.
        of_sums: from what `step` adds up to sums.
        after: from the invariant values and the inputs, and outputs of `step`, all of
            one step, to further outputs and values to add up.
        outputs: where each output of the whole step is: among the outputs of `step`,
            or as `-1 - i` among the results of `after`.
        sums: the same for values to add up, among the results of `of_sums`.
    """

    step: Jaxpr
    counts: text.Step
    num_outputs: int
    places: Places
    totals: tuple[int, ...]
    of_sums: ClosedJaxpr
    after: ClosedJaxpr
    outputs: tuple[int, ...]
    sums: tuple[int, ...]


def take_apart(
    step: ClosedJaxpr, counts: text.Step, num_outputs: int, masked: bool
) -> Parts:
    """Take a step apart.

    Args:
        step: from invariant values, inputs and states, to new states, outputs, and what
            is added up over all steps.
        counts: how many of its arguments are invariant, inputs and states.
        num_outputs: how many outputs it has.
        masked: whether sequences have lengths.

    Raises:
        Unsupported: the step does not compute each element of a state by itself.
    """
    flat = _flattened(step)
    if masked:
        _check_sizes(flat, counts)
    jaxpr, counts, totals = _without_totals(flat, counts, num_outputs)
    found = _Finder(jaxpr, counts, masked)
    num_states = counts[2]
    states, outputs, sums = split_at(
        jaxpr.outvars, [num_states, num_states + num_outputs]
    )
    of_outputs = [found.output(atom) for atom in outputs]
    of_sums = [found.sum(atom) for atom in sums]
    places = _places(jaxpr, counts)
    results = [*states, *found.written, *found.added]
    first = jaxpr.invars[: sum(counts[:2])]
    return Parts(
        jaxpr.replace(eqns=needed(jaxpr.eqns, results), outvars=results),
        counts,
        len(found.written),
        places,
        totals,
        jaxpr_of(_after(jaxpr.eqns, found.added), list(found.added), found.linear),
        jaxpr_of(
            _after(jaxpr.eqns, [*first, *found.written]),
            [*first, *found.written],
            found.late,
        ),
        tuple(of_outputs),
        tuple(of_sums),
    )


class _Finder:
    """What threads write and add up, so that all results can be made of it.

    Attributes:
        written: the outputs of threads.
        added: what threads add up.
        linear: sums that are made of what is added up.
        late: results that are made, step by step, of outputs.
    """

    def __init__(self, jaxpr: Jaxpr, counts: text.Step, masked: bool) -> None:
        self.writer = text.Writer(jaxpr, counts, masked, _places(jaxpr, counts))
        self.masked = masked
        self.given = set(jaxpr.invars[: sum(counts[:2])])
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.written: dict[Any, None] = {}
        self.added: dict[Any, None] = {}
        self.linear: list[Any] = []
        self.late: list[Any] = []

    def output(self, atom: Any) -> int:
        """Return where an output is; see `Parts.outputs`."""
        if not is_literal(atom) and self._is_dealt(atom):
            self.written.setdefault(atom)
            return list(self.written).index(atom)
        shape = type_of(atom).shape
        if self.masked and shape[:1] != self.writer.places.shape[:1]:
            raise Unsupported("sequences of several lengths share a result")
        return self._late(atom)

    def sum(self, atom: Any) -> int:
        """Return where a sum is; see `Parts.sums`."""
        before = dict(self.added)
        try:
            self._add(atom)
        except Unsupported:
            self.added = before
            if self.masked:
                raise
            return self._late(atom)
        self.linear.append(atom)
        return len(self.linear) - 1

    def _is_dealt(self, variable: Any) -> bool:
        try:
            self.writer.dealt(variable)
        except Unsupported:
            return False
        return True

    def _add(self, atom: Any) -> None:
        """Find what a sum can be made of when all steps have run."""
        if is_literal(atom):
            if atom.val != 0:
                raise Unsupported("a number is added at each step")
            return
        if atom in self.added:
            return
        name = type_of(atom).dtype.name
        if name not in operations.SUMS:
            raise Unsupported(f"it adds up values of {name}")
        try:
            self.writer.dealt(atom)
        except Unsupported:
            eqn = self.makers.get(atom)
            if eqn is None or eqn.primitive.name not in _LINEAR or _widens(eqn):
                raise
            for v in eqn.invars:
                self._add(v)
        else:
            self.added[atom] = None

    def _late(self, atom: Any) -> int:
        """Find what a result can be made of, step by step."""
        seen: set[Any] = set()

        def find(atom: Any) -> None:
            if is_literal(atom) or atom in self.given or atom in seen:
                return
            seen.add(atom)
            try:
                self.writer.dealt(atom)
            except Unsupported:
                if atom not in self.makers:
                    raise
                for v in self.makers[atom].invars:
                    find(v)
            else:
                self.written.setdefault(atom)

        find(atom)
        self.late.append(atom)
        return -len(self.late)


def _without_totals(
    jaxpr: Jaxpr, counts: text.Step, num_outputs: int
) -> tuple[Jaxpr, text.Step, tuple[int, ...]]:
    """Return a step that has what it adds to totals in front of its sums.

    Totals are states of another shape than the places, which nothing but their own sum
    reads.
    """
    first, num_states = sum(counts[:2]), counts[2]
    places, totals, added = _places(jaxpr, counts), [], []
    makers: dict[Any, JaxprEqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
    for i in range(num_states):
        state, new = jaxpr.invars[first + i], jaxpr.outvars[i]
        eqn = None if is_literal(new) else makers.get(new)
        summed = type_of(state).dtype.name in operations.SUMS
        if type_of(state).shape == places.shape or eqn is None or not summed:
            continue
        others = [v for v in eqn.invars if v is not state]
        if eqn.primitive.name not in ("add", "add_any") or len(others) != 1:
            continue
        readers = [e for e in jaxpr.eqns if {state, new} & set(variables(e))]
        results = [v for v in jaxpr.outvars if v is state or v is new]
        like = not is_literal(others[0]) and type_of(others[0]) == type_of(state)
        if readers == [eqn] and len(results) == 1 and like:
            totals.append(i)
            added += others
    kept = [i for i in range(num_states) if i not in totals]
    _, outputs, sums = split_at(jaxpr.outvars, [num_states, num_states + num_outputs])
    results = [*(jaxpr.outvars[i] for i in kept), *outputs, *added, *sums]
    arguments = [*jaxpr.invars[:first], *(jaxpr.invars[first + i] for i in kept)]
    return (
        jaxpr.replace(invars=arguments, outvars=results),
        (*counts[:2], len(kept)),
        tuple(totals),
    )


def _widens(eqn: JaxprEqn) -> bool:
    """Return whether sums of what an equation returns are wider than of its operand."""
    types = [type_of(v).dtype.name for v in (eqn.invars[0], eqn.outvars[0])]
    before, after = (operations.SUMS.get(name) for name in types)
    return before != after


def _after(eqns: Sequence[JaxprEqn], given: Iterable[Any]) -> list[JaxprEqn]:
    """Return the equations that need only given variables."""
    known, found = set(given), []
    for eqn in eqns:
        if known.issuperset(variables(eqn)) and known.isdisjoint(eqn.outvars):
            found.append(eqn)
            known.update(eqn.outvars)
    return found


def _check_sizes(jaxpr: Jaxpr, counts: text.Step) -> None:
    """Check that an axis with the size of the batch is that of sequences.

    A thread stops at the end of its own sequence, so it has to know which that is.
    """
    batch = _places(jaxpr, counts).shape[0]
    if batch == 1:
        return
    read = {v for eqn in jaxpr.eqns for v in variables(eqn)}
    fixed = [v for v in jaxpr.invars[: counts[0]] if v in read]
    known = {v for v in jaxpr.invars if type_of(v).shape[:1] == (batch,)}
    changing = (v for v in jaxpr.invars[counts[0] :] if v in read)
    shapes = [type_of(v).shape[1:] for v in changing]
    shapes += [type_of(v).shape for v in fixed]
    for eqn in jaxpr.eqns:
        # What is the same for all sequences may be repeated for each of them.
        repeats = not variables(eqn) or (
            eqn.primitive.name == "broadcast_in_dim"
            and 0 not in eqn.params["broadcast_dimensions"]
        )
        for v in eqn.outvars:
            shape = type_of(v).shape
            if repeats or not known.isdisjoint(variables(eqn)):
                known.add(v)
                shape = shape[1:]
            shapes.append(shape)
    if any(batch in shape for shape in shapes):
        raise Unsupported("with lengths, it has another axis as long as the batch")


def _places(jaxpr: Jaxpr, counts: text.Step) -> Places:
    """Return the places of threads: the elements of the largest state."""
    states = [type_of(v).shape for v in jaxpr.invars[sum(counts[:2]) :]]
    shape = max(states, key=math.prod, default=())
    if not shape:
        raise Unsupported("it has no states")
    return Places(shape)


def _flattened(step: ClosedJaxpr) -> Jaxpr:
    """Return a step without inner jaxprs."""

    def hook(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if eqn.primitive.name not in _CALLS:
            return None
        inner = next(eqn.params[name] for name in _INNER if name in eqn.params)
        closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        return evaluate(closed, inputs, hook)

    avals = [struct(v.aval) for v in step.jaxpr.invars]
    if not all(isinstance(size, int) for a in avals for size in a.shape):
        raise Unsupported("it needs sizes that are known when a program is compiled")
    closed = jax.make_jaxpr(lambda *given: evaluate(step, given, hook))(*avals)
    if closed.consts:
        raise Unsupported("it has constant arrays")
    return closed.jaxpr
