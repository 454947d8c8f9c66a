"""Steps of a loop that the native library runs on arrays of numpy, call by call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _native
from .._rnn.cpu import address, raise_error
from .._sessions import MOST_COPIED
from .description import operations_of
from .jaxprs import type_of
from .loop_programs import lower_forward
from .native import check_available
from .programs.lower import LARGEST_GIVEN
from .programs.lowered import Lowered
from .programs.program import Place
from .programs.values import Unsupported
from .scan import PreparedLoop
from .xla import Loop

_ENDLESS = 2**62
"""More steps than a session ever makes."""
LARGEST_STATE = 2 * LARGEST_GIVEN
"""The largest integer in a state, for which programs have room between any steps."""
_FIELDS = (
    "numbers num_numbers constants num_constants wide steps batch lengths operands "
    "num_operands results num_results"
)


class Call(ctypes.Structure):
    """A call of `ostinato_step_run`, `StepStreamCall` in native/ffi/step_stream.cc."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS.split()]


class Session:
    """A loop over a step, and states that its calls move.

    Args:
        prepared: the loop over the step.
        batch: the number of sequences, B.

    Attributes:
        states: of all sequences, `[B, ...]`, in the types that the library has.
        inputs: which inputs of the step it reads, by position.
        description: what runs at a step.

    Raises:
        Unsupported: the native library cannot run the step, or not without end.
    """

    def __init__(self, prepared: PreparedLoop, batch: int) -> None:
        self.batch, self.inputs = batch, prepared.kept
        self._prepared, self._lowered = prepared, _lower(prepared)
        lowered, step = self._lowered, prepared.step
        self.description = operations_of(lowered)
        self._first = step.num_invariant, step.num_invariant + step.num_inputs
        states = [np.asarray(a) for a in prepared.states]
        _check_integers(states, LARGEST_STATE)
        self.states = [np.array(a, _type(a.dtype, lowered), order="C") for a in states]
        invariant = [self._invariant(i, a) for i, a in enumerate(prepared.invariant)]
        self._program = (
            np.array(lowered.program.numbers, np.int64),
            np.array(lowered.program.constants, np.float64),
        )
        # A step has arrays of its own, so that their addresses stay.
        self._at = [self._empty(1, i) for i in range(step.num_inputs)]
        self._out = self._results(1)
        self._arguments = [*invariant, *self._at, *self.states]
        self._at_step = [a[0] for a in self._at]
        self._size = sum(a.nbytes for a in (*self._at, *self._out))
        self._out_step = self._direct()
        self._lengths = np.ones(batch, np.int32)
        self._address = address(self._lengths)
        self._step = self._first_call()
        self._by_reference = ctypes.byref(self._step)
        library = _native.status().library
        assert library is not None
        self._run = library.ostinato_step_run
        # An array of numpy is no part of the garbage collector's cycles: it ends after
        # everything that may still make a call, in a `__del__` or a thread.
        self._pointer = np.zeros(1, np.int64)
        raise_error(
            library.ostinato_step_open(self._by_reference, address(self._pointer))
        )
        self._session = int(self._pointer[0])
        close = library.ostinato_step_close
        weakref.finalize(self._pointer, close, self._session).atexit = False

    def step(
        self, inputs: Sequence[np.ndarray], active: np.ndarray | None
    ) -> list[np.ndarray]:
        """Run one step.

        Args:
            inputs: the inputs of the step, those that it reads, `[B, ...]`.
            active: bool `[B]`; None means True everywhere.

        Returns:
            The outputs `[B, ...]`, new arrays, 0 where a sequence is not active.
        """
        if self._size > MOST_COPIED:
            lengths = None if active is None else active.astype(np.int32)
            return [a[0] for a in self.chunk([a[None] for a in inputs], 1, lengths)]
        for own, a in zip(self._at_step, inputs, strict=True):
            np.copyto(own, a, casting="unsafe")
        if active is None:
            self._step.lengths = 0
        else:
            np.copyto(self._lengths, active)
            self._step.lengths = self._address
        raise_error(self._run(self._session, self._by_reference))
        if self._out_step is not None:
            return [a.copy() for a in self._out_step]
        valid = None if active is None else active[None]
        given = [a[None] for a in inputs]
        return [a[0] for a in self._outputs(given, self._out, valid, copy=True)]

    def chunk(
        self, inputs: Sequence[np.ndarray], steps: int, lengths: np.ndarray | None
    ) -> list[np.ndarray]:
        """Run some steps.

        Args:
            inputs: the inputs of the steps, those that they read, `[T, B, ...]`.
            steps: T.
            lengths: int32 `[B]`, the steps of each sequence; None means T.

        Returns:
            The outputs `[T, B, ...]`, 0 where a sequence has no step.
        """
        arrays = [
            np.require(a, own.dtype, ("C", "ALIGNED"))
            for own, a in zip(self._at, inputs, strict=True)
        ]
        results = self._results(steps)
        tables = [table.copy() for table in self._tables]
        for table, rows, given in zip(
            tables, self._rows, (arrays, results), strict=True
        ):
            for row, i in rows:
                table[row, :2] = address(given[i]), given[i].size
        call = Call.from_buffer_copy(self._step)
        call.steps = steps
        call.lengths = 0 if lengths is None else address(lengths)
        call.operands, call.results = map(address, tables)
        raise_error(self._run(self._session, ctypes.byref(call)))
        valid = None if lengths is None else np.arange(steps)[:, None] < lengths
        return self._outputs(inputs, results, valid)

    def _invariant(self, i: int, value: Any) -> np.ndarray:
        """Return an argument that does not change, as the library reads it."""
        a, kind = np.asarray(value), self._lowered.given[i]
        _check_integers([a], LARGEST_GIVEN)
        a = a if kind.axis is None else np.moveaxis(a, kind.axis, 0)
        a = a.T if kind.turned else a
        return np.ascontiguousarray(a, self._lowered.type_of_argument(i, a.dtype))

    def _empty(self, steps: int, i: int) -> np.ndarray:
        """Return an array for an input of some steps."""
        aval = type_of(self._prepared.step.jaxpr.invars[self._first[0] + i])
        return np.empty((steps, *aval.shape), _type(aval.dtype, self._lowered))

    def _results(self, steps: int) -> list[np.ndarray]:
        """Return arrays for the outputs of some steps."""
        return [
            np.empty((steps, *r.shape), _type(r.dtype, self._lowered))
            for r in self._lowered.results
            if r.place is Place.OUTPUT
        ]

    def _direct(self) -> list[np.ndarray] | None:
        """Return the outputs of a step if the library leaves them as they are wanted.

        Otherwise some are inputs, of another type, or the same for all sequences.
        """
        arrays = []
        for source in self._lowered.sources[len(self.states) :]:
            if source is None or source < 0:
                return None
            kind, a = (
                self._lowered.results[source],
                self._out[source - len(self.states)],
            )
            if kind.axis is None or a.dtype != kind.dtype:
                return None
            arrays.append(a[0])
        return arrays

    def _first_call(self) -> Call:
        """Return the call of a step.

        Sets `_tables`, of its operands and results, and `_rows`: which of these rows
        are inputs or outputs, by position, and change from chunk to chunk.
        """
        lowered, (first, end) = self._lowered, self._first
        count = len(self.states)
        self._tables = (
            _table([self._arguments[i] for i in lowered.arguments]),
            # New states are written where the old ones are.
            _table([*self.states, *self._out]),
        )
        self._rows = (
            [
                (r, i - first)
                for r, i in enumerate(lowered.arguments)
                if first <= i < end
            ],
            [(count + i, i) for i in range(len(self._out))],
        )
        call = Call(
            wide=lowered.dtype == np.float64,
            steps=1,
            batch=self.batch,
            num_numbers=self._program[0].size,
            num_constants=self._program[1].size,
            num_operands=len(self._tables[0]),
            num_results=len(self._tables[1]),
        )
        call.numbers, call.constants = map(address, self._program)
        call.operands, call.results = map(address, self._tables)
        return call

    def _outputs(
        self,
        inputs: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        valid: np.ndarray | None,
        copy: bool = False,
    ) -> list[np.ndarray]:
        """Return what the step returns; `valid [T, B]` says of which sequences."""
        lowered, count = self._lowered, len(self.states)
        found, taken = [], set()
        for source in lowered.sources[count:]:
            assert source is not None
            if source < 0:  # an input
                a, is_zero = inputs[-1 - source - self._first[0]], False
                a = np.array(a)
            else:
                kind, a = lowered.results[source], results[source - count]
                # Outputs that are equal are one result, of which each has its own.
                a = a.astype(kind.dtype, copy=copy or source in taken)
                is_zero = kind.axis is not None  # of the other sequences
                taken.add(source)
            if valid is not None and not is_zero:
                a = a.copy()
                a[~valid] = 0
            found.append(a)
        return found


