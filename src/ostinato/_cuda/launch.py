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
    weights: int | None = None,
) -> list[jax.Array]:
    """Launch a kernel, and return its results.

    The machine code is a part of the program: what `jax.export` writes needs no other
    file. Under `jax.vmap`, a kernel that takes ensembles runs all members together,
    which lead all its arrays as one more axis. Other kernels run one member after the
    other, and so do members that share their weights, which are then not copied.

    Args:
        code: holds the kernel.
        name: of the kernel.
        grid: its blocks, of each member.
        parameters: the arrays that the kernel reads, in its order; None for null.
        results: the arrays that it writes, which come behind; None for null.
        numbers: its last parameter, a struct of 64-bit integers.
        weights: of a kernel that takes ensembles: which of the parameters are the
            weights, in words of 32 bits.
    """

    def run(members: int | None, *operands: jax.Array) -> list[jax.Array]:
        lead = () if members is None else (members,)
        blocks = grid.blocks * (1 if members is None else members)
        written = [
            jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)
            for x in results
            if x is not None
        ]
        call = jax.ffi.ffi_call(_native.CUDA_TARGET, written, vmap_method="sequential")
        return list(
            call(
                *operands,
                cubin=np.frombuffer(code.cubin, np.uint8),
                digest=code.digest,
                name=name,
                grid=np.array(grid._replace(blocks=blocks), np.int64),
                parameters=_places((*parameters, *results)),
                numbers=np.array(numbers, np.int64),
            )
        )

    given = [i for i, x in enumerate(parameters) if x is not None]
    arrays = [x for x in parameters if x is not None]
    if weights is None:
        return run(None, *arrays)
    own = given.index(weights)

    @jax.custom_batching.custom_vmap
    def one(*operands: jax.Array) -> list[jax.Array]:
        return run(None, *operands)

    @one.def_vmap
    def _(members: int, mapped: list[bool], *operands: jax.Array) -> tuple:
        if mapped[own] and _fits(members, grid, operands[own]):
            grown = [
                a if m else jnp.broadcast_to(a, (members, *a.shape))
                for a, m in zip(operands, mapped, strict=True)
            ]
            found = run(members, *grown)
        else:
            each = tuple(a for a, m in zip(operands, mapped, strict=True) if m)

            def member(each: tuple) -> list[jax.Array]:
                left = iter(each)
                return run(
                    None,
                    *(
                        next(left) if m else a
                        for a, m in zip(operands, mapped, strict=True)
                    ),
                )

            found = lax.map(member, each)
        return found, [True] * len(found)

    return one(*arrays)


def _places(arrays: Sequence[object | None]) -> np.ndarray:
    """Return which of the buffers each array is, -1 where it is null."""
    is_given = np.array([x is not None for x in arrays], np.int64)
    return np.where(is_given == 1, np.cumsum(is_given) - 1, -1)


def _fits(members: int, grid: Grid, weights: jax.Array) -> bool:
    """Return whether kernels can count blocks and fragments of weights, of 4 words."""
    known = isinstance(members, int) and members > 0  # in an export it may be a symbol
    return known and max(members * grid.blocks, weights.size // 4) <= MOST_BLOCKS
