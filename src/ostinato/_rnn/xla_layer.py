"""One direction of one layer on XLA: products over all steps around one scan.

Arrays are time-major here. What depends on the input alone is one product over all
steps before the scan, weight gradients are one after it; in the scan stands only what
must wait for the step before. Lengths and resets are dealt with here, for all modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array
from .layout import LayerWeights
from .xla_cell import Cell, StepPrimal


class Steps(NamedTuple):
    """Which steps count: bool `[T, B, 1]`, or None for all and for none."""

    valid: Array | None
    reset: Array | None


class LayerPrimal(NamedTuple):
    """What tangent and backward need to know of the forward pass."""

    x: Array
    h_0: Array
    c_0: Any  # of an LSTM
    h: Array
    gates: Any  # None for a plain RNN, and with `recompute`
    cells: Any  # of an LSTM
    steps: Steps


class LayerOutput(NamedTuple):
    """Results of one direction; None where the mode or the call has none."""

    h: Array  # [T, B, S], 0 where not valid
    h_n: Array
    c_n: Array | None
    gates: Array | None
    cells: Array | None


class LayerGradients(NamedTuple):
    """Gradients of one direction; None where not asked for."""

    x: Array | None
    weights: LayerWeights | None
    h_0: Array
    c_0: Array | None


def keep_where(condition: Array | None, value: Any, other: Any = 0) -> Any:
    """`value` where `condition`, else `other`; untouched without a condition."""
    if condition is None or value is None:
        return value
    return jnp.where(condition, value, other)


def _zero_where(condition: Array | None, value: Any) -> Any:
    return keep_where(None if condition is None else ~condition, value)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A cell and the direction in which it runs over the steps."""

    cell: Cell
    reverse: bool

    def forward(self, x: Array, h_0: Array, c_0: Any, steps: Steps) -> LayerOutput:
        """Run every step; gates and cells come back only if the call saves them."""
        cell, call = self.cell, self.cell.call

        def body(carry: tuple, xs: tuple) -> tuple:
            gx, (valid, reset) = xs
            h, c = (_zero_where(reset, a) for a in carry)
            h_new, c_new, gates = cell.step(h, c, gx)
            c = keep_where(valid, c_new, c)
            saved = gates if call.save and call.saves_gates else None
            carry = keep_where(valid, h_new, h), c
            return carry, (keep_where(valid, h_new), saved, c if call.save else None)

        (h_n, c_n), (h, gates, cells) = lax.scan(
            body,
            (h_0, cell.widen(c_0)),
            (cell.input_product(x), steps),
            reverse=self.reverse,
        )
        return LayerOutput(h, h_n, cell.narrow(c_n), gates, cells)

    def tangent(
        self,
        primal: LayerPrimal,
        dweights: LayerWeights | None,
        dx: Array | None,
        dh_0: Array,
        dc_0: Any,
    ) -> tuple[Array, Array, Any]:
        """`(dh, dh_n, dc_n)`: linear in `dweights, dx, dh_0, dc_0`."""
        cell = self.cell
        at = self._with_gates(primal.x, self._at(primal))

        def body(carry: tuple, xs: tuple) -> tuple:
            at, terms, (valid, reset) = xs
            dh, dc = (_zero_where(reset, a) for a in carry)
            dh_new, dc_new = cell.step_tangent(at, terms, dh, dc)
            carry = keep_where(valid, dh_new, dh), keep_where(valid, dc_new, dc)
            return carry, keep_where(valid, dh_new)

        (dh_n, dc_n), dh = lax.scan(
            body,
            (cell.widen(dh_0), cell.widen(dc_0)),
            (at, cell.tangent_terms(primal.x, dx, at, dweights), primal.steps),
            reverse=self.reverse,
        )
        return cell.narrow(dh), cell.narrow(dh_n), cell.narrow(dc_n)

    def backward(
        self,
        primal: LayerPrimal,
        dh: Array,
        dh_n: Array,
        dc_n: Any,
        need_x: bool,
        need_weights: bool,
    ) -> LayerGradients:
        """Gradients, given cotangents of every output `dh` and of the final state."""
        cell = self.cell

        def segment(carry: tuple, xs: tuple) -> tuple:
            dh, dc, dweights = carry
            x, at, dh_out, steps = xs
            at = self._with_gates(x, at)
            (dh, dc), cotangents = lax.scan(
                self._step_backward,
                (dh, dc),
                (at, dh_out, steps),
                reverse=not self.reverse,
            )
            if need_weights:
                new = cell.weight_gradients(x, at, cotangents)
                dweights = jax.tree.map(jnp.add, dweights, new)
            dx = cell.input_gradient(cotangents[0]) if need_x else None
            return (dh, dc, dweights), dx

        dweights = None
        if need_weights:
            zeros_like = lambda a: jnp.zeros_like(a, cell.wide)  # noqa: E731
            dweights = jax.tree.map(zeros_like, cell.weights)
        (dh_0, dc_0, dweights), dx = _in_segments(
            segment,
            (cell.widen(dh_n), cell.widen(dc_n), dweights),
            (primal.x, self._at(primal), dh, primal.steps),
            reverse=not self.reverse,
            split=cell.call.has_gates and cell.call.recompute,
        )
        dweights = jax.tree.map(cell.narrow, dweights)
        return LayerGradients(dx, dweights, cell.narrow(dh_0), cell.narrow(dc_0))

    def _step_backward(self, carry: tuple, xs: tuple) -> tuple:
        """One step back: the carry, and cotangents for the products over all steps."""
        dh, dc = carry
        at, dh_out, (valid, reset) = xs
        cell = self.cell
        cotangents, dh_prev, dc_prev = cell.step_backward(
            at, dh + cell.widen(dh_out), dc
        )
        carry = (
            keep_where(valid, _zero_where(reset, dh_prev), dh),
            keep_where(valid, _zero_where(reset, dc_prev), dc),
        )
        return carry, tuple(cell.narrow(keep_where(valid, a)) for a in cotangents)

    def _at(self, primal: LayerPrimal) -> StepPrimal:
        """What each step of the forward pass started from and came to."""
        c_prev = None
        if primal.cells is not None:
            c_prev = self._previous(primal.cells, primal.c_0, primal.steps)
        h_prev = self._previous(primal.h, primal.h_0, primal.steps)
        return StepPrimal(primal.gates, h_prev, primal.h, c_prev, primal.cells)

    def _previous(self, states: Array, first: Array, steps: Steps) -> Array:
        """The state that each step started from, from the states after each step."""
        first = first.astype(states.dtype)[None]
        if self.reverse:
            prev = jnp.concatenate([states, first])[1:]
            if steps.valid is not None:  # each row starts at its own end
                beyond = jnp.zeros_like(steps.valid[:1])
                next_valid = jnp.concatenate([steps.valid, beyond])[1:]
                prev = jnp.where(next_valid, prev, first)
        else:
            prev = jnp.concatenate([first, states])[:-1]
        # The state of a row without steps counts for nothing, NaN neither.
        return _zero_where(steps.reset, keep_where(steps.valid, prev))

    def _with_gates(self, x: Array, at: StepPrimal) -> StepPrimal:
        """`at` with its gates, run again for all steps at once if not stored."""
        if at.gates is not None or not self.cell.call.has_gates:
            return at
        gx = self.cell.input_product(x)
        return at._replace(gates=self.cell.step(at.h_prev, at.c_prev, gx)[2])


