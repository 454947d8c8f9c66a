"""One direction of one layer on XLA: products over all steps around one scan.

Arrays are time-major here. What depends on the input alone is one product over all
steps before the scan, weight gradients are one after it; in the scan stands only what
must wait for the step before. Lengths and resets are dealt with here, for all modes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._segments import near_divisor, scan_segments
from .._typing import Array
from .cell import LayerWeights, ModeCell, States, StepPrimal


class StepMasks(NamedTuple):
    """Which steps count: bool `[T, B, 1]`.

    Attributes:
        valid: False past a sequence's end; None: every step counts.
        reset: True where states become 0 before the step; None: nowhere.
    """

    valid: Array | None
    reset: Array | None


class LayerPrimal(NamedTuple):
    """What tangent and backward need to know of the forward pass.

    Attributes:
        x: the layer's input, `[T, B, I]`.
        initial: the states before the first step.
        states: the states after every step, `[T, B, ...]`, the output first.
        gates: what every step saved; None with `recompute`, or where that is nothing.
        masks: which steps count.
    """

    x: Array
    initial: States
    states: States
    gates: Any
    masks: StepMasks


class LayerOutput(NamedTuple):
    """Results of one direction.

    Attributes:
        h: its output at every step, `[T, B, S]`, 0 past a sequence's end.
        final: the states after the last step.
        gates: what every step saved, or None where nothing of it is stored.
        states: the states but for the output after every step; () where not stored.
    """

    h: Array
    final: States
    gates: Array | None
    states: States


class LayerGradients(NamedTuple):
    """Gradients of one direction; None where not asked for."""

    x: Array | None
    weights: LayerWeights | None
    initial: States


def keep_where(condition: Array | None, value: Any, other: Any = 0) -> Any:
    """Return `value` where `condition`, else `other`; `value` without a condition.

    `value` is an array or None, or a tuple of these, and `other` then a tuple or 0.
    """
    if isinstance(value, tuple):
        others = other if isinstance(other, tuple) else (other,) * len(value)
        return tuple(
            keep_where(condition, v, o) for v, o in zip(value, others, strict=True)
        )
    if condition is None or value is None:
        return value
    return jnp.where(condition, value, other)


def _zero_where(condition: Array | None, value: Any) -> Any:
    return keep_where(None if condition is None else ~condition, value)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A cell and the direction in which it runs over the steps."""

    cell: ModeCell
    reverse: bool

    def forward(self, x: Array, initial: States, masks: StepMasks) -> LayerOutput:
        """Run every step; what derivatives read comes back only if the call saves."""
        cell, call = self.cell, self.cell.call

        def body(states: States, xs: tuple) -> tuple:
            gx, (valid, reset) = xs
            states = _zero_where(reset, states)
            new, gates = cell.step(states, gx)
            states = keep_where(valid, new, states)
            gates = gates if call.save and call.saves_gates else None
            others = states[1:] if call.save else ()
            return states, (keep_where(valid, new[0]), gates, others)

        final, (h, gates, others) = lax.scan(
            body,
            (initial[0], *cell.widen(initial[1:])),
            (cell.input_product(x), masks),
            reverse=self.reverse,
        )
        return LayerOutput(h, cell.narrow(final), gates, others)

    def tangent(
        self,
        primal: LayerPrimal,
        dweights: LayerWeights | None,
        dx: Array | None,
        dinitial: States,
    ) -> tuple[Array, States]:
        """Return tangents of all outputs and of the final states.

        They are linear in `dweights`, `dx` and `dinitial`.
        """
        cell = self.cell
        at = self._with_gates(primal.x, self._at(primal))

        def body(dstates: States, xs: tuple) -> tuple:
            at, terms, (valid, reset) = xs
            dstates = _zero_where(reset, dstates)
            new = cell.step_tangent(at, terms, dstates)
            return keep_where(valid, new, dstates), keep_where(valid, new[0])

        dfinal, dh = lax.scan(
            body,
            cell.widen(dinitial),
            (at, cell.tangent_terms(primal.x, dx, at, dweights), primal.masks),
            reverse=self.reverse,
        )
        return cell.narrow(dh), cell.narrow(dfinal)

    def backward(
        self,
        primal: LayerPrimal,
        dh: Array,
        dfinal: States,
        need_x: bool,
        need_weights: bool,
    ) -> LayerGradients:
        """Return gradients, from cotangents of every output and the final states."""
        cell = self.cell

        def segment(carry: tuple, xs: tuple) -> tuple:
            dstates, dweights = carry
            x, at, dh_out, masks = xs
            at = self._with_gates(x, at)
            dstates, cotangents = lax.scan(
                self._step_backward,
                dstates,
                (at, dh_out, masks),
                reverse=not self.reverse,
            )
            if need_weights:
                new = cell.weight_gradients(x, at, cotangents)
                dweights = jax.tree.map(jnp.add, dweights, new)
            dx = cell.input_gradient(cotangents[0]) if need_x else None
            return (dstates, dweights), dx

        dweights = None
        if need_weights:
            zeros_like = lambda a: jnp.zeros_like(a, cell.wide)  # noqa: E731
            dweights = jax.tree.map(zeros_like, cell.weights)
        carry = cell.widen(dfinal), dweights
        xs = primal.x, self._at(primal), dh, primal.masks
        size = self._segment_length(dh.shape[0])
        if size is None:
            (dinitial, dweights), dx = segment(carry, xs)
        else:
            (dinitial, dweights), dx = scan_segments(
                segment, carry, xs, size, reverse=not self.reverse
            )
        dweights = jax.tree.map(cell.narrow, dweights)
        return LayerGradients(dx, dweights, cell.narrow(dinitial))

    def _segment_length(self, length: Any) -> int | None:
        """Return how many steps the backward pass runs at a time; None: all of them.

        With `recompute` a segment recomputes its gates, and neither these nor their
        cotangents ever exist for the whole sequence.
        """
        recomputes = self.cell.call.recompute and self.cell.saved
        # A symbolic length cannot be divided; it runs as one segment.
        if not recomputes or not isinstance(length, int) or length <= _SEGMENT:
            return None
        return near_divisor(length, _SEGMENT, factor=4)

    def _step_backward(self, dstates: States, xs: tuple) -> tuple:
        """Run one step back; also return cotangents for the products of all steps."""
        at, dh_out, (valid, reset) = xs
        cell = self.cell
        whole = dstates[0] + cell.widen(dh_out), *dstates[1:]
        cotangents, before = cell.step_backward(at, whole)
        dstates = keep_where(valid, _zero_where(reset, before), dstates)
        return dstates, cell.narrow(keep_where(valid, cotangents))

    def _at(self, primal: LayerPrimal) -> StepPrimal:
        """Return what each step of the forward pass started from and came to."""
        before = tuple(
            self._previous(states, first, primal.masks)
            for states, first in zip(primal.states, primal.initial, strict=True)
        )
        return StepPrimal(primal.gates, before, primal.states)

    def _previous(self, states: Array, first: Array, masks: StepMasks) -> Array:
        """Return the state that each step started from, given those after each step."""
        first = first.astype(states.dtype)[None]
        if self.reverse:
            prev = jnp.concatenate([states, first])[1:]
            if masks.valid is not None:  # each sequence starts at its own end
                beyond = jnp.zeros_like(masks.valid[:1])
                next_valid = jnp.concatenate([masks.valid, beyond])[1:]
                prev = jnp.where(next_valid, prev, first)
        else:
            prev = jnp.concatenate([first, states])[:-1]
        # The state of a sequence without steps counts for nothing, NaN neither.
        return _zero_where(masks.reset, keep_where(masks.valid, prev))

    def _with_gates(self, x: Array, at: StepPrimal) -> StepPrimal:
        """Return `at` with its gates, recomputed for all steps if not stored."""
        if at.gates is not None or not self.cell.saved:
            return at
        gx = self.cell.input_product(x)
        return at._replace(gates=self.cell.step(at.before, gx)[1])


_SEGMENT = 64
