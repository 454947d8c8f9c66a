"""The public entry `recurrent_net`, and the code before and after the loop."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _padding
from .._padding import fill_empty_sequences, select
from .._segments import near_divisor
from .._step.scan import plan, saves_loops
from .._typing import Array, ArrayLike, Bool, Int, Padding
from .arguments import check_arguments, check_result, cut_outputs
from .loop import LoopInputs, run_in_segments
from .protocol import Cell, RecurrentOutput, SequenceOptions
from .remat import ARITHMETIC, CHEAP, Recompute, all_but_arithmetic, checkpoint

_BLOCK = 64
"""Steps whose input products a cell recomputes at a time, with `recompute`."""


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
    backend: Literal["xla", "cpu", "scan"] | None = None,
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
        padding: what the outputs hold past the end of a sequence. `"hold"`: the outputs
            at its last valid step, or 0 if it has no step; all states stay as they are.
            `"zero"`: zeros. `"drop"`: zeros, and the final states of a sequence shorter
            than T are 0 too.
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
        backend: how the loop runs. `"scan"`: as `lax.scan` of the step. `"xla"` and
            None: what does not depend on the states is computed before the loop, and
            the gradients of weights after it, where the step allows that.

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
        NotImplementedError: `segment_length` inside `ragged.vmap`.

    Holds under `jit`, `vmap`, `grad`, `jvp`, in any combination and to any order, under
    `checkpoint`, inside `scan` and inside its own step, as far as `step` does.

    A cell computes the products of its inputs for all steps at once, before the loop.
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
    if isinstance(step, Cell):
        whole = step.run_sequence(params, inputs, states, options)
        if whole is not None:
            return whole._replace(
                outputs=cut_outputs(whole.outputs, outputs_with_grads)
            )
    steps = make_loop_inputs(inputs, options)
    initial = _newest(states, options)
    states, (outputs, all_states) = _run_loop(
        step, params, states, steps, options, outputs_with_grads
    )
    if steps.valid is not None and options.return_all_states:
        # At steps that a sequence does not have, its states stay as they are.
        kept = initial if options.reverse else _newest(states, options)
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
    valid = t[:, None] < lengths[None]
    begins = jnp.maximum(lengths - 1, 0) if options.reverse else jnp.zeros_like(lengths)

    def fill(a: Array) -> Array:
        if jnp.issubdtype(
            a.dtype, jax.dtypes.extended
        ):  # PRNG keys, which are never NaN
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


def _run_loop(
    step: Callable,
    params: Any,
    states: Any,
    steps: LoopInputs,
    options: SequenceOptions,
    outputs_with_grads: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """Return the final states, and `(outputs, all_states)` of every step."""
    cell = step if isinstance(step, Cell) else None
    function = step
    if cell is not None:
        params = cell.prepare(params)
        function = lambda p, s, x, t: cell.step(p, s, cell.precompute(p, x), t)  # noqa: E731
    arrays, rebuild = split_arrays(params)
    recompute, policy = None, all_but_arithmetic
    if options.recompute:
        cheap = CHEAP if cell is None else ARITHMETIC
        recompute = Recompute(options.recompute, cheap)
        policy = recompute.policy

    lengths = options.seq_lengths

    def body_of(step: Callable) -> Callable:
        step = _step_of_arrays(step, rebuild)
        if recompute is not None:
            step = recompute.mark(step)

        def body(arrays: Any, old: Any, at: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
            given = old if at.reset is None else select(~at.reset, old)
            result = step(arrays, given, at.inputs, at.t)
            new, outputs = check_result(result, _newest(old, options), options.batch)
            new = _push(given, new, options)
            kept = _newest(new, options) if options.return_all_states else None
            return new, (cut_outputs(outputs, outputs_with_grads), kept)

        return body

    fixed = isinstance(options.length, int)  # not a symbol, as inside ragged.vmap

    def run(states: Any, steps: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
        if fixed and options.backend != "scan":
            loop = plan(body_of(function), arrays, states, steps._replace(valid=None))
            if not isinstance(loop, str):
                left = lengths
                if left is not None:  # of this segment
                    left = left - jnp.sum(steps.t[:1], dtype=left.dtype)
                return loop.run(
                    steps.t.shape[0], options.reverse, policy, left, options.backend
                )
        step = function
        if cell is not None:
            steps = steps._replace(inputs=cell.precompute(params, steps.inputs))
            step = cell.step
        # Without `recompute`, a function stores the same values as in `lax.scan`.
        plain = ft.partial(masked_step(body_of(step), lengths, states), arrays)
        if cell is not None or recompute is not None:
            plain = checkpoint(plain, policy, prevent_cse=False)
        return lax.scan(plain, states, steps, reverse=options.reverse)

    size, segment_policy = options.segment_length, None
    if size is None and cell is not None and recompute is not None and fixed:
        # Saved for all steps, the input products would take most memory: run in blocks.
        size = near_divisor(options.length, _BLOCK)
        segment_policy = saves_loops(recompute.policy)
    if size is None or options.length == 0:
        return run(states, steps)
    return run_in_segments(run, states, steps, size, options.reverse, segment_policy)


def masked_step(body: Callable, lengths: Array | None, states: Any) -> Callable:
    """Return a step of `lax.scan` that changes no sequence past its end."""
    if lengths is None:
        return body
    initial = jax.tree.map(lambda a: fill_empty_sequences(a, lengths), states)

    def masked(arrays: Any, old: Any, at: LoopInputs) -> tuple[Any, Any]:
        # A sequence that has ended runs its first step again. Its results are finite,
        # whereas the step may have a pole at the final states.
        assert at.valid is not None, "there are lengths"
        new, results = body(arrays, select(at.valid, old, initial), at)
        return select(at.valid, new, old), results

    return masked


def split_arrays(params: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """Return the arrays of `params` for the loop, and a function back to `params`.

    The arrays hold 16-bit floats in float32, because their gradient is a sum over all
    steps, which would stop growing in 16 bits. Leaves that are not arrays, such as a
    number of steps, stay outside the loop.
    """
    leaves, tree = jax.tree.flatten(params)
    types = jax.Array, np.ndarray, np.generic
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, types)]
    arrays = [jnp.asarray(leaves[i]) for i in indices]

    def rebuild(wide: list[Array]) -> Any:
        full = list(leaves)
        for i, a, given in zip(indices, wide, arrays, strict=True):
            full[i] = a if a.dtype == given.dtype else a.astype(given.dtype)
        return jax.tree.unflatten(tree, full)

    return list(map(_widen, arrays)), rebuild


def _widen(a: Array) -> Array:
    half = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    return a.astype(jnp.float32) if half else a  # `a` may have a weak type


def _step_of_arrays(step: Callable, rebuild: Callable) -> Callable:
    return lambda arrays, *rest: step(rebuild(arrays), *rest)


def _newest(states: Any, options: SequenceOptions) -> Any:
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
