"""`LinearCell`, the base of cells whose state follows a linear recurrence.

Such a cell runs step by step, as every cell does, and over whole sequences by
`ostinato.linear_recurrence`.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from .. import _padding
from .._linear.api import linear_recurrence
from .._linear.primitive import linear_p
from .._recurrent.protocol import RecurrentOutput, SequenceOptions, overrides_step
from .._typing import Array, Backend
from .base import SizedCell


class LinearCell(SizedCell):
    """A cell with `h_t = a_t h_{t-1} + b_t`, where a and b follow from the inputs.

    A subclass defines `terms` and `read`, on results of `prepare` and `precompute`.
    """

    step_methods = ("__call__", "step")  # a subclass may define all others

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors, `[..., H]` or `[H]`, and the inputs of the state."""
        raise NotImplementedError(f"{type(self).__name__} does not define `terms`")

    def read(self, params: Any, h: Array, inputs: Any) -> Array:
        """Return the outputs for states `[..., H]`, in the dtype of sums."""
        raise NotImplementedError(f"{type(self).__name__} does not define `read`")

    def checked_state(self, states: Any, batch: int, params: Any) -> Array:
        """Check the state `h [B, H]` and return it."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def output_dtype(self, params: Any) -> Any:
        """Return the dtype of the outputs, that of the parameters."""
        return jax.tree.leaves(params)[0].dtype

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        batch = jax.tree.leaves(inputs_t)[0].shape[0]
        h = self.checked_state(states, batch, params)
        a, b = self.terms(params, inputs_t)
        new = jnp.broadcast_to(a, h.shape) * h.astype(b.dtype) + b
        output = self.read(params, new, inputs_t).astype(self.output_dtype(params))
        return new.astype(h.dtype), output

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run all steps in one linear recurrence, unless the options ask for a loop."""
        if overrides_step(self) or stepping_reason(**options._asdict()) is not None:
            return None
        checked = self.prepare(params)  # before the states
        h_0 = self.checked_state(initial_states, options.batch, checked)
        axis, lengths = 0 if options.time_major else 1, options.seq_lengths
        if lengths is not None:
            inputs = _padding.zero(inputs, lengths, axis)

        def run(params: Any, inputs: Any, h_0: Array) -> Any:
            params = self.prepare(params)
            given = self.precompute(params, inputs)
            a, b = self.terms(params, given)
            h, h_n = linear_recurrence(
                a,
                b,
                h_0.astype(b.dtype),
                reverse=options.reverse,
                seq_lengths=lengths,
                resets=options.resets,
                time_major=options.time_major,
                backend=cast("Backend | None", options.backend),
            )
            outputs = self.read(params, h, given).astype(self.output_dtype(params))
            return outputs, h.astype(h_0.dtype), h_n.astype(h_0.dtype)

        if options.recompute:  # all but the states; JAX can store none that are complex
            real = not jnp.iscomplexobj(h_0)
            keeps = lambda primitive, *_, **__: real and primitive is linear_p  # noqa: E731
            run = jax.checkpoint(run, policy=keeps)
        outputs, h, h_n = run(params, inputs, h_0)
        if lengths is not None:
            if options.padding == "hold":
                outputs = _padding.hold(outputs, lengths, axis)
                h = _held_states(h, h_0, options)
            else:
                outputs = _padding.zero(outputs, lengths, axis)
            if options.padding == "drop":
                h_n = _padding.drop(h_n, lengths, options.length)
        return RecurrentOutput(outputs, h_n, h if options.return_all_states else None)


def stepping_reason(
    *,
    recompute: Any,
    window: int,
    segment_length: Any,
    backend: str | None,
    **others: Any,
) -> str | None:
    """Return why a linear cell runs step by step with these options, or None.

    The arguments are the fields of `SequenceOptions`, or those of `recurrent_net`.
    """
    if window != 1 or segment_length is not None:
        return "one linear recurrence has neither a `window` nor segments"
    if recompute is not True and not {*recompute} <= {"gates"}:
        return "one linear recurrence recomputes nothing but `gates`"
    return "`backend` is 'scan'" if backend == "scan" else None


def _held_states(h: Array, h_0: Array, options: SequenceOptions) -> Array:
    """Return the states after every step, unchanged past the end of a sequence."""
    axis, lengths = 0 if options.time_major else 1, options.seq_lengths
    assert lengths is not None
    if not options.reverse:
        return _padding.hold(h, lengths, axis, h_0)
    inside = _padding.is_step(lengths, options.length, axis)
    return _padding.select(inside, h, jnp.expand_dims(h_0, axis))
