"""The rules of loops and conditions.

Inside a loop a value keeps its layout from step to step. A shared value stays shared if
the loop keeps it so; every other value takes its canonical layout.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from ..._compat import scan_counts
from ..._typing import Array
from ..core.context import Context
from ..core.registry import register
from ..core.sizes import is_symbolic
from ..core.stand_ins import Some
from ..core.values import Flat, Padded, Shared, Value, with_array
from ..schedule import compiled_scan, packed_scan, padded_scan
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
    unroll = ctx.max(unroll)  # `True` is the length, which may be a symbol
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
    compiled = compiled_scan.run(ctx, scan, consts, init, xs)
    if compiled is not None:
        return compiled
    lanes = packed_scan.choose_lanes(ctx, scan, consts)
    if lanes is None:
        return padded_scan.run(ctx, scan, consts, init, xs)
    return packed_scan.run(ctx, scan, lanes, consts, init, xs)


def _over_fixed_axis(
    ctx: Context, scan: Scan, consts: _Values, init: _Values, xs: _Values
) -> list[Value]:
    """Return the results of one scan of the whole batch; flat values stay flat."""
    xs = [ctx.to_padded(v) if isinstance(v, Flat) and v.axis == 0 else v for v in xs]

    def body(carry: _Values, x: _Values) -> list[Value]:
        return ctx.nested().evaluate(scan.jaxpr, [*consts, *carry, *x])

    def step(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        results = body(carry, x)
        states = _in_layouts(ctx.nested(), carry, results[: scan.num_carry])
        return states, results[scan.num_carry :]

    steps = list(map(_as_steps, xs))
    if scan.length:  # else there is no step whose layouts could be asked for
        first = jax.eval_shape(lambda steps: jax.tree.map(lambda a: a[0], steps), steps)
        init = _settled(ctx, init, lambda carry: _layouts(body, carry, first))
    else:
        init = list(map(ctx.canonical, init))
    carry, ys = lax.scan(
        step, init, steps, scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    shapes = scan.shapes[scan.num_carry :]
    return carry + list(map(_from_steps, ys, shapes))


def _as_steps(value: Value) -> Value:
    """Return a value whose first axis is scanned as `lax.scan` takes it.

    The layout is that of one step, and the array has the steps in front.
    """
    rest = value.shape[1:]
    if isinstance(value, Flat):
        return Flat(value.x, rest, value.axis - 1)
    if isinstance(value, Padded):
        return Padded(jnp.moveaxis(value.x, 1, 0), rest)
    return Shared(value.x, rest)


def _from_steps(value: Value, shape: tuple[Any, ...]) -> Value:
    """Return the value of all steps, of shape `shape`: the inverse of `_as_steps`."""
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
    """Run until all examples are done; an example that is done keeps its state."""
    if cond_jaxpr.jaxpr.outvars[0].aval.shape:  # what `jax.vmap` makes of a loop
        condition, own = _of_many(cond_jaxpr, body_jaxpr, cond_nconsts)
        counts = {"cond_nconsts": cond_nconsts}
        counts["body_nconsts"] = cond_nconsts + body_nconsts
        values = (*values[:cond_nconsts], *values)
        return _while(ctx, eqn, *values, cond_jaxpr=condition, body_jaxpr=own, **counts)
    of_condition = values[:cond_nconsts]
    of_body = values[cond_nconsts : cond_nconsts + body_nconsts]
    init = values[cond_nconsts + body_nconsts :]
    turns = _turns(cond_jaxpr.jaxpr, body_jaxpr.jaxpr, body_nconsts, init)
    if turns is not None:  # a scan has a gradient
        scan = Scan(body_jaxpr, len(init), turns, False, 1, ctx.out_shapes(eqn))
        return _run_scan(ctx, scan, of_body, init, [])

    def condition(carry: _Values) -> Value:
        (value,) = ctx.nested().evaluate(cond_jaxpr, [*of_condition, *carry])
        return value

    def body(carry: _Values, going: Array | None = None) -> list[Value]:
        inner = ctx.nested() if going is None else ctx.among(going)
        return inner.evaluate(body_jaxpr, [*of_body, *carry])

    init = _settled(ctx, init, lambda carry: _layouts(body, carry))
    together = isinstance(_layouts(condition, init), Shared)
    if not together:
        init = [*map(ctx.canonical, init)]
    # An example that is incomplete, or has not come here, might never be done.
    limit = ctx.reached if together else ctx.used_examples()

    def going(carry: _Values) -> Array:
        value = condition(carry)
        going = value.x if together else ctx.nested().to_padded(value).x
        return going if limit is None else going & limit

    def step(state: tuple[Array, list[Value]]) -> tuple[Array, list[Value]]:
        goes, old = state
        inner = ctx.nested()
        new = _in_layouts(inner, old, body(old, None if together else goes))
        if not together:
            new = [select(inner, goes, a, b) for a, b in zip(new, old, strict=True)]
        return going(new), new

    start = (going(init), list(init))
    return lax.while_loop(lambda state: jnp.any(state[0]), step, start)[1]


def _of_many(condition: Any, body: Any, cond_nconsts: int) -> tuple[Any, Any]:
    """Return condition and body of one loop that runs many, each until it is done.

    Args:
        condition: one truth value for each of the loops.
        body: a step of all loops, whose values begin with their axes.
        cond_nconsts: how many constants the condition takes. The body that is returned
            takes these before its own.
    """
    goes, step = jaxpr_as_fun(condition), jaxpr_as_fun(body)

    def any_goes(*args: Array) -> Array:
        return jnp.any(goes(*args)[0])

    def step_if_it_goes(*args: Array) -> list[Array]:
        own = args[cond_nconsts:]
        new = step(*own)
        old = own[len(own) - len(new) :]
        (going,) = goes(*args[:cond_nconsts], *old)

        def choose(new: Array, old: Array) -> Array:
            axes = tuple(range(going.ndim, new.ndim))
            return jnp.where(jnp.expand_dims(going, axes), new, old)

        return list(map(choose, new, old))

    consts = condition.in_avals[:cond_nconsts]
    return (
        jax.make_jaxpr(any_goes)(*condition.in_avals),
        jax.make_jaxpr(step_if_it_goes)(*consts, *body.in_avals),
    )


def _turns(condition: Any, body: Any, num_consts: int, init: _Values) -> Any:
    """Return the number of turns of a loop that counts, as `fori_loop(0, n, ..)` does.

    The state of such a loop begins with the count and the number at which it stops.
    Return None for other loops.
    """
    if len(init) < 2 or len(condition.eqns) != 1:
        return None
    (test,), (count, stop) = condition.eqns, body.invars[num_consts:][:2]
    if test.primitive.name != "lt" or condition.outvars != test.outvars:
        return None
    if list(test.invars) != condition.invars[:2] or body.outvars[1] is not stop:
        return None
    steps = [eqn for eqn in body.eqns if body.outvars[0] in eqn.outvars]
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
    """Run one branch if all examples take the same, else all, and select."""
    if not isinstance(index, Shared):
        # A bool if there are two branches.
        takes = ctx.to_padded(index).x.astype(jnp.int32)
        results = [
            _branch_of_some(ctx, takes == i, branch, values)
            for i, branch in enumerate(branches)
        ]
        return [_choose(ctx, index, cases) for cases in zip(*results, strict=True)]

    def run(branch: Any, *values: Value) -> list[Value]:
        return ctx.nested().evaluate(branch, values)

    # What no branch makes different from example to example stays shared.
    cases = [_layouts(ft.partial(run, branch), *values) for branch in branches]
    likes = [
        next((v for v in results if not isinstance(v, Shared)), results[0])
        for results in zip(*cases, strict=True)
    ]

    def call(branch: Any, *values: Value) -> list[Value]:
        return _in_layouts(ctx.nested(), likes, run(branch, *values))

    return lax.switch(index.x, [ft.partial(call, b) for b in branches], *values)


def _branch_of_some(
    ctx: Context, taken: Array, branch: Any, values: _Values
) -> list[Value]:
    """Return the results of a branch, which only the examples of `taken` use.

    The others are absent there: they have no gradient, not even 0 times infinity.
    """
    some = Some.of(ctx, taken)
    inner = some.context.among(taken)
    return list(map(some.back, inner.evaluate(branch, list(map(some, values)))))


def _choose(ctx: Context, index: Value, cases: _Values) -> Value:
    cases = [ctx.canonical(v) for v in cases]
    first = cases[0]
    which = _per_element(ctx, ctx.to_padded(index).x, first)
    which = jnp.broadcast_to(which, first.x.shape)
    return with_array(first, lax.select_n(which, *(v.x for v in cases)))


def select(ctx: Context, condition: Array, a: Value, b: Value) -> Value:
    """Return `a` for the examples where `condition`, bool `[batch]`, holds, else `b`.

    Both have the same layout, `Flat` or `Padded`.
    """
    return with_array(a, jnp.where(_per_element(ctx, condition, a), a.x, b.x))


def _per_element(ctx: Context, x: Array, value: Value) -> Array:
    """Return `x`, `[batch]`, in a shape that broadcasts to the array of `value`."""
    if isinstance(value, Flat):
        return along(jnp.take(x, ctx.segments(value.dim).ids), value.axis, value.x.ndim)
    return along(x, 0, value.x.ndim)


# ----------------------------------------------------------------- layouts in a loop


def _layouts(function: Callable, *arguments: Any) -> Any:
    """Return the results of a function without their arrays, and without running it."""
    return jax.eval_shape(function, *arguments)


def _settled(
    ctx: Context, init: _Values, results_of: Callable[[_Values], _Values]
) -> list[Value]:
    """Return `init` in layouts that the body of a loop keeps.

    Args:
        ctx: the context of the loop.
        init: the values before the loop.
        results_of: returns the layouts of the body's results, the carry first.
    """
    shared = [isinstance(v, Shared) for v in init]
    while True:
        settled = [
            v if stays else ctx.canonical(v)
            for v, stays in zip(init, shared, strict=True)
        ]
        if not any(shared):
            return settled
        results = results_of(settled)[: len(settled)]
        still = [
            stays and isinstance(result, Shared)
            for stays, result in zip(shared, results, strict=True)
        ]
        if still == shared:
            return settled
        shared = still


def _in_layouts(ctx: Context, likes: _Values, values: _Values) -> list[Value]:
    """Return `values` in the layouts of `likes`, which are shared or canonical."""
    return [
        v if isinstance(like, Shared) else ctx.canonical(v)
        for like, v in zip(likes, values, strict=True)
    ]
