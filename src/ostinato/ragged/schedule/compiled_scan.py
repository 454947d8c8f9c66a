"""The compiled scan: the native loop over a step, on the tokens of all examples.

The native library runs each example for as many steps as it has, and reads and writes
its tokens where they lie: no value is padded, and the work is that of all tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..._recurrent.remat import TRANSCENDENTAL, all_but_arithmetic
from ..._step import native
from ..._step.asked import asked_backend, marked
from ..._step.cost import equations_of
from ..._step.policies import Choice
from ..._step.refusal import NAMED, refusal
from ..._step.scan import PreparedLoop, RunsAsScan, prepare
from ..._typing import Array
from ..core.context import Context
from ..core.sizes import symbolic_axes
from ..core.stand_ins import StandIns
from ..core.values import Flat, Padded, Shared, Value, ragged_axes
from ..types.segments import positions
from .scan import Scan, tokens_of_steps

_OWN = "custom_vjp_call"
_STORED = Choice(all_but_arithmetic, TRANSCENDENTAL)
"""What a step stores for its gradient, unless it says that itself."""


def run(
    ctx: Context,
    scan: Scan,
    consts: Sequence[Value],
    init: Sequence[Value],
    xs: Sequence[Value],
) -> list[Value] | None:
    """Return all results of `scan`, of all examples; None if it runs another way.

    Raises:
        NotImplementedError: the step asks for a backend that cannot run it.
    """
    jaxpr, order, policy = _without_checkpoint(scan.jaxpr)
    backend = asked_backend(jaxpr.jaxpr)
    if backend == "scan" or (backend is None and ctx.options.scan != "auto"):
        return None
    if any(len(ragged_axes(v)) > 1 for v in xs):
        return _refused(backend, "it scans two ragged axes")
    loop = _Loop(ctx, scan, jaxpr, order, consts, init, xs)
    on_padded = backend in ("xla", "cuda")
    try:
        found = loop.prepare(backend, padded=on_padded)
        padded = on_padded or found.precomputed is not None
        if padded and not on_padded:
            found = loop.prepare(backend, padded)
    except RunsAsScan as reason:
        return _refused(backend, str(reason))
    if backend is None and not native.can_run(
        found.loop(loop.length, loop.length, scan.reverse, policy, True, backend)
    ):
        return None
    return loop.run(found, policy, backend, padded)


def _refused(backend: str | None, reason: str) -> None:
    """Let the scan run another way, unless the step asks for this one."""
    if backend in NAMED:
        raise refusal(backend, reason)


def _without_checkpoint(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int], Any]:
    """Return a body, the arguments that it takes, and what it stores.

    A body that is one call under `jax.checkpoint` is what is called.
    """
    arguments, eqns = jaxpr.jaxpr.invars, jaxpr.jaxpr.eqns
    everything = list(range(len(arguments)))
    if len(eqns) != 1 or eqns[0].primitive.name != "remat2" or jaxpr.consts:
        return jaxpr, everything, _STORED
    (eqn,) = eqns
    if list(eqn.outvars) != list(jaxpr.jaxpr.outvars):
        return jaxpr, everything, _STORED
    where = {v: i for i, v in enumerate(arguments)}
    if any(v not in where for v in eqn.invars):
        return jaxpr, everything, _STORED
    inner = ClosedJaxpr(eqn.params["jaxpr"], ())
    return inner, [where[v] for v in eqn.invars], eqn.params["policy"]


class _Loop:
    """A scan over one example as a loop over all of them.

    Attributes:
        length: the steps of the longest example.
    """

    def __init__(
        self,
        ctx: Context,
        scan: Scan,
        jaxpr: ClosedJaxpr,
        order: list[int],
        consts: Sequence[Value],
        init: Sequence[Value],
        xs: Sequence[Value],
    ) -> None:
        self.ctx, self.scan, self.jaxpr, self.order = ctx, scan, jaxpr, order
        self.length = ctx.max(scan.length)
        # Examples without steps, and those that break a promise about a size, have the
        # constants of another one: their results are not used.
        complete, busy = ctx.complete(), ctx.lengths(scan.length) > 0
        self.batch = StandIns.of(ctx, busy if complete is None else busy & complete)
        self.consts = [self.batch(v) for v in consts]
        self.states = [ctx.to_padded(v) for v in init]
        # What all examples share at a step is the number of the step, or made of it.
        self.xs = [
            v
            if isinstance(v, Shared) and v.x.ndim == 1 and not _is_float(v)
            else ctx.to_flat(v)
            for v in xs
        ]
        # A derivative of its own that is not linear may give a gradient to zero. Loops
        # of derivatives run past the end of examples.
        self.asks = any(e.primitive.name == _OWN for e in equations_of(jaxpr.jaxpr))
        if self.asks:
            t = jnp.arange(self.length, dtype=jnp.int32)
            self.states.append(Padded(ctx.lengths(scan.length), ()))
            self.xs.append(Shared(t, t.shape))

    def prepare(self, backend: str | None, padded: bool) -> PreparedLoop:
        """Return the loop, taken apart; raise RunsAsScan if it runs as `lax.scan`.

        Args:
            backend: see `recurrent_net`.
            padded: whether it runs on padded examples.
        """
        at_step = [
            jax.ShapeDtypeStruct(
                v.x.shape[1:] if isinstance(v, Shared)
                else (self.ctx.batch, *v.x.shape[1:]),
                v.x.dtype,
            )
            for v in self.xs
        ]  # fmt: skip
        inputs = [self._steps(v) if padded else v.x for v in self.xs]
        states = [v.x for v in self.states]
        arrays = [v.x for v in self.consts]
        first = len(arrays) + len(states)
        first -= self.asks  # the scan does not take the lengths
        counts = [self.order[i] - first for i in marked(self.jaxpr.jaxpr)]
        counts += [len(self.xs) - 1] * self.asks
        return prepare(self._body, arrays, states, inputs, backend, at_step, counts)

    def _body(self, consts: list, states: list, at: list) -> tuple[list, list]:
        inner = _of_complete(self.batch.context)
        closed = [type(v)(a, v.shape) for a, v in zip(consts, self.consts, strict=True)]
        carried = [Padded(a, v.shape) for a, v in zip(states, self.states, strict=True)]
        x = [
            (Shared if isinstance(v, Shared) else Padded)(a, v.shape[1:])
            for a, v in zip(at, self.xs, strict=True)
        ]
        lengths = [carried.pop().x] if self.asks else []
        if self.asks:
            inner = inner.nested(going=x.pop().x < lengths[0])
        values = [*closed, *carried, *x]
        results = inner.evaluate(self.jaxpr, [values[i] for i in self.order])
        arrays = [inner.to_padded(v).x for v in results]
        count = self.scan.num_carry
        return [*arrays[:count], *lengths], arrays[count:]

    def run(
        self, found: PreparedLoop, policy: Any, backend: str | None, padded: bool
    ) -> list[Value]:
        """Return the results."""
        ctx, scan = self.ctx, self.scan
        states, ys = found.run(
            self.length,
            self.length,
            scan.reverse,
            policy,
            ctx.lengths(scan.length),
            backend,
            None if padded else ctx.capacity(scan.length),
        )
        pairs = zip(states[: scan.num_carry], self.states, strict=False)
        last = [Padded(a, v.shape) for a, v in pairs]
        outputs = [
            self._output(y, shape, padded)
            for y, shape in zip(ys, scan.shapes[scan.num_carry :], strict=True)
        ]
        return last + outputs

    def _steps(self, value: Flat | Shared) -> Array:
        """Return `[T, batch, ...]`, where an example has no step its first to run."""
        if isinstance(value, Shared):
            return value.x
        ctx, batch = self.ctx, self.batch
        lengths = ctx.lengths(value.dim)[batch.example]
        t = positions(self.length)[:, None]
        begin = jnp.maximum(lengths - 1, 0)[None] if self.scan.reverse else 0
        position = jnp.where(t < lengths[None], t, begin)
        segments = ctx.segments(value.dim)
        tokens = segments.offsets[batch.example][None] + position
        x = jnp.take(value.x, jnp.minimum(tokens, segments.last), 0)
        return batch.own(x, 1)

    def _output(self, y: Array, shape: tuple[Any, ...], padded: bool) -> Value:
        ctx, dim = self.ctx, shape[0]
        if padded:
            y = tokens_of_steps(ctx, y, dim)
        if len(symbolic_axes(shape)) > 1:
            y = jnp.take(y, ctx.padded_tokens(dim), 0, mode="clip")
            return Padded(y, shape)
        return Flat(ctx.fill_unused(y, dim, 0), shape, 0)


def _of_complete(ctx: Context) -> Context:
    """Return the context of a step, where all examples keep the promises."""
    known = ctx.symbols
    ranges = {
        name: r._replace(low=min(max(r.low, known.least.get(name, r.low)), r.high))
        for name, r in known.ranges.items()
    }
    return ctx.nested(symbols=dataclasses.replace(known, ranges=ranges))


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.x.dtype, jnp.inexact)
