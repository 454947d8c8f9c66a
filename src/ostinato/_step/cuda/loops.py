"""The loops over a step as kernels of an NVIDIA GPU run them."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..._cuda import check, device
from ..._typing import Array
from .. import tokens, xla
from ..gradients import Derivative, Mask, is_float
from ..jaxprs import jaxpr_of, split_at
from ..masks import StepMask
from ..programs.values import Unsupported
from ..split import Step
from ..xla import Loop, Scans
from . import trial
from .kernel import Call, Kernel, make


def check_supported(loop: Loop, wrt: Mask | None) -> None:
    """Raise `Unsupported` if no kernel runs a loop, and its backward pass for `wrt`."""
    gpu, reason = device.status()
    if gpu is None:
        raise Unsupported(reason)
    kernels_of(loop, wrt)


def is_supported(loop: Loop, wrt: Mask | None) -> bool:
    """Return whether kernels can run a loop, and its backward pass for `wrt`."""
    try:
        check_supported(loop, wrt)
    except Unsupported:
        return False
    return True


def describe(loop: Loop) -> str:
    """Return how a loop that has a kernel runs forward."""
    gpu, reason = device.status()
    assert gpu is not None, reason
    (kernel,) = kernels_of(loop, None)
    shape = kernel.parts.places.shape
    size = " x ".join(map(str, shape))
    return f"{gpu.name}, one kernel of {size} threads, an element of the states each"


def failure(loop: Loop, wrt: Mask | None) -> str | None:
    """Return how a kernel for a loop failed its trial here; None if all passed.

    The first call for a kernel on a kind of GPU starts its trial, in another process.
    """
    gpu, reason = device.status()
    assert gpu is not None, reason
    found = (
        check.failure(each.text, gpu, trial.PROGRAM, ft.partial(trial.case, each))
        for each in kernels_of(loop, wrt)
        if each.elements
    )
    return next((each for each in found if each is not None), None)


def kernels_of(loop: Loop, wrt: Mask | None) -> list[Kernel]:
    """Return the kernel that runs a loop, and with `wrt` that of its backward pass.

    Raises:
        Unsupported: there is none.
    """
    if wrt is None:
        return [_forward_kernel(loop.step.hoisted.core, None, loop.masked)]
    derivative = xla.derivative_of(loop, wrt)
    return [
        _forward_kernel(derivative.step, derivative, loop.masked),
        _backward_kernel(derivative, loop.masked),
    ]


def forward(loop: Loop, wrt: Mask | None, operands: Sequence[Array]) -> list[Array]:
    """Run the loop in a kernel; see `xla.forward`."""
    return tokens.forward(loop, wrt, operands, ft.partial(_run, xla.forward))


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
) -> dict[int, Array]:
    """Run the loop backwards in a kernel; see `xla.backward`."""
    run = ft.partial(_run, xla.backward)
    return tokens.backward(loop, wrt, operands, saved, cotangents, run)


def _run(
    run: Callable, loop: Loop, wrt: Mask | None, operands: Sequence[Array], *given: Any
) -> Any:
    """Run a loop by `xla.forward` or `xla.backward`, its steps in a kernel."""
    return run(loop, wrt, operands, *given, _scans(loop, operands))


def _scans(loop: Loop, operands: Sequence[Array]) -> Scans:
    lengths = operands[-1].astype(jnp.int32) if loop.masked else None
    return Scans(
        ft.partial(_scan, lengths), ft.partial(_scan_back, lengths), in_blocks=False
    )


def _scan(
    lengths: Array | None,
    loop: Loop,
    step: Step,
    derivative: Derivative | None,
    invariant: list[Array],
    mask: StepMask,
    states: list[Array],
    per_step: Any,
) -> tuple[list[Array], list[Array]]:
    """Return final states, and outputs and saved values of all steps."""
    inputs, _ = per_step
    kernel = _forward_kernel(step, derivative, loop.masked)
    out = kernel.run(
        Call(invariant, inputs, states, lengths, loop.length, loop.reverse)
    )
    return out.states, out.outputs


def _scan_back(
    lengths: Array | None,
    loop: Loop,
    derivative: Derivative,
    given: tuple[list[Array], ...],
    d_states: list[Array],
    d_outputs: list[Array],
    valid: Array | None,
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """Return cotangents: of states, of inputs, of invariant values; and products'."""
    invariant, more, inputs, saved = given
    kernel = _backward_kernel(derivative, loop.masked)
    out = kernel.run(
        Call(
            [*invariant, *more],
            [*inputs, *saved, *d_outputs],
            d_states,
            lengths,
            loop.length,
            not loop.reverse,
        )
    )
    d_inputs, pairs = split_at(out.outputs, [len(derivative.inputs)])
    return out.states, d_inputs, out.sums, pairs


@ft.lru_cache(maxsize=256)
def _forward_kernel(step: Step, derivative: Derivative | None, masked: bool) -> Kernel:
    """Return the kernel of `xla._scan`."""
    traced = step.traced if derivative is None else derivative.forward
    kept = () if derivative is None else derivative.saved_states
    jaxpr, count = traced.jaxpr, len(step.jaxpr.outvars)
    states = step.parts(jaxpr.invars)[2]
    results, saved = split_at(jaxpr.outvars, [count])
    results += [*(states[i] for i in kept), *saved]
    return make(
        jaxpr_of(jaxpr.eqns, jaxpr.invars, results, _constants(traced)),
        (step.num_invariant, step.num_inputs, step.num_states),
        len(results) - step.num_states,
        masked,
    )


@ft.lru_cache(maxsize=256)
def _backward_kernel(derivative: Derivative, masked: bool) -> Kernel:
    """Return the kernel of `xla._scan_back`."""
    step, traced = derivative.step, derivative.backward
    jaxpr, results = traced.jaxpr, step.jaxpr.outvars
    floats = [is_float(v.aval) for v in results]
    num_states, num_outputs = (
        sum(part) for part in (floats[: step.num_states], floats[step.num_states :])
    )
    end = len(jaxpr.invars) - num_states - num_outputs
    fixed = step.num_invariant + len(derivative.before_backward.jaxpr.outvars)
    before, at, d_states, d_outputs = split_at(
        jaxpr.invars, [fixed, end, end + num_states]
    )
    counts = num_states, len(derivative.inputs), len(derivative.invariant)
    new, d_inputs, sums, pairs = split_at(
        jaxpr.outvars, [counts[0], sum(counts[:2]), sum(counts)]
    )
    inputs = [*at, *d_outputs]
    return make(
        jaxpr_of(
            jaxpr.eqns,
            [*before, *inputs, *d_states],
            [*new, *d_inputs, *pairs, *sums],
            _constants(traced),
        ),
        (fixed, len(inputs), num_states),
        len(d_inputs) + len(pairs),
        masked,
    )


def _constants(traced: ClosedJaxpr) -> dict[Any, Any]:
    return dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
