"""From the arguments of `rnn` to a call and its operands.

`check_arguments` looks at what the user gave and computes nothing, so that errors are
raised at once; `make_arguments` makes the operands of it, and may be traced.
"""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .. import _checks
from .._typing import Array, ArrayLike, Backend, Padding, State
from . import backends, layout
from .call import Operands, RNNCall
from .masking import ValidSteps, check_with_mask
from .prepared import PreparedWeights
from .spec import RNNSpec, check_spec, state_names, state_shapes


class Given(NamedTuple):
    """The arrays that the caller gave, checked, in the caller's shapes; a pytree."""

    weights: Array
    x: Array
    states: tuple[Array, ...] | None = None
    seq_lengths: Array | None = None
    mask: Array | None = None
    resets: Array | None = None
    key: Array | None = None
    prepared: Array | None = None


class Arguments(NamedTuple):
    """The arguments of a call, as the operator takes them.

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


def check_arguments(
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
) -> tuple[RNNCall, Given]:
    """Check all arguments and return what is static and what is an array.

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
        if prepared is not None:
            prepared = _checks.check_array("weights.packed", prepared)
    weights = layout.as_flat(weights)
    x = _checks.check_array(x_name, x)
    _checks.check_floating(x_name, x, _checks.FLOATS)
    _checks.check_same_dtype(**{x_name: x}, weights=weights)
    layout.check_weights(weights, spec)
    backends.check(backend, spec, x.dtype)
    if x.ndim not in (2, 3):
        order = "[T, B, I]" if time_major else "[B, T, I]"
        raise ValueError(
            f"`{x_name}` must have shape {order}, or [T, I] for one sequence, got "
            f"{_checks.describe(x)}"
        )
    if x.shape[-1] != spec.input_size:
        raise ValueError(
            f"`{x_name}` must have input_size={spec.input_size} features in its last "
            f"axis, got {x.shape[-1]}"
        )
    call = RNNCall(
        spec,
        time_major,
        recompute=recompute,
        precision=_resolve_precision(precision),
        backend=backend,
    )
    single = x.ndim == 2
    sizes = {"T": x.shape[0]} if single else _sizes(x, time_major)
    states = lengths = None
    if initial_state is not None:
        given = check_state(spec, initial_state, state_name)
        like = {x_name: x}
        states = _checked_states(spec, given, sizes.get("B"), state_name, like)
    if seq_lengths is not None:
        batch = sizes.get("B", 1)
        lengths = _checks.check_seq_lengths(seq_lengths, batch, sizes["T"], single)
    if resets is not None:
        if spec.bidirectional:
            raise ValueError(
                "`resets` needs a unidirectional spec, got bidirectional=True: a "
                "reverse direction would carry later episodes into earlier ones"
            )
        resets = _checks.check_mask("resets", resets, **sizes)
    if key is not None:
        key = _checks.check_key(key)
    if mask is not None:
        check_with_mask(seq_lengths, padding)
        mask = _checks.check_mask("mask", mask, **sizes)
    return call, Given(weights, x, states, lengths, mask, resets, key, prepared)


def make_arguments(call: RNNCall, given: Given) -> Arguments:
    """Return the operands, with a batch axis and in the operator's dtypes."""
    single = given.x.ndim == 2
    axis = 1 - call.time_axis  # of the batch
    x, resets, mask, lengths = given.x, given.resets, given.mask, given.seq_lengths
    if single:
        x = jnp.expand_dims(x, axis)
        resets = None if resets is None else jnp.expand_dims(resets, axis)
        mask = None if mask is None else jnp.expand_dims(mask, axis)
        lengths = None if lengths is None else lengths.reshape(1)
    steps, batch = x.shape[call.time_axis], x.shape[axis]
    if given.states is None:
        shapes = state_shapes(call.spec, batch)
        states = tuple(jnp.zeros(shape, x.dtype) for shape in shapes)
    else:
        states = tuple(s[:, None] if single else s for s in given.states)
    dropout_masks = ()
    if given.key is not None:
        dropout_masks = _dropout_masks(call, given.key, batch, steps)
    operands = Operands(
        given.weights,
        x,
        states,
        lengths,
        resets=resets,
        dropout_masks=dropout_masks,
        prepared=given.prepared,
    )
    if mask is None:
        return Arguments(call, operands, single)
    return _masked(call, operands, single, mask)


def _sizes(x: Array, time_major: bool) -> dict[str, Any]:
    """Return the sizes of time and batch, in the order of the axes of `x`."""
    return dict(zip(("T", "B") if time_major else ("B", "T"), x.shape, strict=False))


def _masked(call: RNNCall, operands: Operands, single: bool, mask: Array) -> Arguments:
    """Return the arguments with the valid steps of each sequence first."""
    axis = call.time_axis
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


def _checked_states(
    spec: RNNSpec,
    states: tuple[Any, ...],
    batch: Any,
    name: str,
    like: dict[str, Array],
) -> tuple[Array, ...]:
    """Return the states as arrays, with the dtype of `like`, the inputs by their name.

    `batch` is None for one sequence without batch.
    """
    checked = []
    for i, (a, shape) in enumerate(zip(states, state_shapes(spec, batch), strict=True)):
        label = f"{name}[{i}]" if len(states) > 1 else name
        a = _checks.check_array(label, a)
        _checks.check_same_dtype(**like, **{label: a})
        dims = dict(zip(("L*D", "B", "H"), shape, strict=True))
        if batch is None:
            del dims["B"]
        _checks.check_shape(label, a, **dims)
        checked.append(a)
    return tuple(checked)


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
