"""Linear recurrences on an NVIDIA GPU: kernels that JAX programs launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._cuda import check, device, kernels, plan
from .._cuda.launch import launch
from .._typing import Array
from .call import Recurrence, numbers

TRIAL = "ostinato._linear.cuda_trial"
"""The program that tries the kernels once on each kind of GPU."""


def unsupported_reason(call: Recurrence, b: Any) -> str | None:
    """Return why no kernel can run this; None if one can."""
    gpu, reason = device.status()
    if gpu is None:
        return reason
    sizes = (b.shape[call.time_axis], b.shape[call.batch_axis], math.prod(b.shape[2:]))
    if not all(isinstance(each, int) for each in sizes):
        return "it needs sizes that are known when a program is compiled"
    found = _plan(call, b, gpu)
    return found if isinstance(found, str) else None


def failure(call: Recurrence, b: Any) -> str | None:
    """Return how the kernel for a call failed its trial here; None if it passed.

    The first call for a kind of GPU starts the trial, in another process.
    """
    gpu, reason = device.status()
    if gpu is None:
        return reason
    return check.failure(
        kernels.linear(np.dtype(b.dtype).name, call.blocks), gpu, TRIAL
    )


def known_failure(call: Recurrence, b: Any) -> str | None:
    """Return what is known of such a failure; no trial starts."""
    gpu, reason = device.status()
    if gpu is None:
        return reason
    text = kernels.linear(np.dtype(b.dtype).name, call.blocks)
    return check.failures((text,), gpu).get(text)


def describe(call: Recurrence, b: Any) -> str:
    """Return how a call that has a kernel is laid out on the GPU."""
    gpu, _ = device.status()
    assert gpu is not None
    return f"{gpu.name}, {_plan(call, b, gpu)}"


def forward(
    call: Recurrence, a: Array, b: Array, h_0: Array, *masks: Array
) -> Sequence[Array]:
    """Return `h` and the last state."""
    gpu, reason = device.status()
    assert gpu is not None, reason
    layout = _plan(call, b, gpu)
    assert isinstance(layout, plan.LinearPlan), layout
    if layout.columns == 0:
        return [b, h_0]  # no sequences, or no units
    code = kernels.compiled(kernels.linear(b.dtype.name, call.blocks), gpu.arch)
    lengths, resets = call.masks(masks)
    given = numbers(call, a, b)
    before = None
    if layout.chunks > 1:
        before = _states_between(call, layout, code, given, a, b, h_0, lengths, resets)
    return launch(
        code,
        "linear_run",
        layout.grid(layout.chunks),
        (a, b, h_0, lengths, resets, before),
        (_like(b), _like(h_0)),
        (*given, layout.chunk, layout.chunks),
    )


def _states_between(
    call: Recurrence,
    layout: plan.LinearPlan,
    code: kernels.Code,
    given: np.ndarray,
    a: Array,
    b: Array,
    h_0: Array,
    lengths: Array | None,
    resets: Array | None,
) -> Array:
    """Return the states after all chunks but the last one, `[chunks - 1, *h_0]`."""
    chunks = layout.chunks - 1
    wide = plan.accumulation(b.dtype.name)
    states = (chunks, *h_0.shape)
    block = h_0.shape[-1:] if call.blocks else ()
    resets_inside = None
    if resets is not None:
        resets_inside = jax.ShapeDtypeStruct((chunks, h_0.shape[0]), jnp.bool_)
    product, total, *inside = launch(
        code,
        "linear_summary",
        layout.grid(chunks),
        (a, b, lengths, resets),
        (
            jax.ShapeDtypeStruct((*states, *block), wide),
            jax.ShapeDtypeStruct(states, wide),
            resets_inside,
        ),
        (*given, layout.chunk, chunks),
    )
    upper = Recurrence(
        time_major=True, blocks=call.blocks, has_resets=resets is not None
    )
    return forward(upper, product, total, h_0.astype(wide), *inside)[0]


def _plan(call: Recurrence, b: Any, gpu: device.Gpu) -> plan.LinearPlan | str:
    return plan.linear(
        np.dtype(b.dtype).name,
        b.shape[-1] if call.blocks else None,
        b.shape[call.time_axis],
        b.shape[call.batch_axis],
        math.prod(b.shape[2:]),
        gpu,
    )


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
