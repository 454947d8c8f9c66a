"""From the arguments of `rnn` to a call and its operands, checked."""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .. import _checks
from .._typing import Array, ArrayLike, Backend, Padding, State
from . import backends, layout
from .call import Operands, RNNCall
from .masking import ValidSteps
from .prepared import PreparedWeights
from .spec import RNNSpec, check_spec, state_names, state_shapes


class Arguments(NamedTuple):
    """The checked arguments of a call.

    Attributes:
        call: what is static.
        operands: the arrays, with a batch axis.
        single: whether the arguments are of one sequence, without a batch axis.
        valid: the positions of the valid steps, which come first in `operands`; None
            without a mask.
        reset_at_end: where a mask is given, bool `[B]`: which final states become 0.
    """

    call: RNNCall
    operands: Operands
    single: bool
    valid: ValidSteps | None = None
    reset_at_end: Array | None = None


def make_call(
    spec: RNNSpec,
    weights: Array | PreparedWeights,
    x: Array,
    initial_state: State | None = None,
    *,
    seq_lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: Array | None = None,
    key: Array | None = None,
    padding: Padding = "zero",
    time_major: bool = False,
    recompute: bool = False,
    backend: Backend | None = None,
    precision: Any = None,
    names: tuple[str, str] = ("x", "initial_state"),
) -> Arguments:
    """Check all arguments and return them as a call and its operands.

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
    arguments = Arguments(call, operands, single)
    if mask is None:
        return arguments
    if seq_lengths is not None:
        raise ValueError(
            "`mask` must be None where `seq_lengths` is given; the mask of lengths is "
            "arange(T) < seq_lengths[:, None]"
        )
    if padding == "drop":
        raise ValueError(
            "`padding` must be 'zero' or 'hold' with a `mask`, got 'drop', which is "
            "about sequences that end before T"
        )
    return _masked(arguments, mask)


def _masked(arguments: Arguments, mask: Any) -> Arguments:
    """Return the arguments with the valid steps of each sequence first."""
    call, operands, single = arguments[:3]
    steps, batch = call.sizes(operands)
    axis = call.time_axis
    sizes = {"T": steps, "B": batch} if axis == 0 else {"B": batch, "T": steps}
    mask = _checks.check_mask("mask", mask, **({"T": steps} if single else sizes))
    mask = mask.reshape(tuple(sizes.values()))
    valid = ValidSteps.of(mask.T if axis == 0 else mask)
    resets, at_end = operands.resets, None
    if resets is not None:
        resets, at_end = valid.gather_resets(resets.T if axis == 0 else resets)
        resets = resets.T if axis == 0 else resets
    operands = operands._replace(
        x=valid.gather(operands.x, axis),
        seq_lengths=valid.lengths,
        resets=resets,
        dropout_masks=tuple(valid.gather(m, axis) for m in operands.dropout_masks),
    )
    return Arguments(call, operands, single, valid, at_end)


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
