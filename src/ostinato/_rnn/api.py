"""`rnn` and `rnn_step`: the public entry."""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks
from .._padding import select
from .._typing import Array, ArrayLike, Backend, Bool, Float, Int, Padding, State
from . import primitive
from .arguments import Given, check_arguments, make_arguments
from .call import RNNCall
from .output import RNNOutput, make_output
from .prepared import PreparedWeights
from .spec import RNNSpec, check_spec


def rnn(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    x: Float[Array, "*B T I"],
    initial_state: State | None = None,
    *,
    seq_lengths: Int[ArrayLike, "*B"] | None = None,
    mask: Bool[ArrayLike, "*B T"] | None = None,
    resets: Bool[Array, "*B T"] | None = None,
    key: Array | None = None,
    padding: Padding = "zero",
    time_major: bool = False,
    recompute: bool = False,
    backend: Backend | None = None,
    precision: Any = None,
) -> RNNOutput:
    """Run a stacked recurrent network over a batch of sequences.

    Sizes: T steps, B sequences, I = input_size, H = hidden_size, L layers,
    D directions, S = proj_size or H.

    Args:
        spec: the kind of network; static under `jax.jit`.
        weights: flat vector `[num_params]` (see `unpack_weights`), or from `prepare`.
        x: `[B, T, I]`, `[T, B, I]` if `time_major`, or one sequence `[T, I]`; then no
            argument and no result has a batch axis.
        initial_state: `h [L*D, B, S]`, for an LSTM `(h, c [L*D, B, H])`, for an sLSTM
            `(h, c, n, m)`, in the order fwd0, rev0, fwd1, ...; None means zeros.
        seq_lengths: integers `[B]`, each in 0..T, in any order; a scalar for one
            sequence. A reverse direction starts at the end of each sequence. A sequence
            of length 0 returns its initial state. Values in the padding, NaN included,
            reach no output and no gradient. None means that every sequence has T steps.
        mask: bool `[B, T]` (`[T, B]`, `[T]`), True at valid steps, with gaps anywhere;
            instead of `seq_lengths`. A masked step leaves the state as it is, and its
            values, NaN included, reach no output and no gradient. `y` holds there what
            `padding` says: zeros, or the last valid output before it, or the last
            layer's h_0 if there is no valid step before. Not with `padding="drop"`.
        resets: bool `[B, T]` (`[T, B]`, `[T]`): where True, the state of every layer
            becomes 0 before that step, masked or not, and no gradient passes through
            the reset; past the end that `seq_lengths` gives, none happens.
            Unidirectional specs only.
        key: a PRNG key for the dropout between layers; None means evaluation. The mask
            after layer l is `bernoulli(fold_in(key, l), float32(1 - p), [B, T, D*S])`
            for every backend, dtype, layout and choice of lengths.
        padding: what `y` holds past the end of a sequence. `"zero"`: zeros. `"hold"`:
            the last valid output of the sequence; for a sequence of length 0, the last
            layer's h_0. `"drop"`: zeros, and the final state of a sequence shorter than
            T is 0 too.
        time_major: whether time is the first axis of `x`, `resets` and `y`.
        recompute: recompute the gates in the backward pass, as products over all steps,
            and do not store them. The gradients are the same up to rounding.
        backend: `"xla"`, `"cpu"` or `"cuda"`; None takes the fastest one that can run
            the call, which `explain` names.
        precision: of float32 and float64 matrix products, as `jax.lax.Precision`; None
            takes `jax_default_matmul_precision`. 16-bit factors are multiplied exactly.

    Returns:
        `RNNOutput(y, state)`: `y` in the layout of `x` with D*S features, `state` in
        the shape of `initial_state`, both in the dtype of `x`: float32, float64,
        bfloat16 or float16 (16-bit products are summed, and the cell kept, in float32).

    Raises:
        TypeError: an argument has the wrong type or dtype, or dtypes differ.
        ValueError: a wrong shape, rank, length or choice; `resets` with two directions;
            `mask` with `seq_lengths` or with `padding="drop"`.
        ostinato.BackendError: `backend` cannot run the call; the message says why.
            Where that depends on the device, the error comes when JAX compiles.

    Holds under `jit` (also of sharded batches), `vmap` (over data, weights, keys),
    `grad`, `jvp`, `scan`, `checkpoint` and `shard_map`, in any combination and order.

    References:
        Equations and papers: `ostinato.cells.LSTM`, `LSTMP`, `GRU` and `RNN`. Layout of
        the weights: cuDNN. Padding policies: cuDNN (zero), Keras (hold), Caffe2 (hold
        and drop).
    """
    call, given = check_arguments(
        spec,
        weights,
        x,
        initial_state,
        seq_lengths=seq_lengths,
        mask=mask,
        resets=resets,
        key=key,
        padding=padding,
        time_major=time_major,
        recompute=recompute,
        backend=backend,
        precision=precision,
    )
    return _run(call, padding, given)


