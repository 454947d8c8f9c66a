"""One step of each mode on XLA: its products around the equations of `pointwise`.

A cell runs one step at a time inside a loop over time; what all steps share (products
with the input, weight gradients) it runs for all steps at once. Arrays are `[B, ...]`
in the first case and `[T, B, ...]` in the second; the same methods often serve both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._typing import Array
from . import pointwise
from .call import RNNCall, accumulation_dtype
from .layout import LayerWeights
from .spec import RNNSpec


class StepPrimal(NamedTuple):
    """What the derivatives of a step read: of one step, or of all."""

    gates: Any  # None for a plain RNN
    h_prev: Array
    h: Array
    c_prev: Any  # of an LSTM
    c: Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """Weights of one direction of one layer, and the products with them.

    A mode adds `step`, and for its derivatives

    - `tangent_terms`: what is known for all steps before the loop, a tuple;
    - `step_tangent`: `(dh, dc)` after the step, from one step's terms;
    - `step_backward`: `(cotangents, dh_prev, dc_prev)`; the first of the cotangents is
      that of the input product;
    - `recurrent_parts`: pairs whose outer products, stacked, are the gradient of
      `w_hh`: a cotangent and what the weights multiplied.
    """

    call: RNNCall
    weights: LayerWeights

    @property
    def spec(self) -> RNNSpec:
        return self.call.spec

    @property
    def dtype(self) -> Any:
        return self.weights.w_hh.dtype

    @property
    def wide(self) -> Any:
        return accumulation_dtype(self.dtype)

    @property
    def precision(self) -> Any:
        # 16-bit factors have exact products in float32: nothing is left to choose, and
        # XLA on CPU knows no other way to multiply them.
        return self.call.precision if self.dtype == self.wide else None

    def widen(self, a: Any) -> Any:
        """In the accumulation dtype; None stays None."""
        return None if a is None else a.astype(self.wide)

    def narrow(self, a: Any) -> Any:
        """In the dtype of the weights; None stays None."""
        return None if a is None else a.astype(self.dtype)

    # ---------------------------------------------------------------- products

    def dot(self, a: Array, w: Array, w_axis: int = 1) -> Array:
        """Contract the last axis of `a` with one of `w`, summed in the wide dtype."""
        return lax.dot_general(
            self.narrow(a),
            w,
            (((a.ndim - 1,), (w_axis,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.wide,
        )

    def outer(self, a: Array, b: Array) -> Array:
        """`[T, B, m], [T, B, n] -> [m, n]`: a weight gradient, over all steps."""
        # Matrix libraries want one operand transposed, by a copy: let it be the small.
        # Not in 16 bits: there XLA on CPU makes of the .T a product that it cannot run.
        swap = a.shape[-1] > b.shape[-1] and self.dtype == self.wide
        first, second = (b, a) if swap else (a, b)
        product = _sum_over_steps(
            self.narrow(first), self.narrow(second), self.precision, self.wide
        )
        return product.T if swap else product

    def total(self, a: Array) -> Array:
        """`[T, B, n] -> [n]`: a bias gradient."""
        # A product with ones: XLA's own sum on CPU depends on the number of threads.
        ones = jnp.ones((*a.shape[:2], 1), self.wide)
        highest = lax.Precision.HIGHEST
        return _sum_over_steps(ones, self.widen(a), highest, self.wide)[0]

    def affine(self, a: Array, w: Array, b: Array | None) -> Array:
        return self.add_bias(self.dot(a, w), b)

    def add_bias(self, a: Array, b: Array | None) -> Array:
        if b is None:
            return a
        return a + self.widen(b).reshape((1,) * (a.ndim - 1) + (-1,))

    def blocks(self, a: Array | None, start: int, stop: int, axis: int = -1) -> Any:
        """Gate blocks `start .. stop - 1` along `axis`; None stays None."""
        if a is None:
            return None
        hidden = self.spec.hidden_size
        return lax.slice_in_dim(a, start * hidden, stop * hidden, axis=axis)

    # ------------------------------------------------- what all modes have in common

    def input_product(self, x: Array) -> Array:
        """`gx`: the gates' share of x without a bias, over all steps at once."""
        if self.weights.w_ih is None:  # input_mode "skip": x itself goes to every gate
            return jnp.concatenate((self.widen(x),) * self.spec.num_gates, axis=-1)
        return self.dot(x, self.weights.w_ih)

    def input_gradient(self, dgx: Array) -> Array:
        if self.weights.w_ih is not None:
            return self.dot(dgx, self.weights.w_ih, 0)
        first, *rest = jnp.split(self.widen(dgx), self.spec.num_gates, axis=-1)
        return sum(rest, first)

    def input_tangent(
        self, x: Array, dx: Array | None, dweights: LayerWeights | None
    ) -> Array:
        """Tangent of the input product with its bias."""
        rows = self.spec.num_gates * self.spec.hidden_size
        dgx = jnp.zeros((*x.shape[:2], rows), self.wide)
        if dx is not None:
            dgx = self.input_product(dx)
        if dweights is not None:
            if dweights.w_ih is not None:
                dgx = dgx + self.dot(x, dweights.w_ih)
            dgx = self.add_bias(dgx, dweights.b_ih)
        return dgx

    def recurrent_tangent(
        self, at: StepPrimal, dweights: LayerWeights | None, like: Array
    ) -> Array:
        """What changed recurrent weights do to the recurrent product, all steps."""
        if dweights is None:
            return jnp.zeros_like(like)
        return self.affine(at.h_prev, dweights.w_hh, dweights.b_hh)

    def weight_gradients(
        self, x: Array, at: StepPrimal, cotangents: tuple
    ) -> LayerWeights:
        """Of every weight, over all steps at once, in the wide dtype."""
        w, dgx = self.weights, cotangents[0]
        parts = self.recurrent_parts(at, cotangents)
        has_b_hh = w.b_hh is not None
        return LayerWeights(
            w_ih=None if w.w_ih is None else self.outer(dgx, x),
            w_hh=jnp.concatenate([self.outer(d, a) for d, a in parts]),
            b_ih=None if w.b_ih is None else self.total(dgx),
            b_hh=jnp.concatenate([self.total(d) for d, _ in parts])
            if has_b_hh
            else None,
            w_hr=None,
        )

    # ----------------------------------------------------------------- of each mode

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        """`(h, c, gates)` after one step, or of all steps at once if all are given.

        Given every step's previous state, the same lines recompute the gates of the
        whole sequence in one product. The input's bias is added here: in the product
        over all steps it would be a pass of its own.
        """
        raise NotImplementedError

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        dgx = self.input_tangent(x, dx, dweights)
        return (dgx + self.recurrent_tangent(at, dweights, dgx),)

    def step_tangent(
        self, at: StepPrimal, terms: tuple, dh: Array, dc: Any
    ) -> tuple[Array, Any]:
        raise NotImplementedError

    def step_backward(
        self, at: StepPrimal, dh: Array, dc: Any
    ) -> tuple[tuple, Array, Any]:
        raise NotImplementedError

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        return [(cotangents[0], at.h_prev)]


