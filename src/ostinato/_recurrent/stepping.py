"""The loop over the steps of a cell or a function."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _checks
from .._padding import fill_empty_sequences, select
from .._rnn.sharding import make_varying
from .._segments import near_divisor
from .._step.asked import mark
from .._step.jaxprs import inlined
from .._step.known import call_known
from .._step.maxima import steady
from .._step.policies import Choice
from .._step.refusal import NAMED, refusal
from .._step.scan import PreparedLoop, RunsAsScan, prepare, saves_loops
from .._typing import Array
from .arguments import check_result, cut_outputs
from .loop import LoopInputs, run_in_segments
from .protocol import Cell, SequenceOptions
from .remat import (
    ARITHMETIC,
    CHEAP,
    TRANSCENDENTAL,
    Recompute,
    all_but_arithmetic,
    checkpoint,
)

_BLOCK = 64
"""Steps whose input products a cell recomputes at a time, with `recompute`."""


class StepLoop:
    """A step function or a cell, and how to run it step by step.

    Args:
        step: the function, or the cell.
        params: its parameters.
        options: of the call.
        outputs_with_grads: as for `recurrent_net`.
    """

    def __init__(
        self,
        step: Callable,
        params: Any,
        options: SequenceOptions,
        outputs_with_grads: Any,
    ) -> None:
        self.options, self.outputs_with_grads = options, outputs_with_grads
        self.cell = cell = step if isinstance(step, Cell) else None
        self.step = step
        if cell is not None:
            params = cell.prepare(params)
            self.step = lambda params, states, inputs_t, t: cell.step(
                params, states, cell.precompute(params, inputs_t), t
            )
        self.params = params
        self.arrays, self._rebuild = _wide_arrays(params)
        self.recompute = None
        self.policy = Choice(all_but_arithmetic, TRANSCENDENTAL)
        if options.recompute:
            cheap = CHEAP if cell is None else ARITHMETIC
            self.recompute = Recompute(options.recompute, cheap)
            self.policy = self.recompute.policy

    def run(self, states: Any, steps: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
        """Return the final states, and `(outputs, all_states)` of every step."""
        options = self.options
        size, policy = options.segment_length, None
        if size is None and self.cell is not None and self.recompute is not None:
            if isinstance(options.length, int):
                # Saved for all steps, the input products would take most memory.
                size = near_divisor(options.length, _BLOCK)
                policy = saves_loops(self.recompute.policy)
        if size is None or options.length == 0:
            return self._run_steps(states, steps, options.seq_lengths)
        initial = _initial(states, options.seq_lengths)
        run = ft.partial(self._run_segment, initial)
        return run_in_segments(run, states, steps, size, options.reverse, policy)

    def prepare(self, states: Any, steps: LoopInputs) -> PreparedLoop:
        """Return the loop, taken apart; raise RunsAsScan if it runs as `lax.scan`."""
        if self.options.backend == "scan":
            raise RunsAsScan("`backend` is 'scan'")
        if not isinstance(self.options.length, int):  # as inside of ragged.vmap
            raise RunsAsScan("the number of steps is symbolic")
        body = self._body(self.step)
        steps, backend = steps._replace(valid=None), self.options.backend
        ragged = self.options.seq_lengths is not None
        return prepare(body, self.arrays, states, steps, backend, has_lengths=ragged)

    def _run_segment(
        self, initial: Any, states: Any, steps: LoopInputs
    ) -> tuple[Any, tuple[Any, Any]]:
        """Run the loop over the steps of a segment.

        Sequences without a step there run their first one: there may be a pole at their
        states, but not at the `initial` ones.
        """
        lengths = self.options.seq_lengths
        if lengths is None:
            return self._run_steps(states, steps, None)
        left = lengths - steps.t[0].astype(lengths.dtype)
        # If no sequence has any step, there is none to run.
        least = jnp.minimum(jnp.max(lengths, initial=0), 1)
        given = select(left > 0, states, initial)
        new, results = self._run_steps(given, steps, jnp.maximum(left, least))
        return select(left > 0, new, states), results

    def _run_steps(
        self, states: Any, steps: LoopInputs, lengths: Array | None
    ) -> tuple[Any, tuple[Any, Any]]:
        """Run the loop over steps, of which sequences have the first `lengths`."""
        options = self.options
        try:
            loop = self.prepare(states, steps)
        except RunsAsScan as reason:
            if options.backend in NAMED and isinstance(options.length, int):
                raise refusal(options.backend, str(reason)) from None
        else:
            return loop.run(
                steps.t.shape[0],
                options.length,
                options.reverse,
                self.policy,
                lengths,
                options.backend,
            )
        return self._scan(states, steps, lengths)

    def _scan(
        self, states: Any, steps: LoopInputs, lengths: Array | None
    ) -> tuple[Any, tuple[Any, Any]]:
        """Run the loop as `lax.scan`; see `_run_steps`."""
        step = self.step
        if self.cell is not None:
            inputs = self.cell.precompute(self.params, steps.inputs)
            steps, step = steps._replace(inputs=inputs), self.cell.step
        # In a `shard_map` new states vary over devices, so the first ones have to.
        leaves, tree = jax.tree.flatten((states, self.arrays, steps, lengths))
        states = jax.tree.unflatten(tree, make_varying(leaves))[0]
        body = _masked(self._body(step), lengths, states)
        # Without `recompute`, a function stores the same values as in `lax.scan`.
        plain = ft.partial(body, self.arrays)
        recomputes = self.cell is not None or self.recompute is not None
        if recomputes or self.options.segment_length is not None:
            plain = inlined(plain, steady)
        if recomputes:
            plain = checkpoint(plain, self.policy, prevent_cse=False)
        scan = ft.partial(lax.scan, plain, reverse=self.options.reverse)
        return call_known(scan, states, steps)

    def _body(self, step: Callable) -> Callable:
        """Return `body(arrays, states, steps_t) -> (states, (outputs, kept))`."""
        options = self.options
        fixed = isinstance(options.length, int)  # not so inside of ragged.vmap
        of_arrays = lambda arrays, *rest: step(self._rebuild(arrays), *rest)  # noqa: E731
        marked = of_arrays if self.recompute is None else self.recompute.mark(of_arrays)

        def body(arrays: Any, old: Any, at: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
            given = old if at.reset is None else select(~at.reset, old)
            t = at.t if fixed else mark(at.t, options.backend)
            result = marked(arrays, given, at.inputs, t)
            new, outputs = check_result(result, newest(old, options), options.batch)
            new = _push(given, new, options)
            kept = newest(new, options) if options.return_all_states else None
            return new, (cut_outputs(outputs, self.outputs_with_grads), kept)

        return body


def _masked(body: Callable, lengths: Array | None, states: Any) -> Callable:
    """Return a step of `lax.scan` that changes no sequence past its end."""
    if lengths is None:
        return body
    initial = _initial(states, lengths)

    def masked(arrays: Any, old: Any, at: LoopInputs) -> tuple[Any, Any]:
        # A sequence that has ended runs its first step again. Its results are finite,
        # whereas the step may have a pole at the final states.
        assert at.valid is not None, "there are lengths"
        new, results = body(arrays, select(at.valid, old, initial), at)
        return select(at.valid, new, old), results

    return masked


def _initial(states: Any, lengths: Array | None) -> Any:
    """Return states at which sequences run their first step, even those without one."""
    if lengths is None:
        return states
    return jax.tree.map(lambda a: fill_empty_sequences(a, lengths), states)


def split_arrays(params: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of `params`, and a function that puts others in their places.

    Leaves that are not arrays, such as a number of steps, stay as they are.
    """
    leaves, tree = jax.tree.flatten(params)
    indices = [i for i, leaf in enumerate(leaves) if _checks.is_array(leaf)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        full = list(leaves)
        for i, a in zip(indices, arrays, strict=True):
            full[i] = a
        return jax.tree.unflatten(tree, full)

    return [leaves[i] for i in indices], rebuild


def _wide_arrays(params: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """Return the arrays of `params` for the loop, and a function back to `params`.

    The arrays hold 16-bit floats in float32, because their gradient is a sum over all
    steps, which would stop growing in 16 bits.
    """
    found, rebuild = split_arrays(params)
    arrays = [jnp.asarray(a) for a in found]

    def narrow(wide: list[Array]) -> Any:
        pairs = zip(wide, arrays, strict=True)
        return rebuild(
            [a if a.dtype == own.dtype else a.astype(own.dtype) for a, own in pairs]
        )

    return list(map(_widen, arrays)), narrow


def _widen(a: Array) -> Array:
    half = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    return a.astype(jnp.float32) if half else a  # `a` may have a weak type


def newest(states: Any, options: SequenceOptions) -> Any:
    """Return the last slot of a window, or the states if there is no window."""
    if options.window == 1:
        return states
    return jax.tree.map(lambda a: a[:, -1], states)


def _push(window: Any, new: Any, options: SequenceOptions) -> Any:
    """Return the window without its oldest slot, and with `new` as its last one."""
    if options.window == 1:
        return new
    join = lambda a, b: jnp.concatenate([a[:, 1:], b[:, None]], axis=1)  # noqa: E731
    return jax.tree.map(join, window, new)
