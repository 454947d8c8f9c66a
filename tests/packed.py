"""Runs of a case of the operator with packed sequences."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Inputs, make_inputs
from harness import (
    cotangent_of,
    dropout_masks,
    join,
    key_of,
    named,
    rounded,
    spec_of,
    split,
)

import ostinato as ost
from ostinato._rnn import primitive
from ostinato._rnn.call import Operands, Packed, RNNCall
from ostinato._rnn.output import as_state


@dataclasses.dataclass(frozen=True)
class Placement:
    """The indices of tokens: token `n` holds step `time[n]` of sequence `batch[n]`.

    Attributes:
        lengths: int32 `[B]`, the number of tokens of each sequence.
        capacity: the number of all tokens; those of no sequence come last.
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
        """Convert `[B, T, ...]` to tokens; those of no sequence become NaN, or True."""
        rest = (self.capacity - len(self.batch), *a.shape[2:])
        fill = np.full(rest, True if a.dtype == bool else np.nan, a.dtype)
        np_ = _numpy_of(a)
        made = np_.concatenate([np_.asarray(a)[self.batch, self.time], fill])
        return jax.device_put(made)

    def unpack(self, tokens: Any, steps: int) -> Any:
        """Convert tokens to `[B, T, ...]` with zeros in the padding."""
        count = len(self.batch)
        place = np.full((len(self.lengths), steps), count)
        place[self.batch, self.time] = np.arange(count)
        np_, zero = _numpy_of(tokens), np.zeros((1, *tokens.shape[1:]), tokens.dtype)
        return np_.concatenate([np_.asarray(tokens)[:count], zero])[place]

    def assert_rest_is_zero(self, tokens: Any) -> None:
        rest = np.asarray(tokens)[len(self.batch) :].astype(np.float64)
        np.testing.assert_array_equal(rest, np.zeros_like(rest))


def _numpy_of(a: Any) -> Any:
    """Return JAX's numpy inside of a trace, else numpy, which compiles nothing."""
    return jnp if isinstance(a, jax.core.Tracer) else np


def own_lengths(case: Case) -> tuple[int, ...]:
    return (case.steps,) * case.batch if case.lengths is None else case.lengths


@dataclasses.dataclass(frozen=True)
class PackedRun:
    """A run of `case`, with its own lengths, on packed sequences."""

    case: Case
    place: Placement
    dtype: Any = "float64"

    def inputs(self) -> Inputs:
        """Return the inputs with arrays of tokens, and the steps of each sequence."""
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
        masks = dropout_masks(self.case, key_of(self.case))
        return tuple(map(self.place.pack, masks))

    def arguments(self) -> tuple:
        return self.inputs(), jax.device_put(self.place.lengths), self.masks()

    def named(self, output: Any, grads: Any) -> dict[str, np.ndarray]:
        """Return results and gradients by name, batch-major; check unused capacity."""
        steps, (weights, x, h_0, c_0) = self.case.steps, grads
        for tokens in (output.y, x):
            self.place.assert_rest_is_zero(tokens)
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
    state = join(made.h_0, made.c_0)
    return state if isinstance(state, tuple) else (state,)


def value_and_pullback(call: RNNCall):
    """Return a compiled function from `made` to values and all gradients."""

    @jax.jit
    def run(made: Inputs, segment_lengths: Any, masks: tuple):
        def at(weights, x, h_0, c_0):
            given = made._replace(weights=weights, x=x, h_0=h_0, c_0=c_0)
            return operator(call, given, segment_lengths, masks)

        out, pull = jax.vjp(at, made.weights, made.x, made.h_0, made.c_0)
        return out, pull(cotangent_of(made))

    return run


def on_packed(case: Case, backend: str | None, **changes: Any):
    """Return the function of `closures.ours`, computed on packed sequences."""
    place = Placement.of(own_lengths(case), case.steps * case.batch)
    made, segment_lengths, masks = PackedRun(case, place).arguments()
    call = call_of(case, backend, **changes)

    def run(p: Any):
        given = made._replace(**p._asdict())._replace(x=place.pack(p.x))
        out = operator(call, given, segment_lengths, masks)
        return place.unpack(out.y, case.steps), *split(out.state)

    return run
