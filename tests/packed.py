"""A case of the operator with its sequences one after another: in, run, out again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Inputs, make_inputs
from harness import (
    cotangent_of,
    keep_masks,
    key_of,
    named,
    rounded,
    spec_of,
    split,
)

import ostinato as ost
from ostinato._rnn import primitive
from ostinato._rnn.api import as_state
from ostinato._rnn.call import Operands, Packed, RNNCall


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where `[B, T]` stands in rows: entry `[batch[r], time[r]]` in row `r`.

    Attributes:
        lengths: int32 `[B]`, the rows of each sequence.
        capacity: of all rows; what is no sequence's comes last.
        batch: `[sum(lengths)]`.
        time: `[sum(lengths)]`.
    """

    lengths: np.ndarray
    capacity: int
    batch: np.ndarray
    time: np.ndarray

    @classmethod
    def of(cls, lengths: Any, capacity: int) -> "Placement":
        pairs = [(b, t) for b, n in enumerate(lengths) for t in range(n)]
        assert len(pairs) <= capacity
        batch, time = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls(np.array(lengths, np.int32), capacity, batch, time)

    def pack(self, a: Any) -> Any:
        """`[B, T, ...]` as rows; what is no sequence's is NaN, or True."""
        rest = (self.capacity - len(self.batch), *a.shape[2:])
        fill = jnp.full(rest, True if a.dtype == bool else jnp.nan, a.dtype)
        return jnp.concatenate([jnp.asarray(a)[self.batch, self.time], fill])

    def unpack(self, rows: Any, steps: int) -> Any:
        """Rows as `[B, T, ...]`, zeros where they have nothing."""
        made = jnp.zeros((len(self.lengths), steps, *rows.shape[1:]), rows.dtype)
        return made.at[self.batch, self.time].set(rows[: len(self.batch)])

    def assert_rest_is_zero(self, rows: Any) -> None:
        rest = np.asarray(rows[len(self.batch) :], np.float64)
        np.testing.assert_array_equal(rest, np.zeros_like(rest))


def own_lengths(case: Case) -> tuple[int, ...]:
    return (case.steps,) * case.batch if case.lengths is None else case.lengths


@dataclasses.dataclass(frozen=True)
class PackedRun:
    """What `case` is on rows: its own lengths, each with so many rows."""

    case: Case
    place: Placement
    dtype: Any = "float64"

    def inputs(self) -> Inputs:
        """Arrays of rows, and the steps of each sequence."""
        made = rounded(make_inputs(self.case), self.dtype)
        pack = self.place.pack
        return made._replace(
            x=pack(made.x),
            dy=pack(made.dy),
            resets=None if made.resets is None else pack(made.resets),
            seq_lengths=jnp.array(own_lengths(self.case), jnp.int32),
        )

    def masks(self) -> tuple:
        if not self.case.keyed:
            return ()
        return tuple(map(self.place.pack, keep_masks(self.case, key_of(self.case))))

    def arguments(self) -> tuple:
        return self.inputs(), jnp.asarray(self.place.lengths), self.masks()

    def named(self, output: Any, grads: Any) -> dict[str, np.ndarray]:
        """Results and gradients by name, batch-major; the rest of the rows is zero."""
        steps, (weights, x, h_0, c_0) = self.case.steps, grads
        for rows in (output.y, x):
            self.place.assert_rest_is_zero(rows)
        output = output._replace(y=self.place.unpack(output.y, steps))
        grads = weights, self.place.unpack(x, steps), h_0, c_0
        return named(self.case, output, grads)


def call_of(case: Case, backend: Any, **changes: Any) -> RNNCall:
    packed = Packed(case.steps)
    return RNNCall(spec_of(case), backend=backend, packed=packed, **changes)


def operator(call: RNNCall, made: Inputs, segment_lengths: Any, masks: tuple):
    operands = Operands(
        *(made.weights, made.x, states_of(made)),
        seq_lengths=made.seq_lengths,
        segment_lengths=segment_lengths,
        resets=made.resets,
        dropout_masks=masks,
    )
    (y, states), _ = primitive.run(call, operands)
    return ost.RNNOutput(y, as_state(states))


def states_of(made: Any) -> tuple:
    return tuple(a for a in (made.h_0, made.c_0) if a is not None)


def value_and_pullback(call: RNNCall):
    """One compiled function: values and all gradients for the cotangents in `made`."""

    @jax.jit
    def run(made: Inputs, segment_lengths: Any, masks: tuple):
        def at(weights, x, h_0, c_0):
            given = made._replace(weights=weights, x=x, h_0=h_0, c_0=c_0)
            return operator(call, given, segment_lengths, masks)

        out, pull = jax.vjp(at, made.weights, made.x, made.h_0, made.c_0)
        return out, pull(cotangent_of(made))

    return run


def on_packed(case: Case, backend: str | None, **changes: Any):
    """As `closures.ours`: from `Primal` to `(y, h_n, c_n or None)`, batch-major."""
    place = Placement.of(own_lengths(case), case.steps * case.batch)
    made, segment_lengths, masks = PackedRun(case, place).arguments()
    call = call_of(case, backend, **changes)

    def run(p: Any):
        given = made._replace(**p._asdict())._replace(x=place.pack(p.x))
        out = operator(call, given, segment_lengths, masks)
        return place.unpack(out.y, case.steps), *split(out.state)

    return run
