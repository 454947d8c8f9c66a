"""A loop over a step as one kernel: what is static, its launch and its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._cuda import device, kernels, plan
from ..._cuda.launch import launch
from ..._padding import is_step, select
from ..._rnn.accumulation import accumulation_dtype
from ..._typing import Array
from ..jaxprs import evaluate, jaxpr_of, split_at, type_of
from ..programs.values import Unsupported
from . import text
from .parts import Parts, take_apart


class Results(NamedTuple):
    """What a loop returns: final states, outputs of all steps, and sums over steps."""

    states: list[Array]
    outputs: list[Array]
    sums: list[Array]


class Call(NamedTuple):
    """The arguments of a loop.

    Attributes:
        invariant: the invariant values.
        inputs: of all steps, time first. Those that no step reads may be anything.
        states: the initial states.
        lengths: int32 `[B]`; past them, outputs are 0. None if all steps run.
        length: the number of steps.
        reverse: whether the last step runs first.
    """

    invariant: Sequence[Array]
    inputs: Sequence[Array]
    states: Sequence[Array]
    lengths: Array | None
    length: int
    reverse: bool


class Kernel(NamedTuple):
    """A loop over a step as one kernel.

    Attributes:
        parts: the step, taken apart.
        masked: whether sequences have lengths.
        text: of the kernel.
        arguments: which arguments of `parts.step` the kernel reads.
    """

    parts: Parts
    masked: bool
    text: kernels.Text
    arguments: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return how many elements it has a thread for, maybe none."""
        return math.prod(self.parts.places.shape)

    def run(self, call: Call) -> Results:
        """Launch the kernel, unless there is nothing to compute."""
        if self.elements == 0:
            return self.by_xla(call)
        gpu, reason = device.status()
        assert gpu is not None, reason
        states = self._states(call)
        given = [*call.invariant, *call.inputs, *states]
        out = launch(
            kernels.compiled(self.text, gpu.arch),
            "step_loop",
            plan.step_loop(self.elements, gpu),
            [*(given[i] for i in self.arguments), *self._lengths(call)],
            self._types(call.length),
            (states[0].shape[0], call.length, call.reverse),
        )
        return self._finished(call, out)

    def by_xla(self, call: Call) -> Results:
        """Return by `lax.scan` what `run` has to agree with."""
        first_sum = self.parts.counts[2] + self.parts.num_outputs
        sums = [jnp.zeros(a.shape, a.dtype) for a in self._types(1)[first_sum:]]
        step = ClosedJaxpr(self.parts.step, ())

        def body(carry: Any, at: Any) -> Any:
            (old, sums), (inputs, valid) = carry, at
            results = evaluate(step, [*call.invariant, *inputs, *old])
            new, outputs, added = split_at(results, [len(old), first_sum])
            if valid is not None:
                new = select(valid, new, old)
                outputs, added = select(valid, outputs), select(valid, added)
            sums = [s + a.astype(s.dtype) for s, a in zip(sums, added, strict=True)]
            return (new, sums), outputs

        (final, sums), outputs = lax.scan(
            body,
            (self._states(call), sums),
            (list(call.inputs), self._valid(call)),
            length=call.length,
            reverse=call.reverse,
        )
        return self._finished(call, [*final, *outputs, *sums])

    def alone(self) -> Kernel:
        """Return a kernel whose results are what threads write, without totals."""
        parts = self.parts
        added = range(len(parts.step.outvars) - parts.counts[2] - parts.num_outputs)
        sums = parts.step.outvars[len(parts.step.outvars) - len(added) :]
        return self._replace(
            parts=parts._replace(
                totals=(),
                of_sums=jaxpr_of((), sums, sums),
                after=jaxpr_of((), (), ()),
                outputs=tuple(range(parts.num_outputs)),
                sums=tuple(added),
            )
        )

    def _states(self, call: Call) -> list[Array]:
        """Return the states but the totals."""
        return [s for i, s in enumerate(call.states) if i not in self.parts.totals]

    def _lengths(self, call: Call) -> list[Array]:
        return [] if call.lengths is None else [call.lengths]

    def _valid(self, call: Call) -> Array | None:
        """Return which sequences have which steps, bool `[T, B]`."""
        return None if call.lengths is None else is_step(call.lengths, call.length, 0)

    def _types(self, length: int) -> list[jax.ShapeDtypeStruct]:
        """Return the types of what the kernel writes."""
        num_states, num_outputs = self.parts.counts[2], self.parts.num_outputs
        states, outputs, added = split_at(
            [type_of(v) for v in self.parts.step.outvars],
            [num_states, num_states + num_outputs],
        )
        return [
            *states,
            *(jax.ShapeDtypeStruct((length, *a.shape), a.dtype) for a in outputs),
            *(
                jax.ShapeDtypeStruct(a.shape, accumulation_dtype(a.dtype))
                for a in added
            ),
        ]

    def _finished(self, call: Call, out: Sequence[Array]) -> Results:
        """Return the results of the whole step, of those of the kernel."""
        parts = self.parts
        num_states = parts.counts[2]
        states, written, added = split_at(
            out, [num_states, num_states + parts.num_outputs]
        )
        late = self._late(call, written)
        linear = [_wide(a) for a in evaluate(parts.of_sums, added, _without_rounding)]
        valid = self._valid(call)
        outputs = [
            written[i] if i >= 0
            else late[-1 - i] if valid is None
            else select(valid, late[-1 - i])
            for i in parts.outputs
        ]  # fmt: skip
        sums = [
            linear[i] if i >= 0 else jnp.sum(_wide(late[-1 - i]), axis=0)
            for i in parts.sums
        ]
        totals, sums = split_at(sums, [len(parts.totals)])
        for i, total in zip(parts.totals, totals, strict=True):
            before = call.states[i]
            total = before.astype(total.dtype) + total
            states.insert(i, total.astype(before.dtype))
        return Results(states, outputs, sums)

    def _late(self, call: Call, written: Sequence[Array]) -> list[Array]:
        """Return the results of `parts.after`, of all steps."""
        after = self.parts.after
        if not after.jaxpr.outvars:
            return []

        def of_step(at: Sequence[Array]) -> list[Array]:
            return [jnp.asarray(a) for a in evaluate(after, [*call.invariant, *at])]

        every = [*call.inputs, *written]
        return jax.vmap(of_step, axis_size=call.length)(every)


def make(
    step: ClosedJaxpr, counts: text.Step, num_outputs: int, masked: bool
) -> Kernel:
    """Make the kernel of a loop over a step; see `parts.take_apart`.

    Raises:
        Unsupported: the step does not compute each element of a state by itself.
    """
    try:
        parts = take_apart(step, counts, num_outputs, masked)
        written = text.write(
            parts.step, parts.counts, parts.num_outputs, masked, parts.places
        )
    except RecursionError:
        raise Unsupported("too many of its operations follow one another") from None
    return Kernel(parts, masked, kernels.step_loop(written.code), written.arguments)


def _wide(a: Any) -> Array:
    return jnp.asarray(a, accumulation_dtype(jnp.result_type(a)))


def _without_rounding(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Return the operand of a conversion: sums are wider than what they are made of."""
    return inputs if eqn.primitive.name == "convert_element_type" else None
