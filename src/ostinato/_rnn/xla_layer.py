"""One direction of one layer on XLA: products over all steps around one scan.

Arrays are time-major here. What depends on the input alone is one product over all
steps before the scan, weight gradients are one after it; in the scan stands only what
must wait for the step before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array
from . import pointwise
from .call import RNNCall, accumulation_dtype
from .layout import LayerWeights
from .spec import RNNSpec


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


class _StepPrimal(NamedTuple):
    """The same at one step, or at all."""

    gates: Any
    h_prev: Array
    h: Any
    c_prev: Any
    c: Any


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
    return None if value is None else keep_where(_not(condition), value)


def _not(condition: Array | None) -> Array | None:
    return None if condition is None else ~condition


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights of one direction of one layer, and what runs over its steps."""

    call: RNNCall
    weights: LayerWeights
    reverse: bool

    @property
    def spec(self) -> RNNSpec:
        return self.call.spec

    @property
    def dtype(self) -> Any:
        return self.weights.w_hh.dtype

    @property
    def wide(self) -> Any:
        return accumulation_dtype(self.dtype)

    def _widen(self, a: Any) -> Any:
        """In the accumulation dtype; None stays None."""
        return None if a is None else a.astype(self.wide)

    def _narrow(self, a: Any) -> Any:
        """In the dtype of the weights; None stays None."""
        return None if a is None else a.astype(self.dtype)

    # ---------------------------------------------------------------- products

    def dot(self, a: Array, w: Array, w_axis: int = 1) -> Array:
        """Contract the last axis of `a` with one of `w`, summed in the wide dtype."""
        return lax.dot_general(
            a.astype(self.dtype),
            w,
            (((a.ndim - 1,), (w_axis,)), ((), ())),
            precision=self.call.precision,
            preferred_element_type=self.wide,
        )

    def outer(self, a: Array, b: Array) -> Array:
        """`[T, B, m], [T, B, n] -> [m, n]`: a weight gradient, over all steps."""
        # Matrix libraries want one operand transposed, by a copy: let it be the small.
        swap = a.shape[-1] > b.shape[-1]
        first, second = (b, a) if swap else (a, b)
        product = lax.dot_general(
            first.astype(self.dtype),
            second.astype(self.dtype),
            (((0, 1), (0, 1)), ((), ())),
            precision=self.call.precision,
            preferred_element_type=self.wide,
        )
        return product.T if swap else product

    def _total(self, a: Array) -> Array:
        """`[T, B, n] -> [n]`: a bias gradient."""
        # A product with ones: XLA's own sum on CPU depends on the number of threads.
        ones = jnp.ones((*a.shape[:2], 1), a.dtype)
        total = lax.dot_general(
            ones,
            a,
            (((0, 1), (0, 1)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=self.wide,
        )
        return total[0]

    def _affine(self, a: Array, w: Array, b: Array | None) -> Array:
        return self._add_bias(self.dot(a, w), b)

    def _add_bias(self, a: Array, b: Array | None) -> Array:
        if b is None:
            return a
        return a + b.astype(self.wide).reshape((1,) * (a.ndim - 1) + (-1,))

    def _blocks(self, a: Array | None, start: int, stop: int, axis: int = 0) -> Any:
        """Gate blocks `start .. stop - 1` of rows or features; None stays None."""
        if a is None:
            return None
        hidden = self.spec.hidden_size
        return lax.slice_in_dim(a, start * hidden, stop * hidden, axis=axis)

    def input_product(self, x: Array) -> Array:
        """The gates' share of x without a bias, over all steps at once."""
        if self.weights.w_ih is None:  # input_mode "skip": x itself goes to every gate
            gates = (x.astype(self.wide),) * self.spec.num_gates
            return jnp.concatenate(gates, axis=-1)
        return self.dot(x, self.weights.w_ih)

    # ----------------------------------------------------------------- forward

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        """`(h, c, gates)` after one step, or of all steps at once if all are given.

        Given every step's previous state, the same lines recompute the gates of the
        whole sequence in one product.
        """
        w, h_wide = self.weights, h.astype(self.wide)
        gates = None
        # Here, not in the product over all steps: there it would be a pass of its own.
        gx = self._add_bias(gx, w.b_ih)
        if self.spec.mode == "lstm":
            pre = gx + self._affine(h, w.w_hh, w.b_hh)
            gates, c, h_new = pointwise.lstm(pre, c, self.spec)
            if w.w_hr is not None:
                h_new = self.dot(h_new, w.w_hr)
        elif self.spec.mode != "gru":
            h_new = pointwise.rnn(gx + self._affine(h, w.w_hh, w.b_hh), self.spec)
        elif self.spec.reset_after:
            gh = self._affine(h, w.w_hh, w.b_hh)
            gates, h_new = pointwise.gru_after(gx, gh, h_wide)
        else:
            gates, h_new = self._step_reset_before(h_wide, gx)
        return self._narrow(h_new), c, self._narrow(gates)

    def _step_reset_before(self, h: Array, gx: Array) -> tuple[Array, Array]:
        w, last = self.weights, gx.ndim - 1
        gh_rz = self._affine(h, self._blocks(w.w_hh, 0, 2), self._blocks(w.b_hh, 0, 2))
        r, z = pointwise.gru_before_gates(self._blocks(gx, 0, 2, last), gh_rz)
        gh_n = self._affine(
            r * h, self._blocks(w.w_hh, 2, 3), self._blocks(w.b_hh, 2, 3)
        )
        n, h_new = pointwise.gru_before(z, self._blocks(gx, 2, 3, last) + gh_n, h)
        return jnp.concatenate([r, z, n], axis=-1), h_new

    def forward(
        self, x: Array, h_0: Array, c_0: Array | None, steps: Steps
    ) -> LayerOutput:
        def body(carry: tuple, xs: tuple) -> tuple:
            gx, (valid, reset) = xs
            h, c = (_zero_where(reset, a) for a in carry)
            h_new, c_new, gates = self.step(h, c, gx)
            c_kept = None if c is None else keep_where(valid, c_new, c)
            cells = c_kept if self.call.save else None
            gates = gates if self.call.save and self.call.saves_gates else None
            carry = keep_where(valid, h_new, h), c_kept
            return carry, (keep_where(valid, h_new), gates, cells)

        c_wide = self._widen(c_0)
        (h_n, c_n), (h, gates, cells) = lax.scan(
            body,
            (h_0, c_wide),
            (self.input_product(x), steps),
            reverse=self.reverse,
        )
        c_n = self._narrow(c_n)
        return LayerOutput(h, h_n, c_n, gates, cells)

    def previous(self, states: Array, first: Array, steps: Steps) -> Array:
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
        return _zero_where(steps.reset, prev)

    def _gates(self, x: Array, h_prev: Array, c_prev: Any) -> Any:
        return self.step(h_prev, c_prev, self.input_product(x))[2]

    # ----------------------------------------------------------------- tangent

    def tangent(
        self,
        primal: LayerPrimal,
        dweights: LayerWeights | None,
        dx: Array | None,
        dh_0: Array,
        dc_0: Array | None,
    ) -> tuple[Array, Array, Array | None]:
        """`(dh, dh_n, dc_n)`: linear in `dweights, dx, dh_0, dc_0`."""
        steps, gates = primal.steps, primal.gates
        h_prev, c_prev = self._previous_states(primal)
        if gates is None and self.spec.mode in ("lstm", "gru"):
            gates = self._gates(primal.x, h_prev, c_prev)
        gates = self._widen(gates)
        dgx = self._input_tangent(primal.x, dx, dweights)
        dgh = self._recurrent_tangent(gates, h_prev, dweights)
        dhr = None
        if self.spec.proj_size and dweights is not None:
            u = pointwise.lstm_output(gates, primal.cells)
            dhr = self.dot(u, dweights.w_hr)

        def body(carry: tuple, xs: tuple) -> tuple:
            at, dgx, dgh, dhr, (valid, reset) = xs
            dh, dc = (_zero_where(reset, a) for a in carry)
            dh_new, dc_new = self._step_tangent(at, dgx, dgh, dhr, dh, dc)
            dc = None if dc is None else keep_where(valid, dc_new, dc)
            return (keep_where(valid, dh_new, dh), dc), keep_where(valid, dh_new)

        at = _StepPrimal(gates, h_prev, primal.h, c_prev, primal.cells)
        dc_wide = self._widen(dc_0)
        (dh_n, dc_n), dh = lax.scan(
            body,
            (dh_0.astype(self.wide), dc_wide),
            (at, dgx, dgh, dhr, steps),
            reverse=self.reverse,
        )
        dc_n = self._narrow(dc_n)
        return dh.astype(self.dtype), dh_n.astype(self.dtype), dc_n

    def _previous_states(self, primal: LayerPrimal) -> tuple[Array, Any]:
        h_prev = self.previous(primal.h, primal.h_0, primal.steps)
        if primal.cells is None:
            return h_prev, None
        return h_prev, self.previous(primal.cells, primal.c_0, primal.steps)

    def _input_tangent(
        self, x: Array, dx: Array | None, dweights: LayerWeights | None
    ) -> Array:
        rows = self.spec.num_gates * self.spec.hidden_size
        dgx = jnp.zeros((*x.shape[:2], rows), self.wide)
        if dx is not None:
            dgx = self.input_product(dx)
        if dweights is not None:
            if dweights.w_ih is not None:
                dgx = dgx + self.dot(x, dweights.w_ih)
            dgx = self._add_bias(dgx, dweights.b_ih)
        return dgx

    def _recurrent_tangent(
        self, gates: Array | None, h_prev: Array, dweights: LayerWeights | None
    ) -> Array | None:
        """What changed recurrent weights do to `gh`, over all steps at once."""
        if dweights is None:
            return None
        dgh = self.dot(h_prev, dweights.w_hh)
        if self.spec.mode == "gru" and not self.spec.reset_after:
            rh = self._blocks(gates, 0, 1, 2) * h_prev.astype(self.wide)
            dgh_n = self.dot(rh, self._blocks(dweights.w_hh, 2, 3))
            dgh = jnp.concatenate([self._blocks(dgh, 0, 2, 2), dgh_n], axis=-1)
        return self._add_bias(dgh, dweights.b_hh)

    def _step_tangent(
        self,
        at: _StepPrimal,
        dgx: Array,
        dgh: Array | None,
        dhr: Array | None,
        dh: Array,
        dc: Any,
    ) -> tuple[Array, Any]:
        w, spec = self.weights, self.spec
        h_prev = at.h_prev.astype(self.wide)
        dgh = jnp.zeros_like(dgx) if dgh is None else dgh
        if spec.mode == "gru" and not spec.reset_after:
            return self._step_tangent_reset_before(at.gates, h_prev, dgx + dgh, dh), dc
        dgh = dgh + self.dot(dh, w.w_hh)
        if spec.mode == "gru":
            return pointwise.gru_after_tangent(at.gates, h_prev, dgx, dgh, dh), dc
        if spec.mode != "lstm":
            slope = pointwise.rnn_slope(at.h.astype(self.wide), spec)
            return slope * (dgx + dgh), dc
        dc, du = pointwise.lstm_tangent(at.gates, at.c_prev, at.c, dgx + dgh, dc, spec)
        if w.w_hr is None:
            return du, dc
        dh = self.dot(du, w.w_hr)
        return (dh if dhr is None else dh + dhr), dc

    def _step_tangent_reset_before(
        self, gates: Array, h_prev: Array, dg: Array, dh: Array
    ) -> Array:
        w_hh = self.weights.w_hh
        drz = self._blocks(dg, 0, 2, 1) + self.dot(dh, self._blocks(w_hh, 0, 2))
        dr, dz = pointwise.gru_before_rz_tangent(gates, drz)
        drh = dr * h_prev + self._blocks(gates, 0, 1, 1) * dh
        dn = self._blocks(dg, 2, 3, 1) + self.dot(drh, self._blocks(w_hh, 2, 3))
        return pointwise.gru_before_tangent(gates, h_prev, dz, dn, dh)

    # ---------------------------------------------------------------- backward

    def backward(
        self,
        primal: LayerPrimal,
        dh: Array,
        dh_n: Array,
        dc_n: Array | None,
        need_x: bool,
        need_weights: bool,
    ) -> LayerGradients:
        """Gradients, given cotangents of every output `dh` and of the final state."""
        h_prev, c_prev = self._previous_states(primal)
        at = _StepPrimal(primal.gates, h_prev, primal.h, c_prev, primal.cells)
        if self.spec.mode in ("lstm", "gru"):
            at = at._replace(h=None)  # only a plain RNN's slope follows from h

        def segment(carry: tuple, xs: tuple) -> tuple:
            dh, dc, dweights = carry
            x, at, dh_out, steps = xs
            if at.gates is None and self.spec.mode in ("lstm", "gru"):
                at = at._replace(gates=self._gates(x, at.h_prev, at.c_prev))
            (dh, dc), (dgx, du, dout) = lax.scan(
                self._step_backward,
                (dh, dc),
                (at, dh_out, steps),
                reverse=not self.reverse,
            )
            if need_weights:
                new = self._weight_gradients(x, at, dgx, du, dout)
                dweights = jax.tree.map(jnp.add, dweights, new)
            return (dh, dc, dweights), self._input_gradient(dgx) if need_x else None

        dweights = None
        if need_weights:
            dweights = jax.tree.map(
                lambda a: jnp.zeros(a.shape, self.wide), self.weights
            )
        dc_wide = self._widen(dc_n)
        (dh_0, dc_0, dweights), dx = _in_segments(
            segment,
            (dh_n.astype(self.wide), dc_wide, dweights),
            (primal.x, at, dh, primal.steps),
            reverse=not self.reverse,
            split=self.call.recompute and self.spec.mode in ("lstm", "gru"),
        )
        if dweights is not None:
            dweights = jax.tree.map(lambda a: a.astype(self.dtype), dweights)
        dc_0 = self._narrow(dc_0)
        return LayerGradients(dx, dweights, dh_0.astype(self.dtype), dc_0)

    def _step_backward(self, carry: tuple, xs: tuple) -> tuple:
        """One step back: the carry, and `(dgx, du, dout)` for the products."""
        dh, dc = carry
        at, dh_out, (valid, reset) = xs
        w, spec = self.weights, self.spec
        dout = dh + dh_out.astype(self.wide)
        gates = self._widen(at.gates)
        h_prev = at.h_prev.astype(self.wide)
        du, dc_prev = None, None
        if spec.mode == "lstm":
            through = dout if w.w_hr is None else self.dot(dout, w.w_hr, 0)
            dgx, dc_prev = pointwise.lstm_backward(
                gates, at.c_prev, at.c, through, dc, spec
            )
            dh_prev = self.dot(dgx, w.w_hh, 0)
        elif spec.mode != "gru":
            dgx = dout * pointwise.rnn_slope(at.h.astype(self.wide), spec)
            dh_prev = self.dot(dgx, w.w_hh, 0)
        elif spec.reset_after:
            dgx, du, direct = pointwise.gru_after_backward(gates, h_prev, dout)
            dgh = jnp.concatenate([self._blocks(dgx, 0, 2, 1), du], axis=-1)
            dh_prev = direct + self.dot(dgh, w.w_hh, 0)
            du = keep_where(valid, du).astype(self.dtype)
        else:
            dgx, dh_prev = self._step_backward_reset_before(gates, h_prev, dout)
        carry = (
            keep_where(valid, _zero_where(reset, dh_prev), dh),
            None if dc is None else keep_where(valid, _zero_where(reset, dc_prev), dc),
        )
        dgx = keep_where(valid, dgx).astype(self.dtype)
        if w.w_hr is None:
            return carry, (dgx, du, None)
        return carry, (dgx, du, keep_where(valid, dout).astype(self.dtype))

    def _step_backward_reset_before(
        self, gates: Array, h_prev: Array, dh: Array
    ) -> tuple[Array, Array]:
        w_hh = self.weights.w_hh
        dz, dn = pointwise.gru_before_backward(gates, h_prev, dh)
        drh = self.dot(dn, self._blocks(w_hh, 2, 3), 0)
        dr, dh_prev = pointwise.gru_before_reset_backward(gates, h_prev, dh, drh)
        drz = jnp.concatenate([dr, dz], axis=-1)
        dh_prev = dh_prev + self.dot(drz, self._blocks(w_hh, 0, 2), 0)
        return jnp.concatenate([drz, dn], axis=-1), dh_prev

    def _input_gradient(self, dgx: Array) -> Array:
        if self.weights.w_ih is not None:
            return self.dot(dgx, self.weights.w_ih, 0)
        gates = jnp.split(dgx.astype(self.wide), self.spec.num_gates, axis=-1)
        return sum(gates[1:], gates[0])

    def _weight_gradients(
        self, x: Array, at: _StepPrimal, dgx: Array, du: Any, dout: Any
    ) -> LayerWeights:
        spec, w = self.spec, self.weights
        if spec.mode != "gru":
            parts = [(dgx, at.h_prev)]
        elif spec.reset_after:
            parts = [(self._blocks(dgx, 0, 2, 2), at.h_prev), (du, at.h_prev)]
        else:
            rh = self._blocks(at.gates, 0, 1, 2) * at.h_prev
            parts = [
                (self._blocks(dgx, 0, 2, 2), at.h_prev),
                (self._blocks(dgx, 2, 3, 2), rh),
            ]
        w_hr = None
        if w.w_hr is not None:
            u = pointwise.lstm_output(at.gates.astype(self.wide), at.c)
            w_hr = self.outer(dout, u)
        return LayerWeights(
            w_ih=None if w.w_ih is None else self.outer(dgx, x),
            w_hh=jnp.concatenate([self.outer(d, a) for d, a in parts]),
            b_ih=None if w.b_ih is None else self._total(dgx),
            b_hh=None
            if w.b_hh is None
            else jnp.concatenate([self._total(d) for d, _ in parts]),
            w_hr=w_hr,
        )


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
    rest = length % size
    blocks = jax.tree.map(lambda a: a[rest:].reshape(-1, size, *a.shape[1:]), xs)

    def run_blocks(carry: Any) -> tuple[Any, Any]:
        carry, ys = lax.scan(segment, carry, blocks, reverse=reverse)
        return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), ys)

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
