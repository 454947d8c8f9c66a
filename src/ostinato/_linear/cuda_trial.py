"""The trial of the kernels of linear recurrences: known cases, compared with XLA.

It is a program of its own, `python -m ostinato._linear.cuda_trial DEFINITION ...`, and
prints its verdict: what is wrong, or "".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._cuda import check, kernels, plan
from . import api

_BATCH, _STEPS, _UNITS = 3, 333, 10  # not a multiple of anything; several chunks
_LENGTHS = (_STEPS, 0, 150)
_FEW_STEPS = 20  # a single chunk
_CASES = (  # steps, and whether factors are constant, steps reversed, and masked
    (_STEPS, False, False, False),
    (_FEW_STEPS, True, True, False),
    (_STEPS, False, True, True),
    (_STEPS, True, False, True),
)
# How many times the rounding of a number results may differ by. Those of bfloat16 are
# rounded once, at the end.
_ROUNDINGS = dict.fromkeys(plan.STORAGE, 64) | {"bfloat16": 4}


def main(definitions: list[str]) -> str:
    """Try the kernels of one text; return what is wrong, or ""."""
    ((dtype, blocks),) = (
        (dtype, blocks)
        for dtype in plan.STORAGE
        for blocks in (False, True)
        if list(kernels.linear(dtype, blocks).definitions) == definitions
    )
    jax.config.update("jax_enable_x64", dtype in ("float64", "complex128"))
    cases = [_case(dtype, blocks, *options) for options in _CASES]
    wanted = [_compiled(case, "xla")() for case in cases]
    runs = [_compiled(case, "cuda") for case in cases]
    jax.block_until_ready(wanted)
    check.ready()
    for case, run, want in zip(cases, runs, wanted, strict=True):
        problem = _difference(run(), want, dtype)
        if problem:
            return f"{problem}, for {case[1]}"
    return ""


def _case(
    dtype: str, blocks: bool, steps: int, constant: bool, reverse: bool, masked: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return arrays and options of a call."""
    random = np.random.default_rng(5)
    block = (2,) if blocks else ()
    lead = () if constant else (_BATCH, steps)
    units = (_UNITS // len((*block, 1)), *block)

    def normal(*shape: int) -> Any:
        return array(random.standard_normal((2, *shape)))

    def array(parts: Any) -> Any:
        both = parts[0] + 1j * parts[1] if dtype.startswith("complex") else parts[0]
        return jnp.asarray(both, dtype)

    largest = 0.3 if blocks else 0.6  # so that states stay bounded
    arrays = [
        array(random.uniform(-largest, largest, (2, *lead, *units, *block))),
        normal(_BATCH, steps, *units),
        normal(_BATCH, *units),
    ]
    options: dict[str, Any] = dict(reverse=reverse)
    if masked:
        options["seq_lengths"] = _LENGTHS
        arrays.append(jnp.asarray(random.random((_BATCH, steps)) < 0.02))
    return arrays, options


def _compiled(
    case: tuple[list[Any], dict[str, Any]], backend: Any
) -> Callable[[], list[Any]]:
    """Compile a call and its gradients, which run the transpose."""
    arrays, options = case
    lengths = options.get("seq_lengths")
    if lengths is not None:
        options = options | dict(seq_lengths=jnp.asarray(lengths, jnp.int32))

    @jax.jit
    def both(a: Any, b: Any, h_0: Any, *resets: Any) -> Any:
        given: dict[str, Any] = options | dict(zip(("resets",), resets, strict=False))

        def run(a: Any, b: Any, h_0: Any) -> Any:
            return tuple(api.linear_recurrence(a, b, h_0, backend=backend, **given))

        out, pull_back = jax.vjp(run, a, b, h_0)
        return out, pull_back(out)

    program = both.lower(*arrays).compile()
    return lambda: jax.tree.leaves(program(*arrays))


def _difference(got: list[Any], want: list[Any], dtype: str) -> str:
    """Say which result differs by more than rounding; "" if none does."""
    names = ("h", "h_n", "the gradient of a", "of b", "of h_0")
    epsilon = float(jnp.finfo(dtype).eps)
    for name, x, y in zip(names, got, want, strict=True):
        x, y = (np.asarray(each).astype(np.complex128) for each in (x, y))
        scale = max(1.0, float(np.max(np.abs(y))))
        error = float(np.max(np.abs(x - y))) / scale
        if not error <= _ROUNDINGS[dtype] * epsilon:  # also where it is NaN
            return f"a wrong result: {name} differs by {error:.1e} of its size"
    return ""


if __name__ == "__main__":
    check.report(main, sys.argv[1:])
