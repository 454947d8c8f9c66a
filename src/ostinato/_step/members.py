"""Loops of several members, such as the models of an ensemble, under `vmap`.

A mapped loop is most often a loop over the mapped step (see `mapped`). Where each
member has matrices of its own, that step multiplies each member's rows by themselves,
and matrices that wait for their turn in a loop over steps leave the caches. So the
native library runs the loop of each member by itself, several on as many threads. The
time of the mapped step over that, for 100 steps of `tanh(x U + h V)` and of a GRU of M
members with N sequences of H units each (two threads, AVX-512):

| M, N, H | tanh, forward | training | GRU, forward | training |
|---|---|---|---|---|
| 16, 1, 4 | 1.0 | 1.0 | 0.3 | 0.5 |
| 100, 1, 8 | 0.6 | 0.7 | 0.6 | 0.8 |
| 100, 1, 16 | 0.8 | 1.0 | 1.2 | 1.4 |
| 16, 1, 64 | 0.9 | 1.3 | 1.9 | 1.4 |
| 16, 2, 8 | 0.8 | 1.1 | 0.9 | 1.1 |
| 100, 2, 32 | 1.5 | 2.8 | 1.4 | 1.8 |
| 500, 3, 32 | 2.8 | 2.5 | | |
| 100, 4, 2 | 0.9 | 0.6 | 0.6 | 0.3 |
| 100, 4, 4 | 0.8 | 1.1 | 0.6 | 0.4 |
| 100, 8, 16 | 2.1 | 1.2 | 2.0 | 1.3 |
| 4, 32, 16 | 4.6 | 3.3 | 1.7 | 1.7 |
| 500, 32, 2 | 1.6 | 1.0 | 2.0 | 1.4 |

Only the lowering rules know who runs a loop. So such a loop keeps the step of one
member and says which operands have an axis of members, always the first one. On one CPU
its members run so; elsewhere it becomes a loop over the mapped step after all.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._rnn.accumulation import accumulation_dtype
from .._typing import Array
from . import native
from .gradients import Mask
from .jaxprs import known_product, type_of
from .xla import Loop, Members

_ELEMENTS = 16
"""Elements of a member's largest state from which on its loop is quicker by itself."""

Each = Callable[[Callable, Loop, Sequence[int | None], Sequence[Array]], list[Array]]
"""Calls a function of the arrays of one member for all of them.

It gets the function, the loop of members, the axes of members of all arrays, or None,
and the arrays.
"""


def are_worth_it(
    loop: Loop, args: Sequence[Array], dims: Sequence[Any], wrt: Mask | None
) -> bool:
    """Return whether each member of a mapped loop should run by itself on a CPU."""
    step = loop.step
    invariant = zip(args[: step.num_invariant], dims, strict=False)
    has_weights = any(d is not None and a.ndim > 2 for a, d in invariant)
    if not has_weights or loop.backend not in (None, "cpu"):
        return False
    *_, states = step.parts(step.jaxpr.invars)
    if not states or not type_of(states[0]).shape:  # nor would the library run it
        return False
    if max(known_product(type_of(v).shape) for v in states) < _ELEMENTS:
        return False
    return native.can_run(loop, wrt)


def of_mapped(
    loop: Loop, args: Sequence[Array], dims: Sequence[Any], whole: Sequence[bool]
) -> tuple[Loop, list[Array]]:
    """Return a mapped loop as one of members, and its arguments.

    Args:
        loop: the loop of one member.
        args: the operands of the loop, then other arguments of its primitive.
        dims: their mapped axes.
        whole: for each of them, whether it gets an axis of members in any case.
    """
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    moved = [
        jnp.moveaxis(a, d, 0)
        if d is not None
        else jnp.broadcast_to(a, (size, *a.shape))
        if all_of
        else a
        for a, d, all_of in zip(args, dims, whole, strict=True)
    ]
    count = len(loop.step.jaxpr.invars) + loop.masked
    flags = [d is not None or w for d, w in zip(dims, whole, strict=True)]
    return loop._replace(members=Members(size, tuple(flags[:count]))), moved


def of_one(loop: Loop) -> Loop:
    """Return the loop of one member."""
    return loop._replace(members=None)


