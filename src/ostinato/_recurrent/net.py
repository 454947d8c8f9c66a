"""The public entry `recurrent_net`, and the code before and after the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .. import _padding
from .._padding import fill_empty_sequences, select
from .._typing import Array, ArrayLike, Bool, Int, Padding
from .arguments import check_arguments, check_takes_four, cut_outputs
from .loop import LoopInputs
from .protocol import Cell, RecurrentOutput, SequenceOptions
from .stepping import StepLoop, newest


def recurrent_net(
    step: Callable[[Any, Any, Any, Array], tuple[Any, Any]] | Cell,
    inputs: Any,
    initial_states: Any,
    *,
    params: Any = None,
    seq_lengths: Int[ArrayLike, " B"] | None = None,
    resets: Bool[Array, "B T"] | None = None,
    reverse: bool = False,
    time_major: bool = False,
    padding: Padding = "hold",
    recompute: Iterable[str] | bool = (),
    segment_length: int | Literal["auto"] | None = None,
    outputs_with_grads: Any = None,
    return_all_states: bool = False,
    window: int = 1,
    length: int | None = None,
    backend: Literal["xla", "cpu", "cuda", "scan"] | None = None,
) -> RecurrentOutput:
    """Run a step function over a batch of sequences.

    Sizes: T steps, B sequences. Inputs, states, outputs and parameters are any pytrees.

    Args:
        step: `step(params, states, inputs_t, t) -> (new_states, outputs_t)` for one
            step of all sequences, or a cell of `ostinato.cells`. Leaves of `states`,
            `inputs_t` and `outputs_t` are `[B, ...]`; `t`, int32, is the position in
            the sequence, which begins at T - 1 if `reverse`. The step must not mix
            sequences.
        inputs: leaves `[B, T, ...]`, `[T, B, ...]` if `time_major`, of any dtypes. One
            sequence has B = 1. None, with `length`, for a step without inputs.
        initial_states: leaves `[B, ...]`, or `[B, window, ...]` for a window.
        params: any pytree, passed to `step`. Arrays that `step` closes over are
            differentiated in the same way.
        seq_lengths: integers `[B]`, each in 0..T, in any order. The final states of a
            sequence are those at its length, or its initial states if that is 0;
            `reverse` starts at its end. Values in the padding, NaN included, reach no
            output and no gradient: past its end, a sequence runs its first step again,
            with a `t` that counts on, and the results are dropped. None means that
            every sequence has T steps.
        resets: bool `[B, T]`, or `[T, B]`: where True, every state of the sequence, in
            all slots of a window, becomes 0 before that step, and no gradient passes
            through the reset. Not with `reverse`.
        reverse: run from the last step to the first; results stay in input order.
        time_major: whether time is the first axis of inputs, resets and results.
        padding: what outputs and `all_states` are past the end of a sequence.
            `"hold"`: the outputs at its last valid step, or 0 if it has no step, and
            the states as they are at that time: the final ones, or with `reverse` the
            initial ones. `"zero"`: zeros. `"drop"`: zeros, and the final states of a
            sequence shorter than T are 0 too.
        recompute: names that `step` gives to values with `ostinato.tag`. Neither these
            values nor those that lead only to them are stored for the backward pass,
            which recomputes both. True: only the states are stored.
        segment_length: store the states only after every so many steps, and recompute
            the steps between in the backward pass; `"auto"` takes about sqrt(T). Any
            number is allowed; one that divides T saves a copy.
        outputs_with_grads: the outputs that receive gradients: top-level keys, fields
            or indices, or a pytree of bools. For every other output, gradients count
            as 0, and its tangent is 0. None means all outputs.
        return_all_states: also return the states after every step.
        window: k > 1: `step` sees the last k states, leaves `[B, k, ...]`, newest last,
            and returns one new state, `[B, ...]`.
        length: T, for a step without inputs.
        backend: how the loop runs. `"scan"`: as `lax.scan` of the step. `"xla"`: what
            does not depend on the states is computed before the loop, and the gradients
            of matrices after it, where the step allows that. `"cpu"`: the same in the
            native library. `"cuda"`: all steps in one kernel, made for a step that
            computes each element of its states by itself, but for products of inputs.
            None takes the native library on CPUs where it can run the step, and kernels
            on GPUs where these have been measured; `ostinato.explain` tells. Inside of
            `ragged.vmap` these hold for all examples together. Cells that are linear
            recurrences run as `linear_recurrence` with this backend, but for `"scan"`,
            and those that `rnn` has run as `rnn` with `"cuda"`.

    Returns:
        `RecurrentOutput(outputs, states, all_states)`: outputs `[B, T, ...]` or
        `[T, B, ...]`; final states like `initial_states`; `all_states` in the layout of
        the outputs, or None. Each array has the dtype that `step` or `initial_states`
        gives it.

    Raises:
        TypeError: an argument has the wrong type or dtype; states change their
            structure or dtype from step to step.
        ValueError: a wrong shape, length or choice; fewer initial slots than `window`;
            an unknown name in `recompute` or `outputs_with_grads`; states that change
            their shape; `resets` with `reverse`.
        NotImplementedError: `segment_length` inside `ragged.vmap`; `backend="cpu"`
            or `"cuda"`, and that cannot run the step: the message says why.
        ostinato.BackendError: the same for a cell that `rnn` runs, or that is a linear
            recurrence.

    Holds under `jit`, `vmap`, `grad`, `jvp`, in any combination and to any order, under
    `checkpoint`, inside `scan` and inside its own step, as far as `step` does.

    If `ostinato.rnn` can compute a cell, it runs the whole sequence.

    References:
        Caffe2's `recurrent_net` (recompute, windows, outputs with gradients, hold and
        drop). Chen et al., Training Deep Nets with Sublinear Memory Cost (2016),
        arXiv:1604.06174 (segments).

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> def leaky_sum(decay, total, x, t):
        ...     total = decay * total + x
        ...     return total, total
        >>> x = jnp.ones((2, 3))
        >>> out = ost.recurrent_net(leaky_sum, x, jnp.zeros(2), params=0.5)
        >>> out.outputs[0].tolist(), out.states.tolist()
        ([1.0, 1.5, 1.75], [1.75, 1.75])
    """
    inputs, states, options = check_arguments(
        step,
        inputs,
        initial_states,
        seq_lengths=seq_lengths,
        resets=resets,
        reverse=reverse,
        time_major=time_major,
        padding=padding,
        recompute=recompute,
        segment_length=segment_length,
        return_all_states=return_all_states,
        window=window,
        length=length,
        backend=backend,
    )
    try:
        return run_checked(step, params, inputs, states, options, outputs_with_grads)
    except TypeError as error:
        check_takes_four(step, error)
        raise


def run_checked(
    step: Any,
    params: Any,
    inputs: Any,
    states: Any,
    options: SequenceOptions,
    outputs_with_grads: Any = None,
) -> RecurrentOutput:
    """Run `recurrent_net` with arguments that it has checked already."""
    if isinstance(step, Cell):
        whole = step.run_sequence(params, inputs, states, options)
        if whole is not None:
            return whole._replace(
                outputs=cut_outputs(whole.outputs, outputs_with_grads)
            )
    steps = make_loop_inputs(inputs, options)
    initial = newest(states, options)
    loop = StepLoop(step, params, options, outputs_with_grads)
    states, (outputs, all_states) = loop.run(states, steps)
    if steps.valid is not None and options.return_all_states:
        # At steps that a sequence does not have, its states stay as they are.
        kept = initial if options.reverse else newest(states, options)
        kept = jax.tree.map(lambda a: a[None], kept)
        all_states = select(steps.valid, all_states, kept)
    return make_output(states, outputs, all_states, options)


def make_loop_inputs(inputs: Any, options: SequenceOptions) -> LoopInputs:
    """Return inputs and masks, time-major; pad each sequence with its first input."""
    inputs, resets = _swap_layout((inputs, options.resets), options)
    t = lax.iota(jnp.int32, options.length)
    lengths = options.seq_lengths
    if lengths is None:
        return LoopInputs(inputs, t, None, resets)
    valid = _padding.is_step(lengths, options.length, 0)
    begins = jnp.maximum(lengths - 1, 0) if options.reverse else jnp.zeros_like(lengths)

    def fill(a: Array) -> Array:
        # PRNG keys are never NaN.
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return a
        first = fill_empty_sequences(_padding.at_step(a, begins, 0), lengths)
        return select(valid, a, first[None])

    if resets is not None:
        resets = resets & valid
    return LoopInputs(jax.tree.map(fill, inputs), t, valid, resets)


def _swap_layout(tree: Any, options: SequenceOptions) -> Any:
    """Convert from the caller's layout to time-major, or back."""
    if options.time_major:
        return tree
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


def make_output(
    states: Any, outputs: Any, all_states: Any, options: SequenceOptions
) -> RecurrentOutput:
    """Apply the padding policy to time-major results; return the caller's layout."""
    lengths = options.seq_lengths
    if lengths is not None:
        if options.padding == "hold":
            outputs = jax.tree.map(lambda a: _padding.hold(a, lengths, 0), outputs)
        else:
            outputs, all_states = jax.tree.map(
                lambda a: _padding.zero(a, lengths, 0), (outputs, all_states)
            )
        if options.padding == "drop":
            states = _padding.drop(states, lengths, options.length)
    return RecurrentOutput(
        _swap_layout(outputs, options), states, _swap_layout(all_states, options)
    )
