"""Loops and conditions.

Inside a loop a value keeps its layout from step to step. What all examples share stays
shared as long as the loop leaves it so; everything else takes its canonical layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from ..._compat import scan_counts
from ..._typing import Array
from ..core.context import Context
from ..core.registry import register
from ..core.sizes import is_symbolic
from ..core.subset import among
from ..core.values import Flat, Packing, Padded, Shared, Value, with_array
from ..schedule import packed_scan, padded_scan
from ..schedule.scan import Scan
from ..types.segments import along

_Values = Sequence[Value]


# -------------------------------------------------------------------------------- scan


@register("scan")
def _scan(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    jaxpr: Any,
    length: Any,
    reverse: bool,
    unroll: Any,
    **others: Any,
) -> list[Value]:
    num_consts, num_carry = scan_counts(others)
    scan = Scan(jaxpr, num_carry, length, reverse, unroll, ctx.out_shapes(eqn))
    consts = values[:num_consts]
    init = values[num_consts : num_consts + num_carry]
    xs = values[num_consts + num_carry :]
    return _run_scan(ctx, scan, consts, init, xs)


def _run_scan(
    ctx: Context, scan: Scan, consts: _Values, init: _Values, xs: _Values
) -> list[Value]:
    if not is_symbolic(scan.length):
        return _over_fixed_axis(ctx, scan, consts, init, xs)
    number = packed_scan.choose(ctx, scan, consts)
    if number is None:
        return padded_scan.run(ctx, scan, consts, init, xs)
    return packed_scan.run(ctx, scan, number, consts, init, xs)


def _over_fixed_axis(
    ctx: Context, scan: Scan, consts: _Values, init: _Values, xs: _Values
) -> list[Value]:
    """One scan of the whole batch; rows stay rows."""
    xs = [ctx.to_padded(v) if isinstance(v, Flat) and v.axis == 0 else v for v in xs]
    slices = Packing.of(map(_slice, xs))
    steps = [jnp.moveaxis(v.x, 1, 0) if isinstance(v, Padded) else v.x for v in xs]

    def body(carry: _Values, x: Sequence[Array]) -> list[Value]:
        given = [*consts, *carry, *slices.unpack(x)]
        return ctx.nested().evaluate(scan.jaxpr, given)

    first = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in steps]
    init = _settle(ctx, init, lambda carry: _kinds(body, carry, first))
    packing, stacked = Packing.of(init), []

    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        results = body(packing.unpack(carry), x)
        states = _like(ctx.nested(), packing, results[: scan.num_carry])
        outputs = results[scan.num_carry :]
        stacked.append(Packing.of(outputs))
        return [v.x for v in states], [v.x for v in outputs]

    arrays = [v.x for v in init]
    arrays, ys = lax.scan(
        step, arrays, steps, scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    shapes = scan.shapes[scan.num_carry :]
    outputs = [
        _stack(v, shape)
        for v, shape in zip(stacked[-1].unpack(ys), shapes, strict=True)
    ]
    return packing.unpack(arrays) + outputs


def _slice(value: Value) -> Value:
    """The layout of one step of a value whose first axis is scanned."""
    rest = value.shape[1:]
    if isinstance(value, Flat):
        return Flat(value.x, rest, value.axis - 1)
    return type(value)(value.x, rest)


def _stack(value: Value, shape: tuple[Any, ...]) -> Value:
    """The steps of a value, stacked in front of its array."""
    if isinstance(value, Flat):
        return Flat(value.x, shape, value.axis + 1)
    x = jnp.moveaxis(value.x, 0, 1) if isinstance(value, Padded) else value.x
    return type(value)(x, shape)


# ------------------------------------------------------------------------------- while


@register("while")
def _while(
    ctx: Context,
    eqn: JaxprEqn,
    *values: Value,
    cond_jaxpr: Any,
    body_jaxpr: Any,
    cond_nconsts: int,
    body_nconsts: int,
) -> list[Value]:
    """Until all examples are done; one that is done keeps its state."""
    of_condition = values[:cond_nconsts]
    of_body = values[cond_nconsts : cond_nconsts + body_nconsts]
    init = values[cond_nconsts + body_nconsts :]
    turns = _turns(cond_jaxpr.jaxpr, body_jaxpr.jaxpr, body_nconsts, init)
    if turns is not None:  # as a scan it has a gradient
        scan = Scan(body_jaxpr, len(init), turns, False, 1, ctx.out_shapes(eqn))
        return _run_scan(ctx, scan, of_body, init, [])

    def goes_on(carry: _Values) -> list[Value]:
        return ctx.nested().evaluate(cond_jaxpr, [*of_condition, *carry])

    def body(carry: _Values, going: Array | None = None) -> list[Value]:
        inner = ctx.nested() if going is None else among(ctx, going)
        return inner.evaluate(body_jaxpr, [*of_body, *carry])

    init = _settle(ctx, init, lambda carry: _kinds(body, carry))
    together = isinstance(_kinds(goes_on, init).values[0], Shared)
    if not together:
        init = [ctx.canonical(v) for v in init]
    packing = Packing.of(init)
    counts = ctx.complete()  # what is too short might never be done

    def active(arrays: Sequence[Array]) -> Array:
        (condition,) = goes_on(packing.unpack(arrays))
        if together:
            return condition.x
        going = ctx.nested().to_padded(condition).x
        return going if counts is None else going & counts

    def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        going, arrays = state
        old = packing.unpack(arrays)
        inner = ctx.nested()
        new = _like(inner, packing, body(old, None if together else going))
        if not together:
            new = [select(inner, going, a, b) for a, b in zip(new, old, strict=True)]
        arrays = [v.x for v in new]
        return active(arrays), arrays

    arrays = [v.x for v in init]
    start = (active(arrays), arrays)
    _, arrays = lax.while_loop(lambda state: jnp.any(state[0]), step, start)
    return packing.unpack(arrays)


def _turns(condition: Any, body: Any, num_consts: int, init: _Values) -> Any:
    """How many turns a loop has that counts to a size, as `fori_loop(0, n, ..)` does.

    Its state begins with the count and the number to stop at. None for other loops.
    """
    if len(init) < 2 or len(condition.eqns) != 1:
        return None
    (test,), (count, stop) = condition.eqns, body.invars[num_consts:][:2]
    if test.primitive.name != "lt" or condition.outvars != test.outvars:
        return None
    if list(test.invars) != condition.invars[:2] or body.outvars[1] is not stop:
        return None
    steps = [eqn for eqn in body.eqns if eqn.outvars[0] is body.outvars[0]]
    if not steps or steps[0].primitive.name != "add":
        return None
    other = [a for a in steps[0].invars if a is not count]
    if len(other) != 1 or not isinstance(other[0], Literal) or other[0].val != 1:
        return None
    first, last = (None if isinstance(v, Flat) else v.number for v in init[:2])
    if first is None or last is None:
        return None
    turns = last - first
    return turns if is_symbolic(turns) else max(int(turns), 0)


# -------------------------------------------------------------------------------- cond


@register("cond")
def _cond(
    ctx: Context, eqn: JaxprEqn, index: Value, *values: Value, branches: Any, **_: Any
) -> list[Value]:
    """One branch if all examples take the same; else all, and each example its own."""
    if not isinstance(index, Shared):
        takes = ctx.to_padded(index).x.astype(jnp.int32)  # of two, it is a bool
        results = [
            among(ctx, takes == i).evaluate(branch, values)
            for i, branch in enumerate(branches)
        ]
        return [_choose(ctx, index, cases) for cases in zip(*results, strict=True)]
    packing, found = Packing.of(values), []

    def run(branch: Any) -> Callable:
        def call(*arrays: Array) -> list[Array]:
            inner = ctx.nested()
            results = inner.evaluate(branch, packing.unpack(arrays))
            results = [inner.canonical(v) for v in results]
            found.append(Packing.of(results))
            return [v.x for v in results]

        return call

    arrays = lax.switch(index.x, list(map(run, branches)), *(v.x for v in values))
    return found[-1].unpack(arrays)


def _choose(ctx: Context, index: Value, cases: _Values) -> Value:
    cases = [ctx.canonical(v) for v in cases]
    first = cases[0]
    which = _per_element(ctx, ctx.to_padded(index).x, first)
    which = jnp.broadcast_to(which, first.x.shape)
    return with_array(first, lax.select_n(which, *(v.x for v in cases)))


def select(ctx: Context, condition: Array, a: Value, b: Value) -> Value:
    """`a` for the examples where `condition`, bool `[batch]`, holds, else `b`.

    Both have the same layout, `Flat` or `Padded`.
    """
    return with_array(a, jnp.where(_per_element(ctx, condition, a), a.x, b.x))


def _per_element(ctx: Context, x: Array, value: Value) -> Array:
    """`x`, `[batch]`, in a shape that broadcasts to the array of `value`."""
    if isinstance(value, Flat):
        return along(jnp.take(x, ctx.segments(value.dim).ids), value.axis, value.x.ndim)
    return along(x, 0, value.x.ndim)


# ----------------------------------------------------------------- layouts in a loop


def _kinds(function: Callable, values: _Values, *others: Any) -> Packing:
    """The layouts of what `function(values, *others)` would return."""
    packing, found = Packing.of(values), []

    def run(arrays: Sequence[Array], *others: Any) -> list[Array]:
        results = function(packing.unpack(arrays), *others)
        found.append(Packing.of(results))
        return [v.x for v in results]

    jax.eval_shape(run, [v.x for v in values], *others)
    return found[-1]


def _settle(
    ctx: Context, init: _Values, step: Callable[[_Values], Packing]
) -> list[Value]:
    """`init` in layouts that the body of a loop keeps.

    Args:
        ctx: of the loop.
        init: the values before the loop.
        step: from values to the layouts of what the body makes of them, these first.
    """
    shared = [isinstance(v, Shared) for v in init]
    while True:
        settled = [
            v if stays else ctx.canonical(v)
            for v, stays in zip(init, shared, strict=True)
        ]
        if not any(shared):
            return settled
        results = step(settled).values[: len(settled)]
        still = [
            stays and isinstance(result, Shared)
            for stays, result in zip(shared, results, strict=True)
        ]
        if still == shared:
            return settled
        shared = still


def _like(ctx: Context, packing: Packing, values: _Values) -> list[Value]:
    """`values` in the layouts of `packing`."""
    return [
        v if isinstance(kind, Shared) else ctx.canonical(v)
        for kind, v in zip(packing.values, values, strict=True)
    ]