def _sum_over_steps(a: Array, b: Array, precision: Any, dtype: Any) -> Array:
    return lax.dot_general(
        a,
        b,
        (((0, 1), (0, 1)), ((), ())),
        precision=precision,
        preferred_element_type=dtype,
    )


class PlainRNN(Cell):
    """Modes `rnn_relu` and `rnn_tanh`."""

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        w = self.weights
        pre = self.add_bias(gx, w.b_ih) + self.affine(h, w.w_hh, w.b_hh)
        return self.narrow(pointwise.rnn(pre, self.spec)), c, None

    def _slope(self, at: StepPrimal) -> Array:
        return pointwise.rnn_slope(self.widen(at.h), self.spec)

    def step_tangent(
        self, at: StepPrimal, terms: tuple, dh: Array, dc: Any
    ) -> tuple[Array, Any]:
        (dg,) = terms
        return self._slope(at) * (dg + self.dot(dh, self.weights.w_hh)), dc

    def step_backward(
        self, at: StepPrimal, dh: Array, dc: Any
    ) -> tuple[tuple, Array, Any]:
        dg = dh * self._slope(at)
        return (dg,), self.dot(dg, self.weights.w_hh, 0), dc


class LSTM(Cell):
    """Mode `lstm`, with or without a projection."""

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        w = self.weights
        pre = self.add_bias(gx, w.b_ih) + self.affine(h, w.w_hh, w.b_hh)
        gates, c, u = pointwise.lstm(pre, c, self.spec)
        h = u if w.w_hr is None else self.dot(u, w.w_hr)
        return self.narrow(h), c, self.narrow(gates)

    def _unprojected(self, at: StepPrimal) -> Array:
        return pointwise.lstm_output(self.widen(at.gates), at.c)

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        terms = super().tangent_terms(x, dx, at, dweights)
        if dweights is None or dweights.w_hr is None:
            return (*terms, None)
        return (*terms, self.dot(self._unprojected(at), dweights.w_hr))

    def step_tangent(
        self, at: StepPrimal, terms: tuple, dh: Array, dc: Any
    ) -> tuple[Array, Any]:
        w, (dg, dr) = self.weights, terms
        dg = dg + self.dot(dh, w.w_hh)
        gates = self.widen(at.gates)
        dc, du = pointwise.lstm_tangent(gates, at.c_prev, at.c, dg, dc, self.spec)
        if w.w_hr is None:
            return du, dc
        dh = self.dot(du, w.w_hr)
        return (dh if dr is None else dh + dr), dc

    def step_backward(
        self, at: StepPrimal, dh: Array, dc: Any
    ) -> tuple[tuple, Array, Any]:
        w, gates = self.weights, self.widen(at.gates)
        du = dh if w.w_hr is None else self.dot(dh, w.w_hr, 0)
        dg, dc = pointwise.lstm_backward(gates, at.c_prev, at.c, du, dc, self.spec)
        cotangents = (dg, None if w.w_hr is None else dh)
        return cotangents, self.dot(dg, w.w_hh, 0), dc

    def weight_gradients(
        self, x: Array, at: StepPrimal, cotangents: tuple
    ) -> LayerWeights:
        gradients = super().weight_gradients(x, at, cotangents)
        if self.weights.w_hr is None:
            return gradients
        return gradients._replace(w_hr=self.outer(cotangents[1], self._unprojected(at)))


