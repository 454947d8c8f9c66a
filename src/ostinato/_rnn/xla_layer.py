"""One direction of one layer on XLA: products over all steps around one scan.

Arrays are time-major here. The product with the input is one product over all steps
before the scan, and the weight gradients are products over all steps after it; the scan
computes only the values that depend on the step before. This file handles lengths and
resets for all modes.
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
    """Masks of the steps, bool `[T, B, 1]`.

    Attributes:
        valid: False past the end of a sequence; None if every step is valid.
        reset: True where states become 0 before the step; None if they never do.
    """

    valid: Array | None
    reset: Array | None


class LayerPrimal(NamedTuple):
    """The values of the forward pass that tangent and backward read.

    Attributes:
        x: the layer's input, `[T, B, I]`.
        initial: the states before the first step.
        states: the states after every step, `[T, B, ...]`, the output first.
        gates: the blocks that every step saved; None with `recompute`, or if the cell
            saves no block.
        masks: the masks of the steps.
    """

    x: Array
    initial: States
    states: States
    gates: Any
    masks: StepMasks


class LayerOutput(NamedTuple):
    """The results of one direction.

    Attributes:
        h: its output at every step, `[T, B, S]`, 0 past the end of a sequence.
        final: the states after the last step.
        gates: the blocks that every step saved; None if they are not stored.
        states: the states except the output, after every step; () if not stored.
    """

    h: Array
    final: States
    gates: Array | None
    states: States


class LayerGradients(NamedTuple):
    """The gradients of one direction; None for those that were not asked for."""

    x: Array | None
    weights: LayerWeights | None
    initial: States


def keep_where(condition: Array | None, value: Any, other: Any = 0) -> Any:
    """Return `value` where `condition` holds or is None, and `other` elsewhere.

    `value` is an array or None, or a tuple of these; for a tuple, `other` is a tuple or
    0.
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
    """A cell, with the direction in which it runs over the steps."""

    cell: ModeCell
    reverse: bool

    def forward(self, x: Array, initial: States, masks: StepMasks) -> LayerOutput:
        """Run all steps; return their gates and states only if the call saves."""
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
        """Return the tangents of all outputs and of the final states.

        They are linear in `dweights`, `dx` and `dinitial`.
        """
        cell = self.cell
        at = self.with_gates(primal.x, self.step_primal(primal))

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
        """Return gradients from the cotangents of all outputs and the final states."""
        cell = self.cell

        def segment(carry: tuple, xs: tuple) -> tuple:
            dstates, dweights = carry
            x, at, dh_out, masks = xs
            at = self.with_gates(x, at)
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
        xs = primal.x, self.step_primal(primal), dh, primal.masks
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
        """Return how many steps the backward pass runs at a time; None means all.

        With `recompute`, every segment recomputes its gates, so that neither they nor
        their cotangents ever exist for all steps.
        """
        recomputes = self.cell.call.recompute and self.cell.saved
        # A symbolic length cannot be divided, so that it runs as one segment.
        if not recomputes or not isinstance(length, int) or length <= _SEGMENT:
            return None
        return near_divisor(length, _SEGMENT, factor=4)

    def _step_backward(self, dstates: States, xs: tuple) -> tuple:
        """Run one step backwards; return the carry, and cotangents for all products."""
        at, dh_out, (valid, reset) = xs
        cell = self.cell
        whole = dstates[0] + cell.widen(dh_out), *dstates[1:]
        cotangents, before = cell.step_backward(at, whole)
        dstates = keep_where(valid, _zero_where(reset, before), dstates)
        return dstates, cell.narrow(keep_where(valid, cotangents))

    def step_primal(self, primal: LayerPrimal) -> StepPrimal:
        """Return the gates of all steps with the states before and after each step."""
        before = tuple(
            self._previous(states, first, primal.masks)
            for states, first in zip(primal.states, primal.initial, strict=True)
        )
        return StepPrimal(primal.gates, before, primal.states)

    def _previous(self, states: Array, first: Array, masks: StepMasks) -> Array:
        """Return the state before each step, given the state after each step."""
        first = first.astype(states.dtype)[None]
        if self.reverse:
            prev = jnp.concatenate([states, first])[1:]
            if masks.valid is not None:  # a sequence starts at its own end
                beyond = jnp.zeros_like(masks.valid[:1])
                next_valid = jnp.concatenate([masks.valid, beyond])[1:]
                prev = jnp.where(next_valid, prev, first)
        else:
            prev = jnp.concatenate([first, states])[:-1]
        # The state past the end of a sequence must not count, even if it is NaN.
        return _zero_where(masks.reset, keep_where(masks.valid, prev))

    def with_gates(self, x: Array, at: StepPrimal) -> StepPrimal:
        """Return `at` with gates, recomputed for all steps if they are not stored."""
        if at.gates is not None or not self.cell.saved:
            return at
        gx = self.cell.input_product(x)
        return at._replace(gates=self.cell.step(at.before, gx)[1])


_SEGMENT = 64
