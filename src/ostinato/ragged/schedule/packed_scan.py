"""Scans over the ragged axis in lanes.

The examples are dealt out to a few lanes, the longest first, to those that have the
least so far. One scan runs all lanes side by side and starts again from the initial
state where an example begins. With K lanes, R rows and examples of at most M steps that
takes little more steps than the larger of R / K and M, and never more than R / K + M,
where padding takes M steps of the whole batch. The bound is static and what lies past
the last step that a lane needs is skipped at run time, so lengths may be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._rnn.sharding import make_varying
from ..._typing import Array
from ..core.context import Context
from ..core.sizes import symbolic_axes
from ..core.stand_ins import with_sizes
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..primitives.relocate import Sources, relocate
from ..types.segments import along, descending, positions, take_repeated
from .scan import Scan

STEP_COST = 16
"""What a step costs apart from its rows, in rows; measured with an LSTM of 64 units."""
MOST_COPIED = 4096
"""Elements of one example's constants that each of its steps may have a copy of."""
CHUNK = 16
"""Steps that are run or skipped together."""


class _Plan(NamedTuple):
    """Which row stands at which step of which lane; S steps, K lanes.

    Attributes:
        in_slots: for each of the `S * K` slots a flat row. Where a lane has none left
            it is one that an example begins with: what the scan makes of it there is
            thrown away, and is something that it computes anyway, so never a new NaN.
        in_rows: for each flat row its slot.
        example: int32 `[S, K]`, whose row it is.
        position: int32 `[S, K]`, which of that example's rows.
        begins: bool `[S, K]`, whether the scan of an example begins there.
        steps: int32 scalar, how many of the S steps there is anything to do in.
    """

    in_slots: Sources
    in_rows: Sources
    example: Array
    position: Array
    begins: Array
    steps: Array

    def going(self, ctx: Context) -> Array:
        """Where there is a row of an example that is going, bool `[S, K]`."""
        there = self.in_slots.valid.reshape(self.example.shape)
        return there if ctx.going is None else there & ctx.going[self.example]


def choose_lanes(ctx: Context, scan: Scan, consts: Sequence[Value]) -> int | None:
    """How many lanes to run `scan` in; None where they cost more, or cannot be."""
    if ctx.options.scan == "padded" or not _can_run(ctx, scan, consts):
        return None
    rows, longest = ctx.capacity(scan.length), max(ctx.max(scan.length), 1)
    lanes = ctx.options.lanes
    if lanes is None:  # as many as one long example leaves work for
        lanes = max(1, round(0.75 * rows / longest))
        lanes = 8 * max(1, round(lanes / 8))
    lanes = min(lanes, ctx.batch)
    if ctx.options.scan == "packed":
        return lanes
    steps = max(rows / lanes, longest) + CHUNK
    padded = longest * (ctx.batch + STEP_COST)
    return lanes if steps * (lanes + STEP_COST) < padded else None


def _can_run(ctx: Context, scan: Scan, consts: Sequence[Value]) -> bool:
    own = [v for v in consts if not isinstance(v, Shared)]
    if any(ragged_axes(v) for v in own):
        return False
    return sum(math.prod(v.shape) for v in own) <= MOST_COPIED


