"""The floor: a model, from measured peaks, of the least time that this machine needs.

A product costs the larger of two times: its multiply-adds at the peak of the processor,
and reading its weights at the bandwidth of the cache level that holds them. The
dispatch of a jitted call is added. Activations, and everything else proportional to
N * H, count as free.
"""

import bisect
import functools as ft
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ostinato as ost
from ostinato.apps.bench.problem import Problem

from . import native


class Peaks(NamedTuple):
    """The peaks of `threads` threads together, and the seconds of an empty jitted call.

    `float32` and `bfloat16` are FLOP per second, `sigmoids` functions per second.
    `read` holds pairs of the bytes that each thread reads repeatedly and the bytes per
    second that it reaches, by size.
    """

    threads: int
    float32: float
    bfloat16: float
    read: list[tuple[int, float]]
    dispatch: float
    sigmoids: float = 0.0

    def bandwidth(self, size: float) -> float:
        """Return the bytes per second for weights of `size` bytes, split by thread."""
        sizes = [measured for measured, _ in self.read]
        at = bisect.bisect_left(sizes, size / self.threads)
        return self.read[min(at, len(self.read) - 1)][1]


def measure(threads: int) -> Peaks:
    """Measure the peaks of this machine, which takes some seconds."""
    return Peaks(**native.peaks(threads), dispatch=dispatch())


def dispatch() -> float:
    """Return the seconds of a jitted call with an operator's arguments and no work."""
    call = jax.jit(lambda weights, x, h, c: (x + weights, h + weights, c + weights))
    args = [jnp.full(4, value) for value in range(4)]

    def seconds() -> float:
        start = time.perf_counter()
        call(*args)[0].block_until_ready()
        return time.perf_counter() - start

    return statistics.median(seconds() for _ in range(2000))


def floor(problem: Problem, lengths: np.ndarray | None, peaks: Peaks) -> float | None:
    """Return the least seconds for a problem, or None for a compilation."""
    if problem.kind == "compile":
        return None
    if lengths is None:
        lengths = np.full(problem.batch, problem.steps)
    active = [int((lengths > t).sum()) for t in range(problem.steps)]
    product = ft.partial(_product, problem.dtype, peaks)
    total = peaks.dispatch
    for layer in ost.param_shapes(problem.spec):
        over_time = product(layer.w_ih, sum(active))
        step_by_step = sum(product(layer.w_hh, rows) for rows in active)
        total += over_time + step_by_step
        if problem.kind == "train":
            # The backward pass computes dh with w_hh step by step, and dx, dw_ih and
            # dw_hh as products over all steps at once.
            total += 2 * over_time + step_by_step + product(layer.w_hh, sum(active))
    return total


def of_matrices(
    shapes: Sequence[tuple[int, ...]], batch: int, steps: int, train: bool, peaks: Peaks
) -> float:
    """Return the least seconds for float32 matrices that every step multiplies.

    A matrix that reads inputs is not told from one that reads states.
    """
    total = peaks.dispatch
    for rows, columns in shapes:
        step_by_step = steps * _product("float32", peaks, (rows, columns), batch)
        over_time = _product("float32", peaks, (rows, columns), steps * batch)
        total += step_by_step + train * (step_by_step + over_time)
    return total


def _product(dtype: str, peaks: Peaks, shape: tuple[int, int], rows: int) -> float:
    elements = shape[0] * shape[1]
    size = elements * (2 if dtype == "bfloat16" else 4)
    arithmetic = 2 * elements * rows / getattr(peaks, dtype)
    return max(arithmetic, size / peaks.bandwidth(size)) if rows else 0.0
