"""The packed scan: examples one after another in a few lanes, without padding.

The examples are assigned to lanes, the longest first, each to a lane that has the least
steps so far. One scan runs all lanes side by side and starts again from the initial
state where an example begins. With K lanes, R tokens and examples of at most M steps it
takes few more steps than the larger of R / K and M, and never more than R / K + M; a
padded scan takes M steps of the whole batch. The bound is static, and steps past the
last one that a lane needs are skipped at run time, so lengths may be traced.
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
"""The fixed cost of a step, in tokens; measured with an LSTM of 64 units."""
MOST_COPIED = 4096
"""The most elements of an example's constants that are copied for each step."""
CHUNK = 16
"""The number of steps that are run or skipped together."""


class _Schedule(NamedTuple):
    """The token at each step of each lane; S steps, K lanes, so `S * K` slots.

    Attributes:
        slots: for each slot its token. Where a lane has no token left it is the first
            token of an example: the results there are thrown away, and are computed
            anyway for that example, so that no other NaN comes up.
        tokens: for each token its slot.
        example: int32 `[S, K]`, the example of the token.
        position: int32 `[S, K]`, the position of the token in its example.
        begins: bool `[S, K]`, whether the scan of an example begins there.
        steps: int32 scalar, the number of steps in which a lane has a token.
    """

    slots: Sources
    tokens: Sources
    example: Array
    position: Array
    begins: Array
    steps: Array

    def going(self, ctx: Context) -> Array:
        """Return where there is a token of an example that is going, bool `[S, K]`."""
        there = self.slots.valid.reshape(self.example.shape)
        return there if ctx.going is None else there & ctx.going[self.example]


def choose_lanes(ctx: Context, scan: Scan, consts: Sequence[Value]) -> int | None:
    """Return the lanes to run `scan` in, None where a padded scan is the better one."""
    if ctx.options.scan == "padded" or not _can_run(consts):
        return None
    tokens, longest = ctx.capacity(scan.length), max(ctx.max(scan.length), 1)
    if not isinstance(tokens, int):  # under `jax.export`
        return None
    lanes = ctx.options.lanes
    if lanes is None:  # as many as have work while a long example runs
        lanes = max(1, round(0.75 * tokens / longest))
        lanes = 8 * max(1, round(lanes / 8))
    lanes = min(lanes, ctx.batch)
    if ctx.options.scan == "packed":
        return lanes
    steps = max(tokens / lanes, longest) + CHUNK
    padded = longest * (ctx.batch + STEP_COST)
    return lanes if steps * (lanes + STEP_COST) < padded else None


def _can_run(consts: Sequence[Value]) -> bool:
    """Return whether each step can copy what examples have of their own."""
    own = [v for v in consts if not isinstance(v, Shared)]
    if any(ragged_axes(v) for v in own):
        return False
    return sum(math.prod(v.shape) for v in own) <= MOST_COPIED


