"""Loops over mapped steps, so that a loop under `vmap` is a loop again."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._padding import fill_empty_sequences, is_step, select
from .._rnn.accumulation import accumulation_dtype
from .._typing import Array
from . import native, tokens, xla
from .cuda import loops as cuda
from .gradients import Mask, is_float
from .jaxprs import evaluate, flat_trace, split_at, split_by, struct, type_of
from .loop_programs import Pullback, by_operand, saving_step
from .masks import StepMask
from .split import Step
from .xla import Loop, zeros_wide

Run = Callable[[Loop, Sequence[Array]], list[Array]]
"""Runs a loop: `primitive.run`."""


def batch(
    implementation: Callable, args: Sequence[Array], dims: Sequence[Any], **params: Any
) -> tuple[list[Array], list[int]]:
    """Map a function of arrays with static parameters."""
    out = jax.vmap(ft.partial(implementation, **params), in_axes=tuple(dims))(*args)
    return out, [0] * len(out)


def batch_loop(
    run: Run,
    args: Sequence[Array],
    dims: Sequence[Any],
    *,
    loop: Loop,
    wrt: Mask | None,
) -> tuple[list[Array], list[int]]:
    """Map a loop: a loop over the mapped step."""
    if loop.capacity is not None:
        return batch(ft.partial(_by_padded, run), args, dims, loop=loop, wrt=wrt)
    if wrt is not None:  # what is saved is what the unmapped loop saves
        saving = loop._replace(step=saving_step(loop, wrt))
        return batch_loop(run, args, dims, loop=saving, wrt=None)
    step = loop.step
    first = step.num_invariant + step.num_inputs
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    alone = loop.masked and dims[-1] is not None and args[-1].size == size
    if loop.masked and not alone:
        return batch(ft.partial(_by_masked_step, run), args, dims, loop=loop)
    count, moved, mapped = len(step.jaxpr.invars), [], []
    for i, (a, d) in enumerate(zip(args[:count], dims[:count], strict=True)):
        is_input = step.num_invariant <= i < first
        if d is not None:
            a = jnp.moveaxis(a, d, int(is_input))
        elif i >= first:  # the states of all, since new states are mapped
            a = jnp.broadcast_to(a, (size, *a.shape))
        moved.append(a)
        mapped.append(d is not None or i >= first)
    if alone:  # each has one sequence: they are those of the mapped step
        moved.append(args[-1].reshape(size))
    out = run(loop._replace(step=_mapped_step(step, tuple(mapped), size)), moved)
    return out, [0] * step.num_states + [1] * (len(out) - step.num_states)


def _by_padded(run: Run, *operands: Array, loop: Loop, wrt: Mask | None) -> list[Array]:
    """Run a loop whose sequences lie one after another on padded ones."""

    def padded(loop: Loop, wrt: Mask | None, operands: Sequence[Array]) -> list[Array]:
        saves = wrt is not None
        step = saving_step(loop, wrt) if saves else loop.step
        return run(loop._replace(step=step), operands)

    return tokens.forward(loop, wrt, operands, padded)


def _by_masked_step(run: Run, *operands: Array, loop: Loop) -> list[Array]:
    """Run a loop whose sequences have lengths as one whose step takes a mask."""
    step, lengths = loop.step, operands[-1]
    invariant, inputs, states = step.parts(operands)
    initial = [fill_empty_sequences(a, lengths) for a in states]
    valid = is_step(lengths, loop.length, 0)
    given = [*invariant, *initial, *inputs, valid, *states]
    masked = loop._replace(step=_masked_step(step), masked=False)
    return run(masked, given)


@ft.lru_cache(maxsize=256)
def _masked_step(step: Step) -> Step:
    """Return a step that also takes states to use at invalid steps, and a mask."""

    def masked(*operands: Any) -> list[Any]:
        fixed, at, old = split_at(operands, [count, count + step.num_inputs + 1])
        invariant, initial = split_at(fixed, [step.num_invariant])
        *inputs, valid = at
        states = select(valid, old, initial)
        results = evaluate(step.traced, [*invariant, *inputs, *states])
        new, outputs = split_at(results, [step.num_states])
        return [*select(valid, new, old), *outputs]

    avals = [struct(v.aval) for v in step.jaxpr.invars]
    invariant, inputs, states = step.parts(avals)
    count = step.num_invariant + step.num_states
    batch = states[0].shape[:1] if states else ()
    valid = jax.ShapeDtypeStruct(batch, jnp.bool_)
    traced = flat_trace(masked, *invariant, *states, *inputs, valid, *states)
    axes = (*step.input_axes, 0)
    sizes = count, step.num_inputs + 1, step.num_states
    return Step(traced, *sizes, axes, counts=step.counts)


@ft.lru_cache(maxsize=256)
def _mapped_step(step: Step, mapped: tuple[bool, ...], size: int) -> Step:
    """Return `step` with a new leading axis on some operands and on all results."""

    def one(*values: Any) -> list[Any]:
        return evaluate(step.traced, values)

    in_axes = tuple(0 if m else None for m in mapped)
    avals = [struct(v.aval) for v in step.jaxpr.invars]
    avals = [
        jax.ShapeDtypeStruct((size, *a.shape), a.dtype) if m else a
        for a, m in zip(avals, mapped, strict=True)
    ]
    traced = flat_trace(jax.vmap(one, in_axes=in_axes, axis_size=size), *avals)
    assert not traced.consts, "a step that has been split closes over nothing"
    fixed, inputs, _ = step.parts(mapped)
    of_inputs, of_fixed = (
        tuple(0 if m else None for m in flags) for flags in (inputs, fixed)
    )
    counts = step.num_invariant, step.num_inputs, step.num_states
    return Step(traced, *counts, of_inputs, of_fixed, counts=step.counts)


# ------------------------------------------------------------------------ backward


def backward_by(
    backward: Callable, *arguments: Array, loop: Loop, wrt: Mask
) -> list[Array]:
    """Return the cotangents of the operands of `wrt`.

    Args:
        backward: as `xla.backward`.
        arguments: operands, saved values and cotangents.
        loop: what is static.
        wrt: see `xla.backward`.
    """
    count = sum(is_float(v.aval) for v in loop.step.jaxpr.outvars)
    places = [len(wrt), len(arguments) - count]
    operands, saved, cotangents = split_at(arguments, places)
    found = backward(loop, wrt, operands, saved, cotangents)
    zero = lambda i: jnp.zeros(operands[i].shape, operands[i].dtype)  # noqa: E731
    return [found[i] if i in found else zero(i) for i, w in enumerate(wrt) if w]


def batch_backward(
    run: Run, args: Sequence[Array], dims: Sequence[Any], *, loop: Loop, wrt: Mask
) -> tuple[list[Array], list[int]]:
    """Map the loop backwards: a loop over the mapped backward step."""
    back = after_any(ft.partial(_found_by_steps, run))
    return batch(ft.partial(backward_by, back), args, dims, loop=loop, wrt=wrt)


def after_any(run: Callable = xla.backward) -> Callable:
    """Return a pass backwards by primitives of JAX, whatever ran the loop forward.

    Args:
        run: as `xla.backward`, as which the result is called, too; it runs the steps
            past the end of a sequence as well.
    """

    def filled(
        loop: Loop, wrt: Mask, operands: Sequence[Array], saved: Any, bar: Any
    ) -> dict[int, Array]:
        return run(loop, wrt, operands, _as_by_xla(loop, wrt, operands, saved), bar)

    return ft.partial(tokens.backward, run=filled)


def _as_by_xla(
    loop: Loop, wrt: Mask, operands: Sequence[Array], saved: Sequence[Array]
) -> list[Array]:
    """Return saved values as XLA's loop saves them past the end of a sequence.

    The native library and kernels save 0 there, where a step may have a pole. In XLA's
    loop, a sequence that has ended runs its first step again.
    """
    axes = _axes_of_saved(loop, wrt, len(saved)) if loop.masked else None
    if axes is None:
        return list(saved)
    step = saving_step(loop, wrt)
    invariant, inputs, states = step.parts(operands)
    mask = StepMask.of(loop.masked, loop.length, operands, states)
    assert mask.valid is not None, "there are lengths"
    first = len(step.jaxpr.outvars) - len(saved)

    def saved_again(at: Sequence[Array]) -> list[Array]:
        return evaluate(step.traced, [*invariant, *at, *mask.initial])[first:]

    # They meet cotangents of 0, and need no derivatives.
    again = lax.stop_gradient(jax.vmap(saved_again, axis_size=loop.length)(inputs))
    return list(map(ft.partial(_select_at, mask.valid), axes, saved, again))


def _axes_of_saved(loop: Loop, wrt: Mask, count: int) -> Sequence[int | None] | None:
    """Return the axes of sequences of saved values, or None if XLA has saved them."""
    if cuda.is_supported(loop, wrt):
        return [0] * count
    if native.can_run(loop, wrt):
        axes = tokens.axes_of(loop, wrt)
        return axes[len(axes) - count :]
    return None


def _select_at(valid: Array, axis: int | None, a: Array, other: Array) -> Array:
    """Return `a` at the steps that sequences have, and `other` at those past the end.

    Args:
        valid: bool `[T, B]`.
        axis: that of sequences at a step; None if they share `a`.
        a: `[T, ...]`.
        other: `[T, ...]`.
    """
    if axis is None:
        return select(jnp.any(valid, axis=1), a, other)
    a, other = (jnp.moveaxis(v, 1 + axis, 1) for v in (a, other))
    return jnp.moveaxis(select(valid, a, other), 1, 1 + axis)


def _found_by_steps(
    run: Run,
    loop: Loop,
    wrt: Mask,
    operands: Sequence[Array],
    saved: Sequence[Array],
    bar: Sequence[Array],
) -> dict[int, Array]:
    """Return cotangents of operands, by position; see `xla.backward`."""
    step, pullback = loop.step, Pullback(loop, wrt)
    d_final, d_outputs = split_at(bar, [pullback.num_states])
    invariant, inputs, states = step.parts(operands)
    more = evaluate(pullback.core.before_backward, invariant)
    valid = [is_step(operands[-1], loop.length, 0)] if loop.masked else []
    sums = [zeros_wide(invariant[i]) for i in pullback.invariant]
    at_step = [*inputs, *saved, *d_outputs, *valid]
    back = loop._replace(
        step=_backward_step(loop, wrt),
        reverse=not loop.reverse,
        masked=False,
        policy=None,
    )
    out = run(back, [*invariant, *more, *at_step, *d_final, *sums])
    counts = [len(d_final), len(sums), len(pullback.inputs)]
    d_states, sums, d_inputs, pairs = split_by(out, counts)
    matrices = [None] * len(pullback.products)
    d = d_states, d_inputs, sums
    return by_operand(loop, pullback, operands, d, matrices, pairs)


@ft.lru_cache(maxsize=256)
def _backward_step(loop: Loop, wrt: Mask) -> Step:
    """Return the backward step of a loop, with sums of cotangents as further states.

    Its invariant values and inputs are those of `Pullback`, then a mask if the loop
    has one.
    """
    pullback = Pullback(loop, wrt)
    types = pullback.types()
    num_more = len(pullback.core.before_backward.jaxpr.outvars)
    num_invariant = loop.step.num_invariant + num_more
    num_outputs = len(pullback.floats) - pullback.num_states
    first = len(types) - len(pullback.floats)
    fixed, at, d_states, d_outputs = split_at(
        types, [num_invariant, first, len(types) - num_outputs]
    )
    batch = type_of(loop.step.jaxpr.outvars[0]).shape[:1]
    valid = [jax.ShapeDtypeStruct(batch, jnp.bool_)] * loop.masked
    sums = [
        jax.ShapeDtypeStruct(a.shape, accumulation_dtype(a.dtype))
        for a in (types[i] for i in pullback.invariant)
    ]
    sizes = [len(fixed), len(at), num_outputs, len(valid), len(d_states)]

    def run(*values: Any) -> list[Any]:
        fixed, at, d_outputs, valid, d_new, sums = split_by(values, sizes)
        bar = [*d_new, *d_outputs]
        bar = select(valid[0], bar) if valid else bar
        results = pullback(*fixed, *at, *bar)
        counts = [len(d_new), len(pullback.inputs), len(sums)]
        d_states, d_inputs, found, pairs = split_by(results, counts)
        d_states = select(valid[0], d_states, d_new) if valid else d_states
        sums = [s + d.astype(s.dtype) for s, d in zip(sums, found, strict=True)]
        return [*d_states, *sums, *d_inputs, *pairs]

    at_step = [*at, *d_outputs, *valid]
    traced = flat_trace(run, *fixed, *at_step, *d_states, *sums)
    axes = tuple(0 if a.shape else None for a in at_step)
    sizes = len(fixed), len(at_step), len(d_states) + len(sums)
    return Step(traced, *sizes, axes, counts=loop.step.counts)
