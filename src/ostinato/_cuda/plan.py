"""How calls are laid out on a GPU: pure functions of sizes and of the GPU.

A plan is either that layout, or the reason, a text, why the backend xla runs the call.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .device import Gpu

MEASURED: frozenset[str] = frozenset()
"""Architectures with figures in docs/results.md, where kernels run without being asked.

None has any yet.
"""

THREADS = 128  # of a block
_MOST_BLOCKS = 2**31 - 1
# Threads of a processor that keep its memory busy: half of those that it can hold.
_THREADS_OF_PROCESSOR = 1024
# A shorter chunk would not pay for its summary, which is read and written once.
_FEWEST_STEPS = 32

STORAGE = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "BFloat16",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""What kernels call the dtypes that they have."""


class LinearPlan(NamedTuple):
    """The layout of a linear recurrence.

    Attributes:
        columns: how many recurrences of single units, or pairs of them, there are;
            maybe none.
        chunk: the steps that one thread runs.
        chunks: the chunks of a sequence, 1 where sequences and units are enough.
    """

    columns: int
    chunk: int
    chunks: int

    def blocks(self, chunks: int) -> int:
        """Return the blocks that run so many chunks of every sequence."""
        return math.ceil(self.columns * chunks / THREADS)

    def __str__(self) -> str:
        if self.chunks == 1:
            return f"{self.columns} threads, one for each recurrence"
        return (
            f"{self.columns * self.chunks} threads, {self.chunks} chunks of "
            f"{self.chunk} steps for each recurrence"
        )


def linear(
    dtype: str, block: int | None, steps: int, batch: int, units: int, gpu: Gpu
) -> LinearPlan | str:
    """Lay out a linear recurrence.

    Args:
        dtype: of all arrays, by name.
        block: the rows of a factor that is a matrix; None for numbers.
        steps: of every sequence.
        batch: how many sequences.
        units: of a step; blocks take `block` of them together.
        gpu: where it runs.
    """
    reason = linear_reason(dtype, block)
    if reason is not None:
        return reason
    columns = batch * units // (block or 1)
    wanted = gpu.processors * _THREADS_OF_PROCESSOR
    most = min(wanted // max(1, columns), steps // _FEWEST_STEPS)
    chunk = max(1, math.ceil(steps / max(1, most)))
    plan = LinearPlan(columns, chunk, max(1, math.ceil(steps / chunk)))
    if plan.blocks(plan.chunks) > _MOST_BLOCKS:
        return f"{columns} recurrences are more than one launch holds"
    return plan


def linear_reason(dtype: str, block: int | None) -> str | None:
    """Return why no size of such a call has a kernel; None if some have."""
    if dtype not in STORAGE:
        return f"it has no kernels for {dtype}"
    if block not in (None, 2):
        return f"it has kernels for blocks [2, 2], not {[block, block]}"
    return None


def rnn(mode: str) -> str:
    """Say why the operator has no kernel for a mode: none has one yet."""
    return f"it has no kernels for {mode} yet, only for linear_recurrence"


def accumulation(dtype: str) -> str:
    """Return the dtype of states and sums."""
    return "float32" if dtype == "bfloat16" else dtype
