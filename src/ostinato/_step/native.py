"""The loops over a step as the native library runs them."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import _native
from .._typing import Array
from . import tokens
from .call import call, check_split
from .cost import is_one_kernel
from .gradients import is_float
from .jaxprs import evaluate, split_at, split_by, type_of
from .loop_programs import LoweredBackward, by_operand, lower_backward, lower_forward
from .programs.lower import LARGEST_GIVEN
from .programs.lowered import Lowered
from .programs.values import Unsupported
from .xla import Loop, Mask


def forward(
    loop: Loop, wrt: Mask | None, operands: Sequence[Array], split: bool = False
) -> list[Array]:
    """Run the loop in the native library if it can; see `xla.forward`.

    Args:
        loop: see there.
        wrt: see there.
        operands: see there.
        split: whether arrays may be split over devices.
    """
    try:
        check_available(loop)
        programs = _lower(loop, wrt)
        if split:
            check_split(loop, programs)
    except Unsupported:
        return tokens.forward(loop, wrt, operands)

    def run() -> list[Array]:
        lengths = _lengths(loop, operands)
        return call(programs[0], loop, operands, lengths, loop.reverse, split)[0]

    return _if_exact(loop, operands, run, lambda: tokens.forward(loop, wrt, operands))


def can_run(loop: Loop, wrt: Mask | None = None) -> bool:
    """Return whether the native library can run a loop, with `wrt` backwards too."""
    try:
        check_available(loop)
        _lower(loop, wrt)
    except Unsupported:
        return False
    return True


def is_left_to_xla(loop: Loop, wrt: Mask | None) -> bool:
    """Return whether XLA runs a loop, because it is quicker."""
    asked = loop.backend is not None or loop.members is not None
    if wrt is not None or asked or loop.capacity is not None:
        return False
    return is_one_kernel(loop.step, loop.masked)


def _lower(loop: Loop, wrt: Mask | None) -> list[Lowered]:
    """Return the program of a loop, and with `wrt` that of the loop backwards.

    A loop needs both: past the end of sequences, nothing is saved for `xla`.
    """
    forward = lower_forward(loop, wrt)
    if wrt is None:
        return [forward]
    tokens.check_backward(loop, wrt)
    return [forward, lower_backward(loop, wrt).lowered]


def backward(
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
    split: bool = False,
) -> dict[int, Array]:
    """Run the loop backwards in the native library if it can; see `forward`."""
    other = lambda: tokens.backward(loop, wrt, operands, saved, cotangents)  # noqa: E731
    try:
        check_available(loop)
        programs = _lower(loop, wrt)
        back = lower_backward(loop, wrt)
        if split:
            check_split(loop, programs)
    except Unsupported:
        return other()
    run = lambda: _run_back(back, loop, operands, saved, cotangents, split)  # noqa: E731
    return _if_exact(
        loop, operands, _all(run, wrt, operands), _all(other, wrt, operands)
    )


def _run_back(
    back: LoweredBackward,
    loop: Loop,
    operands: Sequence[Array],
    saved: Sequence[Array],
    cotangents: Sequence[Array],
    split: bool,
) -> dict[int, Array]:
    """Return the cotangents of operands, by position; of others it is 0."""
    step = loop.step
    invariant, inputs, states = step.parts(operands)
    more = evaluate(back.derivative.before_backward, invariant)
    d_states, d_outputs = split_at(cotangents, [sum(map(is_float, states))])
    arguments = [*invariant, *more, *inputs, *saved, *d_states, *d_outputs]
    results, matrices = call(
        back.lowered, loop, arguments, _lengths(loop, operands), not loop.reverse, split
    )
    d_states, d_inputs, d_invariant, pairs = split_by(results, back.counts)
    if loop.capacity is not None:
        d_inputs = _of_tokens(back, loop, operands, d_inputs)
    d = d_states, d_inputs, d_invariant
    return by_operand(loop, back, operands, d, matrices, pairs)


def _of_tokens(
    back: LoweredBackward, loop: Loop, operands: Sequence[Array], d_inputs: list[Array]
) -> list[Array]:
    """Return cotangents of inputs as tokens where those of all sequences are equal."""
    found = []
    first, sources = loop.step.num_invariant, back.lowered.sources[back.counts[0] :]
    for i, d, source in zip(back.inputs, d_inputs, sources, strict=False):
        results = back.lowered.results
        if source is not None and source >= 0 and results[source].axis is None:
            d = tokens.to_tokens(loop, operands[-1], d, 0)
        found.append(d.reshape(operands[first + i].shape))
    return found


def _all(
    run: Callable[[], dict[int, Array]], wrt: Mask, operands: Sequence[Array]
) -> Callable[[], dict[int, Array]]:
    """Return `run` with a cotangent of every operand of `wrt`."""

    def all_of() -> dict[int, Array]:
        found = run()
        return {
            i: jnp.broadcast_to(found.get(i, jnp.zeros((), a.dtype)), a.shape)
            for i, a in enumerate(operands)
            if i < len(wrt) and wrt[i]
        }

    return all_of


def _if_exact(
    loop: Loop, operands: Sequence[Array], run: Callable, other: Callable
) -> Any:
    """Return `run()`, or `other()` where floats cannot stand for some integers."""
    exact = [are_exact(operands[i]) for i in integers(loop)]
    if not exact:
        return run()
    return lax.cond(ft.reduce(jnp.logical_and, exact), run, other)


def integers(loop: Loop) -> list[int]:
    """Return the operands, by position, whose integers floats may not stand for.

    Numbers of steps are known to be small enough.
    """
    step = loop.step
    counts = {step.num_invariant + i for i in step.counts}
    return [
        i
        for i, v in enumerate(step.jaxpr.invars)
        if i not in counts and _is_wide_integer(type_of(v).dtype)
    ]


def _is_wide_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits > 16


def are_exact(a: Array) -> Array:
    """Return whether floats can stand for all integers of an array."""
    exact = a <= LARGEST_GIVEN
    if jnp.issubdtype(a.dtype, jnp.signedinteger):
        exact &= a >= -LARGEST_GIVEN
    return jnp.all(exact)


def _lengths(loop: Loop, operands: Sequence[Array]) -> list[Array]:
    return [operands[-1].astype(jnp.int32)] if loop.masked else []


def check_available(loop: Loop) -> None:
    """Raise `Unsupported` if a loop asks for XLA, or if there is no native library."""
    if loop.backend == "xla":
        raise Unsupported("`backend` is 'xla'")
    reason = _native.status().reason
    if reason is not None:
        raise Unsupported(f"there is no native library: {reason}")