_SEGMENT = 64


def _in_segments(
    segment: Callable, carry: Any, xs: Any, reverse: bool, split: bool
) -> tuple[Any, Any]:
    """Run `segment` over all steps at once, or over about 64 at a time if `split`.

    Split, what a segment makes for itself (recomputed gates, their cotangents) never
    exists for the whole sequence.
    """
    length = jax.tree.leaves(xs)[0].shape[0]
    # A symbolic length cannot be divided; it runs as one segment.
    if not split or not isinstance(length, int) or length <= _SEGMENT:
        return segment(carry, xs)
    # A divisor needs no copy of the inputs; failing that, the odd rest goes first.
    divisors = [k for k in range(_SEGMENT // 4, 4 * _SEGMENT) if length % k == 0]
    size = min(divisors, key=lambda k: abs(k - _SEGMENT), default=_SEGMENT)
    count, rest = divmod(length, size)
    # Counts are spelled out: a -1 cannot be solved for where the batch is empty.
    blocks = jax.tree.map(lambda a: a[rest:].reshape(count, size, *a.shape[1:]), xs)

    def run_blocks(carry: Any) -> tuple[Any, Any]:
        carry, ys = lax.scan(segment, carry, blocks, reverse=reverse)
        return carry, jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:]), ys)

    if not rest:
        return run_blocks(carry)
    odd = jax.tree.map(lambda a: a[:rest], xs)
    if reverse:
        carry, ys = run_blocks(carry)
        carry, odd_ys = segment(carry, odd)
    else:
        carry, odd_ys = segment(carry, odd)
        carry, ys = run_blocks(carry)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), odd_ys, ys)
