"""The code that all layers share: batch axes, reversal, resets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import RNNSpec, _checks, rnn
from .._padding import select
from .._rnn.output import as_state
from .._typing import Array


def run_fused(
    spec: RNNSpec,
    weights: Array,
    inputs: Array,
    states: Sequence[Array],
    *,
    seq_lengths: Array | None = None,
    resets: Array | None = None,
    time_major: bool = False,
    reverse: bool = False,
    keep_order: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """Run one layer over sequences with any number of batch axes.

    Args:
        spec: the layer.
        weights: its flat vector.
        inputs: `[*batch, T, I]`, or `[T, *batch, I]` if `time_major`.
        states: the initial states `[*batch, H]`, the output's first; with two
            directions `[2, *batch, H]`.
        seq_lengths: integers `[*batch]`, or None.
        resets: bool, the shape of `inputs` without features, or None.
        time_major: whether time is the first axis.
        reverse: run the steps of each sequence from its end.
        keep_order: return the outputs of a reversed run in the order of the inputs.

    Returns:
        Final states, shaped as `states`, and outputs laid out as `inputs`.

    Raises:
        ValueError: `seq_lengths` or `resets` has another shape.
    """
    time_axis = 0 if time_major else inputs.ndim - 2
    sizes = leading_sizes(inputs.shape[:-1], time_axis)
    if seq_lengths is not None:
        if not hasattr(seq_lengths, "shape"):
            seq_lengths = jnp.asarray(seq_lengths)
        rows = {name: size for name, size in sizes.items() if name != "T"}
        _checks.check_shape("seq_lengths", seq_lengths, **rows)
    if resets is not None:
        resets = _checks.check_mask("resets", resets, **sizes)
    batch = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 : -1]
    flat, steps = math.prod(batch), inputs.shape[time_axis]
    axis = 0 if time_major else 1
    entries = (steps, flat) if time_major else (flat, steps)
    x = inputs.reshape(*entries, inputs.shape[-1])
    lengths = None if seq_lengths is None else jnp.reshape(seq_lengths, flat)
    if reverse:
        x = flip(x, lengths, axis)
    directions = spec.num_directions
    first = tuple(a.reshape(directions, flat, a.shape[-1]) for a in states)
    y, final = rnn(
        spec,
        weights,
        x,
        as_state(first),
        seq_lengths=lengths,
        resets=None if resets is None else jnp.reshape(resets, entries),
        time_major=time_major,
    )
    if reverse and keep_order:
        y = flip(y, lengths, axis)
    final = final if isinstance(final, tuple) else (final,)
    final = tuple(a.reshape(b.shape) for a, b in zip(final, states, strict=True))
    return final, y.reshape(*inputs.shape[:-1], y.shape[-1])


def leading_sizes(shape: Sequence[int], time_axis: int) -> dict[str, int]:
    """Return the sizes of the axes before the features, by names for errors."""
    count = len(shape) - 1
    names = ["B"] if count == 1 else [f"B{i}" for i in range(1, count + 1)]
    names.insert(time_axis, "T")
    return dict(zip(names, shape, strict=True))


def flip(a: Array, seq_lengths: Array | None, time_axis: int) -> Array:
    """Reverse the steps of each sequence and leave its padding behind them.

    Args:
        a: `[B, T, ...]` or `[T, B, ...]`.
        seq_lengths: integers `[B]`, or None.
        time_axis: 1 or 0.
    """
    if seq_lengths is None:
        return jnp.flip(a, time_axis)
    t = jnp.arange(a.shape[time_axis], dtype=jnp.int32)
    t = jnp.expand_dims(t, tuple(i for i in range(a.ndim) if i != time_axis))
    lengths = _checks.clamped(seq_lengths, 0, a.shape[time_axis])
    lengths = jnp.expand_dims(lengths, (time_axis, *range(2, a.ndim)))
    source = jnp.where(t < lengths, lengths - 1 - t, t)
    return jnp.take_along_axis(a, source, axis=time_axis)


# A network of at least so many weights runs as in the other library where a call has
# fewer than so many steps, counted over all sequences: a fused call first gathers the
# weights and packs them, and that would take longer than the call. Measured on a CPU.
_FEWEST_STEPS = ((1 << 20, 16), (1 << 18, 8), (1, 2))


def too_short_reason(spec: RNNSpec, inputs: Any) -> str | None:
    """Return why a call is too short for the fused operator; None if it is not.

    Args:
        spec: the layer.
        inputs: `[..., I]`, with any batch axes and steps. Those of a size that is not
            known while tracing are not too short; neither are those of 16 bits, where
            the two libraries round differently.
    """
    steps, weights = math.prod(inputs.shape[:-1]), spec.num_params
    if not isinstance(steps, int) or inputs.dtype.itemsize < 4:
        return None
    fewest = next(fewest for least, fewest in _FEWEST_STEPS if weights >= least)
    if steps >= fewest:
        return None
    return (
        f"gathering {weights} weights pays from {fewest} steps on, counted over all "
        f"sequences, and the call has {steps}"
    )


def cell_dtype_reason(cell: Any, wanted: Any, inputs: Any, carry: Any) -> str | None:
    """Return why a cell of flax does not compute in one dtype; None if it does.

    Args:
        cell: the cell, of nnx or linen.
        wanted: the dtype of its parameters.
        inputs: what it is called with.
        carry: the first carry; None: the one that the cell makes.
    """
    computes = wanted if cell.dtype is None else jnp.dtype(cell.dtype)
    if computes != wanted:
        return f"the cell computes in {computes}, its parameters are {wanted}"
    if carry is None:
        carry = jax.ShapeDtypeStruct((), cell.param_dtype)
    carries = {f"carry[{i}]": a for i, a in enumerate(jax.tree.leaves(carry))}
    return same_dtype_reason(wanted, inputs=inputs, **carries)


def same_dtype_reason(wanted: Any, **arrays: Any) -> str | None:
    """Return which array has another dtype than the parameters; None if none has."""
    for name, array in arrays.items():
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # which JAX computes in
        if dtype != wanted:
            return f"`{name}` is {dtype} and the parameters are {wanted}"
    return None


def check_carry(
    name: str, carry: Any, spec: RNNSpec, inputs: Any, time_major: bool
) -> None:
    """Check that `carry` is what a cell of flax has: `(c, h)` of an LSTM, else `h`."""
    time_axis = 0 if time_major else inputs.ndim - 2
    batch = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 : -1]
    shape, two = (*batch, spec.hidden_size), spec.mode == "lstm"
    given = carry if isinstance(carry, tuple) else (carry,)
    shapes = [getattr(a, "shape", None) for a in given]
    if isinstance(carry, tuple) != two or shapes != [shape] * (1 + two):
        wanted = "(c, h), two arrays" if two else "an array"
        got = ", ".join(map(_checks.describe, given))
        raise ValueError(
            f"`{name}` must be {wanted} of shape {list(shape)}, as the cell's "
            f"`initialize_carry` returns it, got "
            + (f"({got})" if isinstance(carry, tuple) else got)
        )


def from_carry(carry: Any) -> tuple[Array, ...]:
    """Return the carry of a cell of flax, `h` or `(c, h)`, as states `(h, c)`."""
    return carry[::-1] if isinstance(carry, tuple) else (carry,)


def to_carry(states: tuple[Array, ...]) -> Any:
    """Return states `(h, c)` as the carry of a cell of flax, `(c, h)`, or `h`."""
    return as_state(states[::-1])


def select_carry(reset: Array, carry: Any) -> Any:
    """Return `carry`, with zeros where `reset`, of its leading axes, is True."""
    return select(~reset, carry)
