"""Calls of the native loop."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._rnn.sharding import FreeAxes, make_varying, partition
from .._typing import Array
from .programs.lowered import Lowered
from .programs.program import Place
from .programs.values import Unsupported
from .xla import Loop


def call(
    lowered: Lowered,
    loop: Loop,
    arguments: Sequence[Array],
    lengths: list[Array],
    reverse: bool,
    split: bool,
) -> tuple[list[Array], list[Array | None]]:
    """Run a program.

    Args:
        lowered: the program.
        loop: what is static.
        arguments: of the step, time first where they are inputs.
        lengths: int32 `[B]`, or nothing.
        reverse: whether the last step runs first.
        split: whether arrays may be split over devices.

    Returns:
        What a step returns, of all steps where it is an output, and the gradients of
        matrices.
    """
    in_tokens = loop.capacity is not None
    operands = []
    for i in lowered.arguments:
        a, kind = arguments[i], lowered.given[i]
        if kind.axis is not None and not (in_tokens and kind.place is Place.INPUT):
            first = int(kind.place is Place.INPUT)
            a = jnp.moveaxis(a, first + kind.axis, first)
        # XLA leaves out both transposes of a matrix that is one itself.
        a = a.T if kind.turned else a
        operands.append(a.astype(lowered.type_of_argument(i, a.dtype)))
    axes = [*_axes_of_operands(lowered), *(0 for _ in lengths)]

    def run(*operands: Array) -> list[Array]:
        """Run the rows that are here: a program is the same for any number of them."""
        batch = lowered.batch
        if not in_tokens:  # tokens have no axis of sequences
            mapped = zip(operands, axes, strict=True)
            batch = next(a.shape[k] for a, k in mapped if k >= 0)
        results = _shapes(lowered, loop, batch)
        # Under `vmap`, one call runs the loops of all members.
        loop_of = jax.ffi.ffi_call("ostinato_step", results, vmap_method="expand_dims")
        found = loop_of(
            *operands,
            program=np.array(lowered.program.numbers, np.int64),
            constants=np.array(lowered.program.constants, np.float64),
            steps=np.int64(loop.length),
            batch=np.int64(batch),
            capacity=np.int64(-1 if loop.capacity is None else loop.capacity),
            reverse=bool(reverse),
            lengths=bool(lengths),
            wide=lowered.dtype == jnp.float64,
            elements=np.int64(sum(a.size for a in results)),
        )
        # In a shard_map, results vary over the axes over which operands do.
        return make_varying([*found, *operands])[: len(found)]

    if split:
        free = FreeAxes(axes, _axes_of_results(lowered), (False,) * len(axes))
        run = partition(run, free)
    results = []
    for a, r in zip(run(*operands, *lengths), lowered.results, strict=True):
        if r.axis is not None and not (in_tokens and r.place is Place.OUTPUT):
            first = int(r.place is Place.OUTPUT)
            a = jnp.moveaxis(a, first, first + r.axis)
        a = a.T if r.turned else a
        a = a.sum(axis=r.added) if r.added else a
        results.append(a.astype(r.dtype))
    values = [
        jnp.zeros((), lowered.dtype) if i is None
        else results[i] if i >= 0
        else arguments[-1 - i]
        for i in lowered.sources
    ]  # fmt: skip
    return values, [None if i is None else results[i] for i in lowered.matrices]


def check_split(loop: Loop, programs: Sequence[Lowered]) -> None:
    """Raise `Unsupported` if the sequences of programs cannot be split over devices."""
    if loop.capacity is not None:
        raise Unsupported("its sequences lie one after another")
    for lowered in programs:
        shared = [r for r in lowered.results if r.place is Place.OUTPUT]
        if lowered.batch == 1 or any(r.axis is None for r in shared):
            raise Unsupported("it has results that all devices share")
        rows = _rows_of_arrays(lowered)
        if any(len(found) > 1 for found in rows.values()):
            raise Unsupported("it has an array for each sequence and for all of them")


def _shapes(lowered: Lowered, loop: Loop, batch: int) -> list[jax.ShapeDtypeStruct]:
    """Return the types of the results for a number of sequences."""
    shapes = []
    for r in lowered.results:
        shape = r.shape if r.axis is None else (batch, *r.shape[1:])
        if r.place is Place.OUTPUT and r.axis is not None and loop.capacity is not None:
            shape = (loop.capacity, *shape[1:])
        elif r.place is Place.OUTPUT:
            shape = (loop.length, *shape)
        floats = jnp.issubdtype(r.dtype, jnp.floating)
        shapes.append(jax.ShapeDtypeStruct(shape, r.dtype if floats else lowered.dtype))
    return shapes


def _axes_of_operands(lowered: Lowered) -> list[int]:
    """Return which axis of each operand is that of sequences, -1 if it has none."""
    rows = _rows_of_arrays(lowered)
    axes = []
    for position, i in enumerate(lowered.arguments):
        kind = lowered.given[i]
        if kind.place is Place.INVARIANT:
            axes.append(0 if True in rows.get(position, ()) else -1)
        elif kind.axis is None:
            axes.append(-1)
        else:
            axes.append(int(kind.place is Place.INPUT))
    return axes


def _axes_of_results(lowered: Lowered) -> list[int]:
    return [
        -1 if r.axis is None else int(r.place is Place.OUTPUT) for r in lowered.results
    ]


def _rows_of_arrays(lowered: Lowered) -> dict[int, set[bool]]:
    """Return for each operand that does not change whether it is read row by row."""
    found: dict[int, set[bool]] = {}
    for instruction in lowered.program.instructions:
        buffers = [view.buffer for view in instruction.operands]
        if instruction.weight is not None:
            buffers.append(instruction.weight.buffer)
        for buffer in buffers:
            if buffer.place is Place.INVARIANT:
                found.setdefault(buffer.array, set()).add(buffer.rows)
    return found