def _schedule(ctx: Context, scan: Scan, lanes: int) -> _Schedule:
    dim = scan.length
    segments, lengths = ctx.segments(dim), ctx.lengths(dim)
    tokens, longest = ctx.capacity(dim), ctx.max(dim)
    # The lane of an example has at most an equal share of the examples before it.
    steps = min(tokens // lanes + longest, tokens)
    steps = CHUNK * -(-steps // CHUNK)

    order, rank = descending(lengths)
    loads, lane, first = _assign(lengths[order], lanes)
    firsts = first[rank] * lanes + lane[rank]  # the slot of each example's first token

    slot = firsts[segments.ids] + segments.position * lanes
    slot = jnp.minimum(slot, steps * lanes - 1)
    token = positions(tokens)
    used = ctx.used(dim)
    target = jnp.where(used.valid, slot, steps * lanes)
    token = jnp.full(steps * lanes + 1, -1, jnp.int32).at[target].set(token)[:-1]
    slots = Sources(
        jnp.where(token < 0, used.last if scan.reverse else 0, token), token >= 0
    )
    token = slots.element.reshape(steps, lanes)
    position, example = segments.position[token], segments.ids[token]
    start = lengths[example] - 1 if scan.reverse else 0
    begins = ~slots.valid.reshape(steps, lanes) | (position == start)
    in_tokens = Sources(slot, used.valid)
    return _Schedule(slots, in_tokens, example, position, begins, jnp.max(loads))


def _assign(lengths: Array, lanes: int) -> tuple[Array, Array, Array]:
    """Assign examples, the longest first, to the lanes with the least steps so far.

    Half as many examples as there are lanes are assigned in one turn: that takes few
    turns, and the loads of lanes still differ by one example at most. (If this holds
    before a turn it holds after it, since longer examples go where the load is less.)

    Args:
        lengths: int32 `[batch]`, descending.
        lanes: the number of lanes.

    Returns:
        The steps of each lane in the end, and for each example its lane and the steps
        that the lane had before.
    """
    each = max(lanes // 2, 1)
    turns = jnp.pad(lengths, (0, -len(lengths) % each)).reshape(-1, each)

    def turn(state: tuple[Array, Array], given: Array) -> Any:
        loads, lane = lax.sort(state, num_keys=1)
        more = jnp.concatenate([loads[:each] + given, loads[each:]])
        return (more, lane), (lane[:each], loads[:each])

    empty = [jnp.zeros(lanes, jnp.int32), positions(lanes)]
    loads, lane, _ = make_varying([*empty, lengths])
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
    """Return all results of `scan`, of all examples."""
    schedule = _schedule(ctx, scan, lanes)
    init = [ctx.to_padded(v) if isinstance(v, Flat) else v for v in init]

    def of_slots(value: Value) -> Array | None:
        """Return a value without the scanned axis for each slot, None if shared."""
        if isinstance(value, Shared):
            return None
        return take_repeated(value.x, schedule.example)

    given = {
        "symbols": {k: v[schedule.example] for k, v in ctx.symbols.values.items()},
        "begins": schedule.begins,
        "going": schedule.going(ctx),
        "consts": list(map(of_slots, consts)),
        "init": list(map(of_slots, init)),
        "x": [_scanned(schedule, v) for v in xs],
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
    results = _run_needed(step, before, given, schedule.steps, scan)
    results = [lax.collapse(y, 0, 2) for y in results]
    states = [
        _final(ctx, scan, schedule, v, y)
        for v, y in zip(init, results[: scan.num_carry], strict=True)
    ]
    outputs = [
        _output(ctx, schedule, y, shape)
        for y, shape in zip(
            results[scan.num_carry :], scan.shapes[scan.num_carry :], strict=True
        )
    ]
    return states + outputs


def _run_needed(
    step: Callable, carry: list[Array], given: Any, needed: Array | None, scan: Scan
) -> list[Array]:
    """Run a scan in chunks, without the steps from `needed` on; return stacked results.

    The results of skipped steps are zeros. For the backward pass only the carry before
    each chunk is saved: a chunk is recomputed there, and then fits into the cache. That
    takes less time than storing and loading everything.
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
        needed = None  # such a dtype, as that of keys, has no zeros
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


def _scanned(schedule: _Schedule, value: Value) -> Array:
    """Return for each slot its part of a value whose first axis is scanned."""
    if isinstance(value, Flat):
        x = relocate(value.x, schedule.slots, schedule.tokens)
        return x.reshape(*schedule.position.shape, *x.shape[1:])
    if isinstance(value, Shared):
        return take_repeated(value.x, schedule.position)
    return value.x[schedule.example, schedule.position]


def _at_slot(value: Value, own: Array | None) -> Value:
    return value if own is None else Padded(own, value.shape)


def _batch(value: Value, lanes: int) -> Array:
    """Return a value for each lane, of whichever example."""
    if isinstance(value, Shared):
        return jnp.broadcast_to(value.x, (lanes, *value.x.shape))
    if value.x.shape[0] == lanes:
        return value.x
    return jnp.broadcast_to(value.x[:1], (lanes, *value.x.shape[1:]))


def _final(
    ctx: Context, scan: Scan, schedule: _Schedule, init: Value, states: Array
) -> Value:
    """Return the state after each example's last step, or the initial state."""
    lengths = ctx.lengths(scan.length)
    token = ctx.segments(scan.length).offsets
    if not scan.reverse:
        token = token + lengths - 1
    slots = schedule.tokens.element
    token = jnp.clip(token, 0, slots.shape[0] - 1)
    final = jnp.take(states, slots[token], 0, mode="clip")
    some = along(lengths > 0, 0, final.ndim)
    start = init.x if isinstance(init, Padded) else init.x[None]
    return Padded(jnp.where(some, final, start), init.shape)


def _output(
    ctx: Context, schedule: _Schedule, y: Array, shape: tuple[Any, ...]
) -> Value:
    if len(symbolic_axes(shape)) == 1:
        return Flat(relocate(y, schedule.tokens, schedule.slots), shape, 0)
    tokens = ctx.padded_tokens(shape[0])
    return Padded(jnp.take(y, schedule.tokens.element[tokens], 0, mode="clip"), shape)
