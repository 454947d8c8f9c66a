"""`recurrent_net`: the front door, and what surrounds the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _padding
from .._padding import select
from .._segments import near_divisor
from .._typing import Array, ArrayLike, Bool, Int, Padding
from .arguments import check_arguments, check_result, cut_outputs
from .loop import LoopInputs, in_segments
from .protocol import Cell, RecurrentOutput, SequenceOptions
from .remat import ARITHMETIC, MOVES, Recompute, all_but_arithmetic, checkpoint

_BLOCK = 64
"""LoopInputs whose input products a cell makes again at a time, with `recompute`."""


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
) -> RecurrentOutput:
    """Run a step function over a batch of sequences.

    Sizes: T steps, B rows. Inputs, states, outputs and parameters are any pytrees.

    Args:
        step: `step(params, states, inputs_t, t) -> (new_states, outputs_t)` for one
            step of all rows, or a cell of `ostinato.cells`. Leaves of `states`,
            `inputs_t` and `outputs_t` are `[B, ...]`; `t`, int32, is the position in
            the sequence, T - 1 first if `reverse`. Rows should not mix.
        inputs: leaves `[B, T, ...]`, `[T, B, ...]` if `time_major`, of any dtypes. One
            sequence has B = 1. None, with `length`, for a step without inputs.
        initial_states: leaves `[B, ...]`, or `[B, window, ...]` for a window.
        params: handed to `step`. Arrays that `step` closes over are differentiated
            just the same.
        seq_lengths: integers `[B]`, each in 0..T, any order. A row's final states are
            those at its length, its initial ones if that is 0; `reverse` starts at its
            own end. What stands in the padding, NaN included, reaches no output and no
            gradient: past its end a row runs its first step again, with a `t` that goes
            on, and what comes of it is dropped. None: every row has T steps.
        resets: bool `[B, T]`, or `[T, B]`: True makes every state of the row 0 before
            that step, all slots of a window too, and no gradient crosses. Not with
            `reverse`.
        reverse: run from the last step to the first; results stay in input order.
        time_major: whether time is the first axis of inputs, resets and results.
        padding: what the outputs hold past a row's end. `"hold"`: what they are at the
            row's last valid position, 0 where there is none; all states stay as they
            are. `"zero"`: zeros. `"drop"`: zeros, and the final states of a row that
            ended before T are 0 too.
        recompute: names that `step` gives with `ostinato.tag`: neither these values nor
            what only leads to them is stored for the backward pass; both are computed
            there again. True: only the states are stored.
        segment_length: store the states every so many steps only, and run the steps
            between again on the backward pass; `"auto"` takes about sqrt(T). Any
            number will do; one that divides T saves a copy.
        outputs_with_grads: what of the outputs receives gradients: top-level keys,
            fields or indices, or a pytree of bools. A gradient that arrives at
            another output counts as 0, and its tangent is 0. None: all.
        return_all_states: also return the states after every step.
        window: k > 1: `step` sees the last k states, leaves `[B, k, ...]`, newest last,
            and returns one new one, `[B, ...]`.
        length: T, where there are no inputs.

    Returns:
        `RecurrentOutput(outputs, states, all_states)`: outputs `[B, T, ...]` or
        `[T, B, ...]`; final states as `initial_states`; `all_states` as the outputs, or
        None. Each array has the dtype that `step` or `initial_states` gives it.

    Raises:
        TypeError: an argument of the wrong type or dtype; states that change their
            structure or dtype from step to step.
        ValueError: a wrong shape, length or choice; fewer initial slots than `window`;
            an unknown name in `recompute` or `outputs_with_grads`; states that change
            their shape; `resets` with `reverse`.
        NotImplementedError: `segment_length` inside of `ragged.vmap`.

    Holds under `jit`, `vmap`, `grad`, `jvp`, any mix and any order of them,
    `checkpoint`, inside `scan` and inside its own step, as far as `step` does.

    A cell computes the products of its inputs for all steps at once, before the loop;
    one that `ostinato.rnn` can run as a whole runs there.

    References:
        Caffe2's `recurrent_net` (recompute, windows, outputs with gradients, hold and
        drop). Chen et al., Training Deep Nets with Sublinear Memory Cost (2016),
        arXiv:1604.06174 (segments).

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
    )
    if isinstance(step, Cell):
        whole = step.run_sequence(params, inputs, states, options)
        if whole is not None:
            return whole._replace(
                outputs=cut_outputs(whole.outputs, outputs_with_grads)
            )
    steps = time_first(inputs, options)
    states, (outputs, all_states) = _run(
        step, params, states, steps, options, outputs_with_grads
    )
    return finish(states, outputs, all_states, options)


def time_first(inputs: Any, options: SequenceOptions) -> LoopInputs:
    """Inputs and masks, time first; in the padding stand a row's first inputs."""
    inputs, resets = _swap((inputs, options.resets), options)
    t = lax.iota(jnp.int32, options.length)
    lengths = options.seq_lengths
    if lengths is None:
        return LoopInputs(inputs, t, None, resets)
    valid = t[:, None] < lengths[None]
    begins = jnp.maximum(lengths - 1, 0) if options.reverse else jnp.zeros_like(lengths)

    def fill(a: Array) -> Array:
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):  # keys; they are never NaN
            return a
        first = from_nonempty(_padding.at_step(a, begins, 0), lengths)
        return select(valid, a, first[None])

    if resets is not None:
        resets = resets & valid
    return LoopInputs(jax.tree.map(fill, inputs), t, valid, resets)


