"""Linear recurrences in plain JAX: a loop over time, or an associative scan.

Their derivatives are not used, see `primitive.py`; they hold no rule for NaN of their
own: a step past the end of a sequence leaves the state as it is.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._rnn.accumulation import accumulation_dtype
from .._typing import Array
from .call import Recurrence, active, multiply, select, valid


def forward(
    call: Recurrence, parallel: bool, a: Array, b: Array, h_0: Array, *masks: Array
) -> list[Array]:
    """Return `h` and the last state.

    Args:
        call: what is static.
        parallel: run an associative scan, else a loop over time.
        a: the factors.
        b: the inputs.
        h_0: the states before the first step.
        *masks: lengths and resets, as far as there are any.
    """
    lengths, resets = call.masks(masks)
    inside, keeps = valid(call, b, lengths), active(call, b, lengths, resets)
    time_first = lambda x: x if call.time_major else jnp.swapaxes(x, 0, 1)  # noqa: E731
    dtype = accumulation_dtype(b.dtype)
    run = _parallel if parallel else _loop
    shape = time_first(b).shape
    # What is alike for all steps stays as it is: the loop reads it from outside.
    a, b = time_first(a).astype(dtype), time_first(b).astype(dtype)
    inside, keeps = (
        None
        if m is None
        else jnp.broadcast_to(time_first(m), (*shape[:2], *m.shape[2:]))
        for m in (inside, keeps)
    )
    h, h_n = run(call, a, b, h_0.astype(dtype), inside, keeps)
    return [time_first(h).astype(h_0.dtype), h_n.astype(h_0.dtype)]


def _loop(
    call: Recurrence, a: Array, b: Array, h_0: Array, inside: Any, keeps: Any
) -> tuple[Array, Array]:
    constant = a.shape[0] == 1

    def step(state: Array, xs: Any) -> tuple[Array, Array]:
        a_t, b_t, inside_t, keeps_t = xs
        a_t = a[0] if constant else a_t
        if call.after:
            out = b_t + state
            after = select(keeps_t, multiply(call, a_t, out))
        else:
            out = after = select(keeps_t, multiply(call, a_t, state)) + b_t
        if inside_t is not None:
            here = jnp.broadcast_to(inside_t, out.shape)
            after = jnp.where(here, after, state)
            out = select(inside_t, out)
        return after, out

    xs = (None if constant else a, b, inside, keeps)
    h_n, h = lax.scan(step, h_0, xs, reverse=call.reverse)
    return h, h_n


def _parallel(
    call: Recurrence, a: Array, b: Array, h_0: Array, inside: Any, keeps: Any
) -> tuple[Array, Array]:
    steps = b.shape[0]
    first, last = (steps - 1, 0) if call.reverse else (0, steps - 1)
    one = _identity(call, a)
    a = jnp.broadcast_to(a, (*b.shape[:2], *a.shape[2:]))
    # Resets go along: a product of factors may be NaN, and forgets nothing then.
    cuts = ~keeps if call.has_resets else None
    if inside is not None:  # a step in the padding changes nothing
        extra = a.ndim - inside.ndim
        there = jnp.expand_dims(inside, range(inside.ndim, inside.ndim + extra))
        a = jnp.where(jnp.broadcast_to(there, a.shape), a, one)
        b = select(inside, b)
        cuts = None if cuts is None else cuts & inside
    final, final_cut = a[last], None if cuts is None else cuts[last]
    if call.after:  # the factor of a step acts in the next one

        def move(x: Array, start: Array) -> Array:
            parts = [x[1:], start] if call.reverse else [start, x[:-1]]
            return jnp.concatenate(parts)

        a = move(a, jnp.broadcast_to(one, (1, *a.shape[1:])))
        cuts = None if cuts is None else move(cuts, jnp.zeros_like(cuts[:1]))
    b = b.at[first].add(
        _unless(None if cuts is None else cuts[first], multiply(call, a[first], h_0))
    )

    def combine(left: Any, right: Any) -> Any:
        (a_1, b_1, *cut_1), (a_2, b_2, *cut_2) = left, right
        if call.blocks:
            product = jnp.sum(a_2[..., :, :, None] * a_1[..., None, :, :], -2)
        else:
            product = a_2 * a_1
        moved = _unless(cut_2[0] if cut_2 else None, multiply(call, a_2, b_1))
        return product, moved + b_2, *(x | y for x, y in zip(cut_1, cut_2, strict=True))

    elements = (a, b) if cuts is None else (a, b, cuts)
    _, h, *_ = lax.associative_scan(combine, elements, reverse=call.reverse)
    h_n = _unless(final_cut, multiply(call, final, h[last])) if call.after else h[last]
    return select(inside, h), h_n


def _unless(cut: Array | None, x: Array) -> Array:
    """Return `x`, but 0 where a reset is."""
    return select(None if cut is None else ~cut, x)


def _identity(call: Recurrence, a: Array) -> Array:
    if not call.blocks:
        return jnp.ones((1,) * a.ndim, a.dtype)
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    return jnp.expand_dims(eye, range(a.ndim - 2))