def axes_of(members: Members, count: int, own: Sequence[bool] = ()) -> list[int | None]:
    """Return the axes of members of arguments: the first one, or None.

    Args:
        members: those of the loop.
        count: the number of the arguments. The first are the operands of the loop.
        own: which of the last ones have such an axis; those between have.
    """
    between = [True] * (count - len(members.mapped) - len(own))
    return [0 if has else None for has in (*members.mapped, *between, *own)]


def side_by_side(
    run: Callable, loop: Loop, axes: Sequence[int | None], arguments: Sequence[Array]
) -> list[Array]:
    """Call a function for all members at once."""
    assert loop.members is not None
    return jax.vmap(run, tuple(axes), axis_size=loop.members.size)(*arguments)


def natively(
    run: Callable, loop: Loop, axes: Sequence[int | None], arguments: Sequence[Array]
) -> list[Array]:
    """Call a function that runs a native loop, for all members in one call of that.

    Where integers of each member decide whether a native loop can run, members run one
    after another: both loops would run for all.
    """
    if all(axes[i] is None for i in native.integers(of_one(loop))):
        return side_by_side(run, loop, axes, arguments)
    assert loop.members is not None
    pairs = list(zip(arguments, axes, strict=True))

    def body(_: None, own: list[Array]) -> tuple[None, list[Array]]:
        at = iter(own)
        return None, list(run(*(a if d is None else next(at) for a, d in pairs)))

    mapped = [a for a, d in pairs if d is not None]
    return lax.scan(body, None, mapped, length=loop.members.size)[1]


def forward(run: Callable, each: Each = side_by_side) -> Callable:
    """Return the implementation of a loop forward for loops of members, too.

    Args:
        run: the implementation for other loops.
        each: how the members run.
    """
    return _of_all(run, each, lambda members, wrt: [])


def tangent(run: Callable) -> Callable:
    """Return the implementation of the tangents of a loop; see `forward`."""
    return _of_all(run, side_by_side, _are_mapped)


def backward(run: Callable, each: Each = side_by_side) -> Callable:
    """Return the implementation of a loop backwards; see `forward`."""
    found = _of_all(run, each, lambda members, wrt: [])

    @ft.wraps(run)
    def of_all(*arguments: Array, loop: Loop, wrt: Mask) -> list[Array]:
        results = found(*arguments, loop=loop, wrt=wrt)
        return results if loop.members is None else _summed(loop.members, wrt, results)

    return of_all


def _of_all(run: Callable, each: Each, own: Callable) -> Callable:
    """Return an implementation for loops of members and others.

    Args:
        run: the implementation for other loops.
        each: how the members run.
        own: from members and `wrt` to the last argument of `axes_of`.
    """

    @ft.wraps(run)
    def of_all(*arguments: Array, loop: Loop, wrt: Any) -> list[Array]:
        members = loop.members
        if members is None:
            return run(*arguments, loop=loop, wrt=wrt)
        one = ft.partial(run, loop=of_one(loop), wrt=wrt)
        axes = axes_of(members, len(arguments), own(members, wrt))
        return each(one, loop, axes, arguments)

    return of_all


def _summed(members: Members, wrt: Mask, found: Sequence[Array]) -> list[Array]:
    """Return the cotangents of operands, of those that members share as sums."""
    return [
        a if own else jnp.sum(a, 0, dtype=accumulation_dtype(a.dtype)).astype(a.dtype)
        for a, own in zip(found, _are_mapped(members, wrt), strict=True)
    ]


def _are_mapped(members: Members, wrt: Mask) -> list[bool]:
    """Return for each operand of `wrt` whether each member has its own."""
    return [own for own, asked in zip(members.mapped, wrt, strict=True) if asked]


def forward_by(
    rule: Callable, *operands: Array, loop: Loop, wrt: Mask | None
) -> list[Array]:
    """Run a loop of members by the batching rule that maps its step."""
    assert loop.members is not None
    axes = axes_of(loop.members, len(operands))
    found, dims = rule(operands, axes, loop=of_one(loop), wrt=wrt)
    return [jnp.moveaxis(a, d, 0) for a, d in zip(found, dims, strict=True)]


def backward_by(
    rule: Callable, *arguments: Array, loop: Loop, wrt: Mask
) -> list[Array]:
    """Run a loop of members backwards; see `forward_by`."""
    assert loop.members is not None
    found = forward_by(rule, *arguments, loop=loop, wrt=wrt)
    return _summed(loop.members, wrt, found)