def from_nonempty(a: Array, lengths: Array) -> Array:
    """`a`, `[B, ...]`, a constant; of a row without steps what another one has."""
    if a.shape[0] == 0 or jnp.issubdtype(a.dtype, jax.dtypes.extended):
        return a
    # The longest row's, as a sum: one row of a sharded axis could not be taken out.
    row = jnp.arange(a.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(lengths == jnp.max(lengths), row, 0))
    longest = (row == last) & (lengths > 0)
    other = jnp.sum(select(longest, a), axis=0, keepdims=True, dtype=a.dtype)
    return lax.stop_gradient(select(lengths > 0, a, other))


def _swap(tree: Any, options: SequenceOptions) -> Any:
    """From the caller's layout to time first, or back."""
    if options.time_major:
        return tree
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


def _run(
    step: Callable,
    params: Any,
    states: Any,
    steps: LoopInputs,
    options: SequenceOptions,
    outputs_with_grads: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """Final states; of every step its outputs and, if asked for, its states."""
    cell = step if isinstance(step, Cell) else None
    if cell is not None:
        params, step = cell.prepare(params), cell.step
    arrays, as_given = in_loop(params)
    step = _of_arrays(step, as_given)
    recompute = None
    if options.recompute:
        cheap = MOVES if cell is None else ARITHMETIC
        recompute = Recompute(options.recompute, cheap)
        marked = recompute.mark(step)
        step = checkpoint(marked, recompute.policy, prevent_cse=False)
    elif cell is not None:
        # A function of the user's own stores what it would in `lax.scan`.
        step = checkpoint(step, all_but_arithmetic, prevent_cse=False)

    lengths, initial = options.seq_lengths, states
    if lengths is not None:
        initial = jax.tree.map(lambda a: from_nonempty(a, lengths), states)

    def body(old: Any, at: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
        given = old if at.reset is None else select(~at.reset, old)
        if at.valid is not None:
            # A row that has ended runs its first step again: what comes of that is
            # finite, where the step may have a pole at the final states.
            given = select(at.valid, given, initial)
        result = step(arrays, given, at.inputs, at.t)
        new, outputs = check_result(result, _newest(old, options), options.batch)
        new = _push(given, new, options)
        if at.valid is not None:
            new = select(at.valid, new, old)
        kept = _newest(new, options) if options.return_all_states else None
        return new, (cut_outputs(outputs, outputs_with_grads), kept)

    def run(states: Any, steps: LoopInputs) -> tuple[Any, tuple[Any, Any]]:
        if cell is not None:
            steps = steps._replace(inputs=cell.precompute(params, steps.inputs))
        return lax.scan(body, states, steps, reverse=options.reverse)

    size, policy = options.segment_length, None
    fixed = isinstance(options.length, int)  # and no symbol, as inside ragged.vmap
    if size is None and cell is not None and recompute is not None and fixed:
        # What precedes the loop would be the largest thing saved: some steps at a time.
        size = near_divisor(options.length, _BLOCK)
        policy = recompute.policy
    if size is None or options.length == 0:
        return run(states, steps)
    return in_segments(run, states, steps, size, options.reverse, policy)


def in_loop(params: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """What of `params` a loop is handed, and a function that makes `params` of it.

    16-bit floats are handed over in float32: their gradient is added up over the steps,
    and would stop growing. What is no array, such as a number of steps, stays outside.
    """
    leaves, tree = jax.tree.flatten(params)
    kinds = jax.Array, np.ndarray, np.generic
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    arrays = [jnp.asarray(leaves[i]) for i in places]

    def as_given(wide: list[Array]) -> Any:
        full = list(leaves)
        for i, a, given in zip(places, wide, arrays, strict=True):
            full[i] = a if a.dtype == given.dtype else a.astype(given.dtype)
        return jax.tree.unflatten(tree, full)

    return list(map(_widened, arrays)), as_given


def _widened(a: Array) -> Array:
    half = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    return a.astype(jnp.float32) if half else a  # which may be of a weak type


def _of_arrays(step: Callable, as_given: Callable) -> Callable:
    return lambda arrays, *rest: step(as_given(arrays), *rest)


def _newest(states: Any, options: SequenceOptions) -> Any:
    """The last slot of a window."""
    if options.window == 1:
        return states
    return jax.tree.map(lambda a: a[:, -1], states)


def _push(window: Any, new: Any, options: SequenceOptions) -> Any:
    """A window one step on: without its oldest slot, `new` behind the others."""
    if options.window == 1:
        return new
    join = lambda a, b: jnp.concatenate([a[:, 1:], b[:, None]], axis=1)  # noqa: E731
    return jax.tree.map(join, window, new)


def finish(
    states: Any, outputs: Any, all_states: Any, options: SequenceOptions
) -> RecurrentOutput:
    """Apply the padding policy to what is time first; in the caller's layout."""
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
    return RecurrentOutput(_swap(outputs, options), states, _swap(all_states, options))