class GRUResetAfter(Cell):
    """Mode `gru` as cuDNN has it: `r` scales the recurrent product."""

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        w = self.weights
        gx, gh = self.add_bias(gx, w.b_ih), self.affine(h, w.w_hh, w.b_hh)
        gates, h = pointwise.gru_after(gx, gh, self.widen(h))
        return self.narrow(h), c, self.narrow(gates)

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        dgx = self.input_tangent(x, dx, dweights)
        return dgx, self.recurrent_tangent(at, dweights, dgx)

    def step_tangent(
        self, at: StepPrimal, terms: tuple, dh: Array, dc: Any
    ) -> tuple[Array, Any]:
        dgx, dgh = terms
        dgh = dgh + self.dot(dh, self.weights.w_hh)
        gates, h_prev = self.widen(at.gates), self.widen(at.h_prev)
        return pointwise.gru_after_tangent(gates, h_prev, dgx, dgh, dh), dc

    def step_backward(
        self, at: StepPrimal, dh: Array, dc: Any
    ) -> tuple[tuple, Array, Any]:
        gates, h_prev = self.widen(at.gates), self.widen(at.h_prev)
        dgx, du, direct = pointwise.gru_after_backward(gates, h_prev, dh)
        dgh = jnp.concatenate([self.blocks(dgx, 0, 2), du], axis=-1)
        return (dgx, du), direct + self.dot(dgh, self.weights.w_hh, 0), dc

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        dgx, du = cotangents
        return [(self.blocks(dgx, 0, 2), at.h_prev), (du, at.h_prev)]