def _lower(prepared: PreparedLoop) -> Lowered:
    """Return the program of a step that runs without end.

    Raises:
        Unsupported: the native library cannot run it.
    """
    loop = Loop(prepared.step, _ENDLESS, _ENDLESS, False, None, False, "cpu")
    if prepared.precomputed is not None:
        raise Unsupported("it has operations of inputs that the native loop lacks")
    check_available(loop)
    step = prepared.step
    inputs = step.jaxpr.invars[step.num_invariant :][: step.num_inputs]
    for variable in inputs:
        aval = type_of(variable)
        if not aval.shape:
            raise Unsupported("it reads `t`, which a session counts without end")
        if jnp.issubdtype(aval.dtype, jnp.integer) and jnp.iinfo(aval.dtype).bits > 16:
            raise Unsupported(f"it has inputs of {aval.dtype}")
    lowered = lower_forward(loop, None)
    for result in lowered.results:
        if result.axis not in (None, 0) or result.added or result.turned:
            raise Unsupported("its results are laid out in another way")
    return lowered


def largest(a: np.ndarray) -> int:
    """Return the largest absolute value of integers; 0 of other values."""
    if not jnp.issubdtype(a.dtype, jnp.integer) or a.size == 0:
        return 0
    return max(int(a.max()), -int(a.min()))


def _check_integers(arrays: Sequence[np.ndarray], most: int) -> None:
    """Raise `Unsupported` where floats cannot stand for integers of operands."""
    if any(largest(a) > most for a in arrays):
        raise Unsupported(f"it has integers above {most}")


def _table(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return address, elements and bytes of an element of arrays, `[arrays, 3]`."""
    rows = [(address(a), a.size, a.itemsize) for a in arrays]
    return np.array(rows, np.int64).reshape(-1, 3)


def _type(dtype: Any, lowered: Lowered) -> Any:
    """Return the type in which the library has values that change."""
    return np.dtype(dtype if dtype == jnp.bfloat16 else lowered.dtype)
