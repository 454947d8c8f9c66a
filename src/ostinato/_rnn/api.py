"""The public entry, `rnn` and `rnn_step`, where arguments are checked."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .. import _checks, _padding
from .._typing import Array, ArrayLike, Backend, Bool, Float, Int, Padding, State
from . import backends, layout, primitive
from .call import Operands, Outputs, RNNCall
from .prepared import PreparedWeights
from .spec import RNNSpec, check_spec, state_names, state_shapes


class RNNOutput(NamedTuple):
    """The last layer's outputs `y`, and `state`: `h`, or `(h, c)` for an LSTM."""

    y: Float[Array, "*B T D*S"]
    state: State


def rnn(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    x: Float[Array, "*B T I"],
    initial_state: State | None = None,
    *,
    seq_lengths: Int[ArrayLike, "*B"] | None = None,
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
        initial_state: `h [L*D, B, S]`, for an LSTM `(h, c [L*D, B, H])`, in the order
            fwd0, rev0, fwd1, ...; None means zeros.
        seq_lengths: integers `[B]`, each in 0..T, in any order; a scalar for one
            sequence. A reverse direction starts at the end of each sequence. A sequence
            of length 0 returns its initial state. Values in the padding, NaN included,
            reach no output and no gradient. None means that every sequence has T steps.
        resets: bool `[B, T]` (`[T, B]`, `[T]`): where True, the state of every layer
            becomes 0 before that step, and no gradient passes through the reset.
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
        ValueError: a wrong shape, rank, length or choice; `resets` with two directions.
        ostinato.BackendError: `backend` cannot run the call; the message says why.
            Where that depends on the device, the error comes when JAX compiles.

    Holds under `jit` (also of sharded batches), `vmap` (over data, weights, keys),
    `grad`, `jvp`, `scan`, `checkpoint` and `shard_map`, in any combination and order.

    References:
        Equations and papers: `ostinato.cells.LSTM`, `LSTMP`, `GRU` and `RNN`. Layout of
        the weights: cuDNN. Padding policies: cuDNN (zero), Keras (hold), Caffe2 (hold
        and drop).
    """
    call, operands, single = make_call(
        spec,
        weights,
        x,
        initial_state,
        seq_lengths=seq_lengths,
        resets=resets,
        key=key,
        padding=padding,
        time_major=time_major,
        recompute=recompute,
        backend=backend,
        precision=precision,
    )
    outputs, _ = primitive.run(call, operands)
    return make_output(call, operands, outputs, padding, single)


def rnn_step(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    x_t: Float[Array, "*B I"],
    state: State | None = None,
    *,
    backend: Backend | None = None,
    precision: Any = None,
) -> RNNOutput:
    """Run one step, for streaming; T of these steps equal `rnn` over T steps.

    Args:
        spec: the kind of network; unidirectional.
        weights: flat vector `[num_params]`, or the result of `prepare`.
        x_t: one input step, `[B, I]`, or `[I]` for one sequence.
        state: `h [L, B, S]`, for an LSTM `(h, c [L, B, H])`; without the batch axis for
            one sequence. None means zeros.
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
    call, operands, _ = make_call(
        spec,
        weights,
        x_t[None],
        state,
        time_major=not single,
        backend=backend,
        precision=precision,
        names=("x_t", "state"),
    )
    outputs, _ = primitive.run(call, operands)
    y, state = make_output(call, operands, outputs, "zero", single)
    return RNNOutput(y[0], state)


# --------------------------------- from arguments to a call; passes.py uses it too


def make_call(
    spec: RNNSpec,
    weights: Array | PreparedWeights,
    x: Array,
    initial_state: State | None = None,
    *,
    seq_lengths: ArrayLike | None = None,
    resets: Array | None = None,
    key: Array | None = None,
    padding: Padding = "zero",
    time_major: bool = False,
    recompute: bool = False,
    backend: Backend | None = None,
    precision: Any = None,
    names: tuple[str, str] = ("x", "initial_state"),
) -> tuple[RNNCall, Operands, bool]:
    """Check all arguments; return the call, its operands, and whether x had no batch.

    `names` are the caller's names for the input and the state, for error messages.
    """
    x_name, state_name = names
    check_spec(spec)
    _checks.check_choice("padding", padding, get_args(Padding))
    time_major = _checks.check_bool("time_major", time_major)
    recompute = _checks.check_bool("recompute", recompute)
    prepared = None
    if isinstance(weights, PreparedWeights):
        weights, prepared = weights
    weights = _checks.check_array("weights", weights)
    x = _checks.check_array(x_name, x)
    _checks.check_floating(x_name, x, _checks.FLOATS)
    _checks.check_same_dtype(**{x_name: x}, weights=weights)
    layout.check_weights(weights, spec)
    backends.check(backend, spec, x.dtype)

    single = x.ndim == 2
    if x.ndim not in (2, 3):
        order = "[T, B, I]" if time_major else "[B, T, I]"
        raise ValueError(
            f"`x` must have shape {order}, or [T, I] for one sequence, got "
            f"{_checks.describe(x)}"
        )
    if single and time_major:
        # One sequence has a single layout; time-major needs no copy to add a batch.
        x = x[:, None]
    elif single:
        x = x[None]
    if x.shape[2] != spec.input_size:
        raise ValueError(
            f"`{x_name}` must have input_size={spec.input_size} features in its last "
            f"axis, got {x.shape[2]}"
        )
    call = RNNCall(
        spec,
        time_major,
        recompute=recompute,
        precision=_resolve_precision(precision),
        backend=backend,
    )
    steps, batch = x.shape[call.time_axis], x.shape[1 - call.time_axis]
    states = _initial_states(spec, initial_state, x, batch, single, state_name)
    lengths = None
    if seq_lengths is not None:
        lengths = _checks.check_seq_lengths(seq_lengths, batch, steps, single)
        lengths = lengths.reshape(1) if single else lengths
    if resets is not None:
        resets = _checked_resets(spec, resets, x, single, time_major)
    dropout_masks = ()
    if key is not None:
        dropout_masks = _dropout_masks(call, _checks.check_key(key), batch, steps)
    operands = Operands(
        weights,
        x,
        states,
        lengths,
        resets=resets,
        dropout_masks=dropout_masks,
        prepared=prepared,
    )
    return call, operands, single


def _resolve_precision(precision: Any) -> Any:
    """Return the precision that is in force at this call, also for its derivatives."""
    if precision is None:
        return jax.config.jax_default_matmul_precision  # pyright: ignore
    try:
        _check_precision(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`precision` must be None or a jax.lax.Precision, got {precision!r}"
        ) from error
    return precision


@ft.lru_cache
def _check_precision(precision: Any) -> None:
    """Raise unless JAX accepts the value in an abstract product."""
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.eval_shape(lambda a: jnp.dot(a, a, precision=precision), one)


def _initial_states(
    spec: RNNSpec, state: Any, x: Array, batch: Any, single: bool, name: str
) -> tuple[Array, ...]:
    names, shapes = state_names(spec), state_shapes(spec, batch)
    if state is None:
        return tuple(jnp.zeros(shape, x.dtype) for shape in shapes)
    given = check_state(spec, state, name)
    if len(names) > 1:
        labels = [f"{name}[{i}]" for i in range(len(names))]
    else:
        labels = [name]
    return tuple(
        _checked_state(label, a, x, shape, single)
        for label, a, shape in zip(labels, given, shapes, strict=True)
    )


def check_state(spec: RNNSpec, state: Any, name: str) -> tuple[Any, ...]:
    """Return the user's `state` as a tuple with one item for each state of the mode.

    Raises:
        TypeError: `state` is a tuple although the mode has one state, or is not a tuple
            with as many items as the mode has states.
    """
    names = state_names(spec)
    is_tuple = isinstance(state, (tuple, list))
    if len(names) == 1 and is_tuple:
        raise TypeError(
            f"`{name}` must be one array {names[0]} for mode {spec.mode!r}, got "
            f"{_describe_state(state)}"
        )
    if len(names) > 1 and not (is_tuple and len(state) == len(names)):
        raise TypeError(
            f"`{name}` must be ({', '.join(names)}) for mode {spec.mode!r}, got "
            f"{_describe_state(state)}"
        )
    return tuple(state) if is_tuple else (state,)


def _describe_state(state: Any) -> str:
    if isinstance(state, (tuple, list)):
        return f"a {type(state).__name__} of {len(state)}"
    return _checks.describe(state)


def _checked_state(
    name: str, a: Any, x: Array, shape: tuple[Any, ...], single: bool
) -> Array:
    a = _checks.check_array(name, a)
    _checks.check_same_dtype(x=x, **{name: a})
    layers, batch, size = shape
    if single:
        _checks.check_shape(name, a, **{"L*D": layers, "H": size})
        return a[:, None]
    _checks.check_shape(name, a, **{"L*D": layers, "B": batch, "H": size})
    return a


def _checked_resets(
    spec: RNNSpec, resets: Any, x: Array, single: bool, time_major: bool
) -> Array:
    if spec.bidirectional:
        raise ValueError(
            "`resets` needs a unidirectional spec, got bidirectional=True: a reverse "
            "direction would carry later episodes into earlier ones"
        )
    if single:
        resets = _checks.check_resets(resets, T=x.shape[0 if time_major else 1])
        return resets.reshape(x.shape[:2])
    names = ("T", "B") if time_major else ("B", "T")
    return _checks.check_resets(resets, **dict(zip(names, x.shape, strict=False)))


def _dropout_masks(
    call: RNNCall, key: Array, batch: Any, steps: Any
) -> tuple[Array, ...]:
    """Draw a mask for each layer, in logical shape `[B, T, F]`, True where it keeps."""
    spec = call.spec
    if spec.dropout == 0 or spec.num_layers == 1:
        return ()
    shape = (batch, steps, spec.num_directions * spec.output_size)
    kept = jnp.float32(1 - spec.dropout)  # else the mask would depend on the x64 flag
    masks = [
        jax.random.bernoulli(jax.random.fold_in(key, layer), kept, shape)
        for layer in range(spec.num_layers - 1)
    ]
    if call.time_major:
        masks = [jnp.swapaxes(mask, 0, 1) for mask in masks]
    return tuple(masks)


# ------------------------------------------------------- from results to the output


def make_output(
    call: RNNCall, operands: Operands, outputs: Outputs, padding: Padding, single: bool
) -> RNNOutput:
    """Apply the padding policy, and remove the batch axis if `make_call` added it."""
    y, states = _pad(call, operands, outputs, padding)
    if single:
        y, states = jnp.squeeze(y, 1 - call.time_axis), [s[:, 0] for s in states]
    return RNNOutput(y, as_state(states))


def as_state(states: Sequence[Any]) -> Any:
    """Return the state as users see it: one array, or a tuple of several."""
    return states[0] if len(states) == 1 else tuple(states)


def _pad(
    call: RNNCall, operands: Operands, outputs: Outputs, padding: Padding
) -> Outputs:
    """Apply the padding policy to results that are 0 past the end; linear in them."""
    lengths = operands.seq_lengths
    if lengths is None or padding == "zero":
        return outputs
    if padding == "drop":
        steps, _ = call.sizes(operands)
        return outputs._replace(
            states=_padding.drop(outputs.states, lengths, steps, batch_axis=1)
        )
    directions = call.spec.num_directions
    initial = jnp.concatenate(list(operands.states[0][-directions:]), axis=-1)
    held = _padding.hold(outputs.y, lengths, call.time_axis, initial)
    return outputs._replace(y=held)
