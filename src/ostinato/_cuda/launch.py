"""Launches of kernels inside of JAX programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _native
from .kernels import Code
from .plan import MOST_BLOCKS, Grid


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
    weights: int,
) -> list[jax.Array]:
    """Launch a kernel that runs all members of an ensemble together.

    Under `jax.vmap` its arrays lead with the axis of members. Members that share their
    weights are launched one after the other, so that these are not copied.

    Args:
        code: holds the kernel.
        name: of the kernel.
        grid: the blocks of each member.
        parameters: the arrays that the kernel reads, in its order; None for null.
        results: the arrays that it writes, which come behind; None for null.
        numbers: its last parameter, a struct of 64-bit integers.
        weights: which of the parameters are the weights, in words.
    """
    places = [i for i, x in enumerate(parameters) if x is not None]

    def run(members: int | None, *operands: jax.Array) -> list[jax.Array]:
        given = dict(zip(places, operands, strict=True))
        lead = () if members is None else (members,)
        return launch(
            code,
            name,
            grid._replace(blocks=grid.blocks * (1 if members is None else members)),
            [given.get(i) for i in range(len(parameters))],
            [
                None if x is None else jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)
                for x in results
            ],
            numbers,
        )

    @jax.custom_batching.custom_vmap
    def one(*arrays: jax.Array) -> list[jax.Array]:
        return run(None, *arrays)

    @one.def_vmap
    def _(members: int, mapped: list[bool], *arrays: jax.Array) -> tuple:
        own = places.index(weights)
        if mapped[own] and _fits(members, grid, arrays[own]):
            grown = [
                a if m else jnp.broadcast_to(a, (members, *a.shape))
                for a, m in zip(arrays, mapped, strict=True)
            ]
            results = run(members, *grown)
        else:
            each = tuple(a for a, m in zip(arrays, mapped, strict=True) if m)

            def member(each: tuple) -> list[jax.Array]:
                left = iter(each)
                given = [
                    next(left) if m else a for a, m in zip(arrays, mapped, strict=True)
                ]
                return run(None, *given)

            results = lax.map(member, each)
        return results, [True] * len(results)

    return one(*(x for x in parameters if x is not None))


def _fits(members: int, grid: Grid, weights: jax.Array) -> bool:
    """Return whether kernels can count blocks and fragments of weights, of 4 words."""
    known = isinstance(members, int) and members > 0  # in an export it may be a symbol
    return known and max(members * grid.blocks, weights.size // 4) <= MOST_BLOCKS
