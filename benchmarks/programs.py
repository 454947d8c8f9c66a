"""Compiled calls whose results agree, for benchmarks."""

import contextlib
import ctypes
import functools as ft
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from tolerance import assert_close

COMPILATIONS = 5
IN_A_ROW = 30  # calls, the first third of which are not counted


def training(run: Callable) -> Callable:
    """Return a function that runs `run` and all gradients for a cotangent `dy`."""

    def train(a: Any, b: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(run, a, b)
        return y, pull_back(dy)

    return train


def compiled(runs: dict[str, Callable], arguments: Any, terms: int) -> tuple:
    """Compile `runs` and check that their results agree.

    Args:
        runs: functions of `arguments`, by name; the results of the first are wanted.
        arguments: arrays of JAX.
        terms: how many terms their sums have; see `assert_close`.

    Returns:
        Calls that wait for their results, and the temporary bytes, both by name.
    """
    calls, needed, want = {}, {}, None
    for name, run in runs.items():
        program = jax.jit(run).lower(*arguments).compile()
        analysis = program.memory_analysis()
        assert analysis is not None  # it exists on a CPU
        needed[name] = analysis.temp_size_in_bytes
        got = jax.tree.leaves(program(*arguments))
        want = got if want is None else want
        for x, y in zip(got, want, strict=True):
            assert_close(x, y, terms=terms, what=name)
        calls[name] = ft.partial(wait, program, arguments)
    return calls, needed


def compilations(run: Callable, arguments: Any) -> float:
    """Return the median seconds to trace and compile a function."""
    seconds = []
    for _ in range(COMPILATIONS):
        start = time.perf_counter()
        jax.jit(lambda *given: run(*given)).lower(*arguments).compile()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def in_a_row(call: Callable) -> float:
    """Return the median seconds of a call, called again and again."""
    seconds = []
    for _ in range(IN_A_ROW):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[IN_A_ROW // 3 :])


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Let glibc keep freed memory, instead of giving large arrays back to the system.

    Programs have this from their start with the variables of `docs/guides/memory.md`.
    Afterwards limits are those that glibc comes to where large arrays are freed.
    """
    trim, top, mapped, most_mapped = -1, -2, -3, -4  # of mallopt(3)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(most_mapped, 0)
    mallopt(trim, 2**31 - 1)
    mallopt(top, 2**27)
    try:
        yield
    finally:
        mallopt(most_mapped, 65536)
        mallopt(mapped, 2**25)
        mallopt(trim, 2**26)
        mallopt(top, 0)


def wait(program: Callable, arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))
