"""Launches of kernels inside of JAX programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from .kernels import Code
from .plan import Grid


def launch(
    code: Code,
    name: str,
    grid: Grid,
    parameters: Sequence[jax.Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    numbers: Sequence[int],
) -> list[jax.Array]:
    """Launch a kernel, and return its results.

    The machine code is a part of the program: what `jax.export` writes needs no other
    file. Under `jax.vmap`, members are launched one after the other.

    Args:
        code: holds the kernel.
        name: of the kernel.
        grid: its blocks.
        parameters: the arrays that the kernel reads, in its order; None for null.
        results: the arrays that it writes, which come behind; None for null.
        numbers: its last parameter, a struct of 64-bit integers.
    """
    operands = [x for x in parameters if x is not None]
    written = [x for x in results if x is not None]
    places, next_one = [], 0
    for array in (*parameters, *results):
        places.append(-1 if array is None else next_one)
        next_one += array is not None
    return list(
        jax.ffi.ffi_call(_native.CUDA_TARGET, written, vmap_method="sequential")(
            *operands,
            cubin=np.frombuffer(code.cubin, np.uint8),
            digest=code.digest,
            name=name,
            grid=np.array(grid, np.int64),
            parameters=np.array(places, np.int64),
            numbers=np.array(numbers, np.int64),
        )
    )


def launch_ensemble(
    code: Code,
    name: str,
    grid: Grid,
    parameters: Sequence[jax.Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    numbers: Sequence[int],
) -> list[jax.Array]:
    """Launch a kernel that runs all members of an ensemble together.

    Under `jax.vmap` all of its arrays lead with the axis of members, each of which has
    the blocks of `grid`. The arguments are those of `launch`.
    """

    def run(members: int, *operands: jax.Array) -> list[jax.Array]:
        given = iter(operands)
        lead = (members,) if members else ()
        return launch(
            code,
            name,
            grid._replace(blocks=grid.blocks * max(1, members)),
            [None if x is None else next(given) for x in parameters],
            [
                None if x is None else jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)
                for x in results
            ],
            numbers,
        )

    return _grouped(run)(*(x for x in parameters if x is not None))


def _grouped(run: Callable) -> Callable:
    """Return `run(0, *arrays)`, which `jax.vmap` turns into `run(members, *arrays)`."""

    @jax.custom_batching.custom_vmap
    def one(*arrays: jax.Array) -> list[jax.Array]:
        return run(0, *arrays)

    @one.def_vmap
    def _(members: int, mapped: list[bool], *arrays: jax.Array) -> tuple:
        grown = [
            a if m else jnp.broadcast_to(a, (members, *a.shape))
            for a, m in zip(arrays, mapped, strict=True)
        ]
        results = run(members, *grown)
        return results, [True] * len(results)

    return one
