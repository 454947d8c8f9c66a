"""Launches of kernels inside of JAX programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
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
    file.

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
