"""The trial of a generated kernel: some random steps, compared with XLA.

It is a program of its own, `python -m ostinato._step.cuda.trial FILE`, and prints its
verdict: what is wrong, or "". The file holds the kernel and what it has to
agree with, as `jax.export` writes them.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ... import _native
from ..._cuda import check, device
from ..jaxprs import split_at, type_of
from .kernel import Call, Kernel

PROGRAM = "ostinato._step.cuda.trial"
PLATFORMS = ("cuda",)
"""Where kernels run; tests put another one in its place."""
_STEPS = 11  # more than are under way at once, and not a multiple of them
_LARGEST_ERROR = {"float64": 1e-9, "float32": 1e-4}  # else that of bfloat16
_OTHER_ERROR = 0.05
_LEAST_GOOD = 0.995  # of the elements of an array


def case(kernel: Kernel) -> bytes:
    """Return the file for the trial of a kernel."""
    fixed, inputs, states = split_at(
        [type_of(v) for v in kernel.parts.step.invars],
        [kernel.parts.counts[0], sum(kernel.parts.counts[:2])],
    )
    every = [jax.ShapeDtypeStruct((_STEPS, *a.shape), a.dtype) for a in inputs]
    batch = states[0].shape[:1]
    lengths = [jax.ShapeDtypeStruct(batch, jnp.int32)] * kernel.masked
    # What follows the kernel is XLA's in any case.
    alone = kernel.alone()
    checks = [jax.export.DisabledSafetyCheck.custom_call(_native.CUDA_TARGET)]
    files = []
    for run in (alone.run, alone.by_xla):

        def both_ways(given: Any, run: Any = run) -> Any:
            fixed, inputs, states, lengths = given
            call = Call(
                fixed, inputs, states, lengths[0] if lengths else None, _STEPS, False
            )
            return jax.tree.leaves([run(call), run(call._replace(reverse=True))])

        exported = jax.export.export(
            jax.jit(both_ways), platforms=PLATFORMS, disabled_checks=checks
        )
        files.append(exported((fixed, every, states, lengths)).serialize())
    file = io.BytesIO()
    np.savez(file, *(np.frombuffer(each, np.uint8) for each in files))
    return file.getvalue()


def main(path: str) -> str:
    """Try the kernel of a file; return what is wrong, or ""."""
    gpu, reason = device.status()
    assert gpu is not None, reason
    with np.load(path) as file:
        ours, xla = (
            jax.export.deserialize(bytearray(file[name].tobytes()))
            for name in ("arr_0", "arr_1")
        )
    wide = any(aval.dtype.itemsize == 8 for aval in (*ours.in_avals, *ours.out_avals))
    jax.config.update("jax_enable_x64", wide)
    random = np.random.default_rng(3)
    draws = [_draws(random, aval) for aval in ours.in_avals]
    cases = [
        jax.tree.unflatten(ours.in_tree, each)[0][0]
        for each in zip(*draws, strict=True)
    ]
    wanted = jax.block_until_ready([xla.call(given) for given in cases])
    run = jax.jit(ours.call).lower(cases[0]).compile()
    check.ready()
    for given, want in zip(cases, wanted, strict=True):
        problem = _difference(jax.tree.leaves(run(given)), jax.tree.leaves(want))
        if problem:
            return problem
    return ""


def _difference(got: list[Any], want: list[Any]) -> str:
    """Say which result differs by more than rounding; "" if none does."""
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        largest = _LARGEST_ERROR.get(y.dtype.name, _OTHER_ERROR)
        x, y = (np.asarray(each).astype(np.float64) for each in (x, y))
        good = np.isclose(x, y, rtol=largest, atol=largest, equal_nan=True)
        # Where a step compares or rounds, a last bit may decide.
        if not np.mean(good) >= _LEAST_GOOD:
            return f"a wrong result: array {i}, {np.mean(~good):.1%} of its elements"
    return ""


def _draws(random: np.random.Generator, aval: Any) -> list[Any]:
    """Draw an array twice: with positive numbers, where few functions have a pole."""
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        draw = jnp.asarray(random.integers(0, _STEPS + 1, aval.shape), aval.dtype)
        return [draw, draw]
    return [
        jnp.asarray(random.uniform(least, 0.9, aval.shape), aval.dtype)
        for least in (0.1, -0.9)
    ]


if __name__ == "__main__":
    check.report(main, *sys.argv[1:])