class GRUResetBefore(Cell):
    """Mode `gru` with `reset_after=False`: `r` scales the state before the product."""

    def _rows(self, a: Array | None) -> tuple[Any, Any]:
        """Rows of `r` and `z`, and those of `n`, of a recurrent weight or bias."""
        return self.blocks(a, 0, 2, axis=0), self.blocks(a, 2, 3, axis=0)

    def _reset(self, at: StepPrimal) -> Array:
        """What the candidate's weights multiply: `r h_prev`."""
        return self.widen(self.blocks(at.gates, 0, 1)) * self.widen(at.h_prev)

    def step(self, h: Array, c: Any, gx: Array) -> tuple[Array, Any, Any]:
        w, h = self.weights, self.widen(h)
        (w_rz, w_n), (b_rz, b_n) = self._rows(w.w_hh), self._rows(w.b_hh)
        gx = self.add_bias(gx, w.b_ih)
        gh_rz = self.affine(h, w_rz, b_rz)
        r, z = pointwise.gru_before_gates(self.blocks(gx, 0, 2), gh_rz)
        n_pre = self.blocks(gx, 2, 3) + self.affine(r * h, w_n, b_n)
        n, h = pointwise.gru_before(z, n_pre, h)
        return self.narrow(h), c, self.narrow(jnp.concatenate([r, z, n], axis=-1))

    def recurrent_tangent(
        self, at: StepPrimal, dweights: LayerWeights | None, like: Array
    ) -> Array:
        if dweights is None:
            return jnp.zeros_like(like)
        dw_rz, dw_n = self._rows(dweights.w_hh)
        parts = [self.dot(at.h_prev, dw_rz), self.dot(self._reset(at), dw_n)]
        return self.add_bias(jnp.concatenate(parts, axis=-1), dweights.b_hh)

    def step_tangent(
        self, at: StepPrimal, terms: tuple, dh: Array, dc: Any
    ) -> tuple[Array, Any]:
        (dg,), gates, h_prev = terms, self.widen(at.gates), self.widen(at.h_prev)
        w_rz, w_n = self._rows(self.weights.w_hh)
        drz = self.blocks(dg, 0, 2) + self.dot(dh, w_rz)
        dr, dz = pointwise.gru_before_rz_tangent(gates, drz)
        drh = dr * h_prev + self.blocks(gates, 0, 1) * dh
        dn_pre = self.blocks(dg, 2, 3) + self.dot(drh, w_n)
        return pointwise.gru_before_tangent(gates, h_prev, dz, dn_pre, dh), dc

    def step_backward(
        self, at: StepPrimal, dh: Array, dc: Any
    ) -> tuple[tuple, Array, Any]:
        gates, h_prev = self.widen(at.gates), self.widen(at.h_prev)
        w_rz, w_n = self._rows(self.weights.w_hh)
        dz, dn = pointwise.gru_before_backward(gates, h_prev, dh)
        drh = self.dot(dn, w_n, 0)
        dr, direct = pointwise.gru_before_reset_backward(gates, h_prev, dh, drh)
        drz = jnp.concatenate([dr, dz], axis=-1)
        dg = jnp.concatenate([drz, dn], axis=-1)
        return (dg,), direct + self.dot(drz, w_rz, 0), dc

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        (dg,) = cotangents
        return [
            (self.blocks(dg, 0, 2), at.h_prev),
            (self.blocks(dg, 2, 3), self._reset(at)),
        ]


def make_cell(call: RNNCall, weights: LayerWeights) -> Cell:
    """The cell of the call's mode."""
    if call.spec.mode == "lstm":
        return LSTM(call, weights)
    if call.spec.mode == "gru":
        kind = GRUResetAfter if call.spec.reset_after else GRUResetBefore
        return kind(call, weights)
    return PlainRNN(call, weights)