def rnn_step(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    x_t: Float[Array, "*B I"],
    state: State | None = None,
    *,
    resets: Bool[ArrayLike, "*B"] | None = None,
    active: Bool[ArrayLike, "*B"] | None = None,
    backend: Backend | None = None,
    precision: Any = None,
) -> RNNOutput:
    """Run one step, for streaming; T of these steps equal `rnn` over T steps.

    The state has the dtype of `x_t`. In bfloat16 and float16, `rnn` keeps the cell
    state of an LSTM, and `c`, `n` and `m` of an sLSTM, in float32 until its end, where
    steps round them each time: the two are equal up to that. The sum `n` of an sLSTM
    then stops growing at 256 in bfloat16; run long streams of one in float32.

    Args:
        spec: the kind of network; unidirectional.
        weights: flat vector `[num_params]`, or the result of `prepare`.
        x_t: one input step, `[B, I]`, or `[I]` for one sequence.
        state: `h [L, B, S]`, for an LSTM `(h, c [L, B, H])`, for an sLSTM `(h, c, n,
            m)`; without the batch axis for one sequence. None means zeros.
        resets: bool `[B]`, or `[]` for one sequence: where True, the state becomes 0
            before the step, and no gradient passes through the reset.
        active: bool `[B]`, or `[]`: where False, the stream keeps its state (after a
            reset, if there is one), its `y` is 0, and its input, NaN included, reaches
            nothing. None means that all streams are active.
        backend: as in `rnn`.
        precision: as in `rnn`.

    Returns:
        `RNNOutput(y, state)` with `y` `[B, S]`, or `[S]`.

    Raises:
        ValueError: the spec is bidirectional, or a shape is wrong.
        TypeError, ostinato.BackendError: as in `rnn`.

    Holds under the same transformations as `rnn`.
    """
    check_spec(spec)
    if spec.bidirectional:
        raise ValueError(
            "`spec` must be unidirectional for `rnn_step`, got bidirectional=True; a "
            "reverse direction needs the whole sequence, use `rnn`"
        )
    x_t = _checks.check_array("x_t", x_t)
    if x_t.ndim not in (1, 2):
        raise ValueError(
            f"`x_t` must have shape [B, I] or [I], got rank {x_t.ndim}: "
            f"{_checks.describe(x_t)}"
        )
    single = x_t.ndim == 1
    sizes = {} if single else {"B": x_t.shape[0]}
    if active is not None:
        active = _checks.check_mask("active", active, **sizes)
    if resets is not None:
        resets = _checks.check_mask("resets", resets, **sizes)
    call, given = check_arguments(
        spec,
        weights,
        jnp.expand_dims(x_t, 0),
        state,
        time_major=not single,
        backend=backend,
        precision=precision,
        names=("x_t", "state"),
    )
    return _run_step(call, given, active, resets)


# One jitted function does all the work on arrays: called outside of `jit`, it costs one
# dispatch and transfers no constants; inside of it, it leaves no trace.


@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(call: RNNCall, padding: Padding, given: Given) -> RNNOutput:
    arguments = make_arguments(call, given)
    outputs, _ = primitive.run(call, arguments.operands)
    return make_output(arguments, outputs, padding)


@ft.partial(jax.jit, static_argnums=0, inline=True)
def _run_step(
    call: RNNCall, given: Given, active: Array | None, resets: Array | None
) -> RNNOutput:
    if active is not None:
        given = given._replace(seq_lengths=active.astype(jnp.int32))
    arguments = make_arguments(call, given)
    operands = arguments.operands
    if resets is not None:
        states = select(~resets.reshape(1, -1), operands.states)
        operands = operands._replace(states=states)
    outputs, _ = primitive.run(call, operands)
    y, state = make_output(arguments, outputs, "zero")
    return RNNOutput(y[0], state)
