"""Loops whose sequences lie one after another, as loops over padded sequences.

A token is one step of one sequence. `[capacity, ...]` has the tokens of the first
sequence in the order of time, then those of the second, and zeros at the end. The
native library reads and writes such arrays where they lie. What XLA runs, it runs on
padded copies.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._padding import fill_empty_sequences, is_step, select
from .._typing import Array
from . import xla
from .gradients import Mask, is_float
from .jaxprs import split_at, type_of
from .loop_programs import lower_backward, lower_forward
from .programs.program import Place
from .programs.values import Unsupported
from .xla import Loop

Axes = Sequence[int | None]
"""For each of some arrays which axis of a step is that of sequences, None if none is.

Of all steps, an array that has one is `[capacity, ...]` without it, and another one is
`[T, ...]`.
"""


def forward(
    loop: Loop, wrt: Mask | None, operands: Sequence[Array], run: Callable = xla.forward
) -> list[Array]:
    """Run a loop; see `xla.forward`, which is the default of `run`."""
    if loop.capacity is None:
        return run(loop, wrt, operands)
    count = loop.step.num_states
    padded, given = _padded(loop), _padded_operands(loop, operands)
    results = run(padded, wrt, given)
    stacked = map(
        ft.partial(to_tokens, loop, operands[-1]), results[count:], axes_of(loop, wrt)
    )
    return [*results[:count], *stacked]


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
    run: Callable = xla.backward,
) -> dict[int, Array]:
    """Run a loop backwards; see `xla.backward`, which is the default of `run`."""
    if loop.capacity is None:
        return run(loop, wrt, operands, saved, cotangents)
    step, lengths = loop.step, operands[-1]
    pad = ft.partial(_to_steps, loop, lengths)
    axes = axes_of(loop, wrt)
    results = step.jaxpr.outvars
    of_outputs = zip(results[step.num_states :], axes, strict=False)
    float_axes = [axis for v, axis in of_outputs if is_float(v.aval)]
    of_saved = axes[len(results) - step.num_states :]
    d_states, d_outputs = split_at(cotangents, [len(cotangents) - len(float_axes)])
    found = run(
        _padded(loop),
        wrt,
        _padded_operands(loop, operands),
        list(map(pad, saved, of_saved)),
        [*d_states, *map(pad, d_outputs, float_axes)],
    )
    first = step.num_invariant
    for i, axis in enumerate(step.input_axes):
        if first + i in found:
            found[first + i] = to_tokens(loop, lengths, found[first + i], axis)
    return found


def axes_of(loop: Loop, wrt: Mask | None) -> list[int | None]:
    """Return the axes of the outputs, and of what is saved if there is `wrt`."""
    lowered = lower_forward(loop, wrt)
    axes = []
    for source in lowered.sources[loop.step.num_states :]:
        assert source is not None, "a loop forward returns all results"
        known = lowered.given[-1 - source] if source < 0 else lowered.results[source]
        axes.append(known.axis)
    return axes


def stacked_types(loop: Loop, wrt: Mask | None, types: Sequence[Any]) -> list[Any]:
    """Return the types of what a step returns and saves, for all steps."""
    axes = [None] * len(types) if loop.capacity is None else axes_of(loop, wrt)
    return [
        jax.ShapeDtypeStruct((loop.length, *a.shape), a.dtype)
        if axis is None
        else jax.ShapeDtypeStruct(
            (loop.capacity, *a.shape[:axis], *a.shape[axis + 1 :]), a.dtype
        )
        for a, axis in zip(types, axes, strict=True)
    ]


def all_as_tokens(loop: Loop, lengths: Array, results: Sequence[Array]) -> list[Array]:
    """Return the results of a loop, the outputs in tokens with the shapes of a step."""
    found = list(results)
    outputs = range(loop.step.num_states, len(found))
    for i, axis in zip(outputs, axes_of(loop, None), strict=True):
        shape = type_of(loop.step.jaxpr.outvars[i]).shape
        assert axis in (0, None) or shape[0] == 1, "it keeps the axis of sequences"
        a = found[i] if axis is not None else to_tokens(loop, lengths, found[i], 0)
        found[i] = a.reshape(a.shape[0], *shape[1:])
    return found


def check_backward(loop: Loop, wrt: Mask) -> None:
    """Raise `Unsupported` if the native library cannot run a loop backwards."""
    lowered = lower_backward(loop, wrt).lowered
    if loop.capacity is None:
        return
    if any(r.place is Place.OUTPUT and r.axis is not None and r.added
           for r in lowered.results):  # fmt: skip
        raise Unsupported("it adds up sequences that lie one after another")
    if None in lowered.matrices:
        raise Unsupported("it multiplies sequences that lie one after another")


def _padded(loop: Loop) -> Loop:
    return loop._replace(capacity=None)


def _padded_operands(loop: Loop, operands: Sequence[Array]) -> list[Array]:
    step, lengths = loop.step, operands[-1]
    invariant, inputs, states = step.parts(operands)
    pad = ft.partial(_to_steps, loop, lengths)
    return [*invariant, *map(pad, inputs, step.input_axes), *states, lengths]


def _to_steps(loop: Loop, lengths: Array, a: Array, axis: int | None) -> Array:
    """Return `[T, ...]` of tokens; where a sequence has no step, its first to run."""
    if axis is None:
        return a
    lengths = lengths.astype(jnp.int32)
    offsets = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    valid = is_step(lengths, loop.length, 0)
    t = jnp.arange(loop.length, dtype=jnp.int32)[:, None]
    take = ft.partial(jnp.take, a, axis=0, mode="clip")
    begin = take(offsets + (jnp.maximum(lengths - 1, 0) if loop.reverse else 0))
    begin = fill_empty_sequences(begin, lengths)
    padded = select(valid, take(jnp.where(valid, offsets[None] + t, 0)), begin[None])
    return jnp.moveaxis(padded, 1, 1 + axis)


def to_tokens(loop: Loop, lengths: Array, a: Array, axis: int | None) -> Array:
    """Return tokens of `[T, ...]`, with zeros in the unused capacity."""
    if axis is None:
        return a
    assert loop.capacity is not None, "there are tokens"
    ends = jnp.cumsum(lengths.astype(jnp.int32), dtype=jnp.int32)
    token = jnp.arange(loop.capacity, dtype=jnp.int32)
    row = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    valid = token < ends[-1]
    row = jnp.minimum(row, lengths.shape[0] - 1)
    t = jnp.clip(token - (ends[row] - lengths[row]), 0, loop.length - 1)
    return select(valid, jnp.moveaxis(a, 1 + axis, 1)[t, row])