def _plan(ctx: Context, scan: Scan, lanes: int) -> _Plan:
    dim = scan.length
    segments, lengths = ctx.segments(dim), ctx.lengths(dim)
    rows, longest = ctx.capacity(dim), ctx.max(dim)
    # The lane that an example goes to has no more than a fair share of the others.
    steps = min(rows // lanes + longest, rows)
    steps = CHUNK * -(-steps // CHUNK)

    order, place = descending(lengths)
    loads, lane, first = _deal(lengths[order], lanes)
    slots = first[place] * lanes + lane[place]  # of the first row of each example

    slot = slots[segments.ids] + segments.position * lanes
    slot = jnp.minimum(slot, steps * lanes - 1)
    row = positions(rows)
    tail = ctx.used(dim)
    target = jnp.where(tail.valid, slot, steps * lanes)
    row = jnp.full(steps * lanes + 1, -1, jnp.int32).at[target].set(row)[:-1]
    in_slots = Sources(
        jnp.where(row < 0, tail.last if scan.reverse else 0, row), row >= 0
    )
    row = in_slots.element.reshape(steps, lanes)
    position, example = segments.position[row], segments.ids[row]
    start = lengths[example] - 1 if scan.reverse else 0
    begins = ~in_slots.valid.reshape(steps, lanes) | (position == start)
    in_rows = Sources(slot, tail.valid)
    return _Plan(in_slots, in_rows, example, position, begins, jnp.max(loads))


def _deal(lengths: Array, lanes: int) -> tuple[Array, Array, Array]:
    """Deal out examples, the longest first, to the lanes that have the least so far.

    Half as many at a time as there are lanes: that takes few steps, and loads still
    differ by one example at most. (Where that holds before a turn it does after it, as
    the longer ones go where there is less.)

    Args:
        lengths: int32 `[batch]`, descending.
        lanes: how many.

    Returns:
        The steps that each lane has in the end, and for each example its lane and the
        steps that this one had before.
    """
    each = max(lanes // 2, 1)
    turns = jnp.pad(lengths, (0, -len(lengths) % each)).reshape(-1, each)

    def turn(state: tuple[Array, Array], given: Array) -> Any:
        loads, lane = lax.sort(state, num_keys=1)
        more = jnp.concatenate([loads[:each] + given, loads[each:]])
        return (more, lane), (lane[:each], loads[:each])

    none = [jnp.zeros(lanes, jnp.int32), positions(lanes)]
    loads, lane, _ = make_varying([*none, lengths])
    (loads, _), (lane, first) = lax.scan(turn, (loads, lane), turns)
    return loads, lane.reshape(-1)[: len(lengths)], first.reshape(-1)[: len(lengths)]


def run(
    ctx: Context,
    scan: Scan,
    lanes: int,
    consts: Sequence[Value],
    init: Sequence[Value],
    xs: Sequence[Value],
) -> list[Value]:
    """All results of `scan`, of all examples."""
    plan = _plan(ctx, scan, lanes)
    init = [ctx.to_padded(v) if isinstance(v, Flat) else v for v in init]

    def of_slots(value: Value) -> Array | None:
        """What each slot has of a value without the scanned axis, if it is its own."""
        if isinstance(value, Shared):
            return None
        return take_repeated(value.x, plan.example)

    given = {
        "symbols": {k: v[plan.example] for k, v in ctx.symbols.values.items()},
        "begins": plan.begins,
        "going": plan.going(ctx),
        "consts": list(map(of_slots, consts)),
        "init": list(map(of_slots, init)),
        "x": [_rows(plan, v) for v in xs],
    }

    def step(carry: list[Array], at: dict[str, Any]) -> tuple[list[Array], Any]:
        inner = with_sizes(ctx, lanes, at["symbols"]).nested(going=at["going"])
        starts = map(_at_slot, init, at["init"])
        carried = []
        for s, c in zip(starts, carry, strict=True):
            begins = along(at["begins"], 0, c.ndim)
            carried.append(Padded(jnp.where(begins, _batch(s, lanes), c), s.shape))
        closed = list(map(_at_slot, consts, at["consts"]))
        x = [Padded(a, v.shape[1:]) for a, v in zip(at["x"], xs, strict=True)]
        results = inner.evaluate(scan.jaxpr, [*closed, *carried, *x])
        arrays = [inner.to_padded(v).x for v in results]
        return arrays[: scan.num_carry], arrays

    before = [_batch(v, lanes) for v in init]
    results = _run_needed(step, before, given, plan.steps, scan)
    results = [lax.collapse(y, 0, 2) for y in results]
    states = [
        _final(ctx, scan, plan, v, y)
        for v, y in zip(init, results[: scan.num_carry], strict=True)
    ]
    outputs = [
        _output(ctx, plan, y, shape)
        for y, shape in zip(
            results[scan.num_carry :], scan.shapes[scan.num_carry :], strict=True
        )
    ]
    return states + outputs


def _run_needed(
    step: Callable, carry: list[Array], given: Any, needed: Array | None, scan: Scan
) -> list[Array]:
    """A scan whose steps from `needed` on are skipped, in chunks; its results, stacked.

    The results of skipped steps are zeros. For the backward pass only the carry before
    each chunk is saved: a chunk is run again there, and then fits into the cache, which
    takes less time than to store and load everything.
    """

    def chunk(carry: list[Array], at: Any) -> tuple[list[Array], list[Array]]:
        return lax.scan(step, carry, at, reverse=scan.reverse, unroll=scan.unroll)

    steps = jax.tree.leaves(given)[0].shape[0]
    first = jnp.arange(0, steps, CHUNK, dtype=jnp.int32)
    given = jax.tree.map(
        lambda a: a.reshape(steps // CHUNK, CHUNK, *a.shape[1:]), given
    )
    shapes = jax.eval_shape(chunk, carry, jax.tree.map(lambda a: a[0], given))[1]
    if any(jnp.issubdtype(s.dtype, jax.dtypes.extended) for s in shapes):
        needed = None  # there are no zeros of that dtype, such as that of keys
    run = jax.checkpoint(chunk, prevent_cse=False)

    def skip(carry: list[Array], at: Any) -> tuple[list[Array], list[Array]]:
        zeros = [jnp.zeros(s.shape, s.dtype) for s in shapes]
        return carry, make_varying([*zeros, *carry])[: len(zeros)]

    def run_if_needed(carry: list[Array], at: Any) -> tuple[list[Array], list[Array]]:
        if needed is None:
            return run(carry, at[1])
        return lax.cond(at[0] < needed, run, skip, carry, at[1])

    _, results = lax.scan(run_if_needed, carry, (first, given), reverse=scan.reverse)
    return [lax.collapse(y, 0, 2) for y in results]


def _rows(plan: _Plan, value: Value) -> Array:
    """What each slot has of a value whose first axis is scanned."""
    if isinstance(value, Flat):
        x = relocate(value.x, plan.in_slots, plan.in_rows)
        return x.reshape(*plan.position.shape, *x.shape[1:])
    if isinstance(value, Shared):
        return take_repeated(value.x, plan.position)
    return value.x[plan.example, plan.position]


def _at_slot(value: Value, own: Array | None) -> Value:
    return value if own is None else Padded(own, value.shape)


def _batch(value: Value, lanes: int) -> Array:
    """One per lane; of a value of the whole batch any will do."""
    if isinstance(value, Shared):
        return jnp.broadcast_to(value.x, (lanes, *value.x.shape))
    if value.x.shape[0] == lanes:
        return value.x
    return jnp.broadcast_to(value.x[:1], (lanes, *value.x.shape[1:]))


def _final(ctx: Context, scan: Scan, plan: _Plan, init: Value, states: Array) -> Value:
    """The state after each example's last step; the initial one where there is none."""
    lengths = ctx.lengths(scan.length)
    row = ctx.segments(scan.length).offsets
    if not scan.reverse:
        row = row + lengths - 1
    slots = plan.in_rows.element
    row = jnp.clip(row, 0, slots.shape[0] - 1)
    final = jnp.take(states, slots[row], 0, mode="clip")
    some = along(lengths > 0, 0, final.ndim)
    start = init.x if isinstance(init, Padded) else init.x[None]
    return Padded(jnp.where(some, final, start), init.shape)


def _output(ctx: Context, plan: _Plan, y: Array, shape: tuple[Any, ...]) -> Value:
    if len(symbolic_axes(shape)) == 1:
        return Flat(relocate(y, plan.in_rows, plan.in_slots), shape, 0)
    rows = ctx.padded_tokens(shape[0])
    return Padded(jnp.take(y, plan.in_rows.element[rows], 0, mode="clip"), shape)
