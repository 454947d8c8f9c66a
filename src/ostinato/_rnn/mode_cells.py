"""The cells of all modes on XLA: products around the equations of pointwise.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._typing import Array
from . import pointwise
from .cell import LayerWeights, ModeCell, States, StepPrimal
from .pointwise import SLSTMGates


class PlainRNN(ModeCell):
    """The cell of modes `rnn_relu` and `rnn_tanh`, whose slope follows from `h`."""

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        w, (h,) = self.weights, states
        pre = self.add_bias(gx, w.b_ih) + self.recurrent_product(h, w.w_hh, w.b_hh)
        return (self.narrow(pointwise.rnn(pre, self.spec)),), None

    def _slope(self, at: StepPrimal) -> Array:
        return pointwise.rnn_slope(self.widen(at.after[0]), self.spec)

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        (dg,), (dh,) = terms, dstates
        return (self._slope(at) * (dg + self.recurrent_product(dh, self.weights.w_hh)),)

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        dg = dstates[0] * self._slope(at)
        return (dg,), (self.recurrent_gradient(dg, self.weights.w_hh),)


class ProjectedCell(ModeCell):
    """A cell whose output may be a projection, `h = w_hr @ u`.

    A subclass defines `unprojected`, and passes every `u`, and the tangents and
    cotangents of `h`, through the methods of this class.
    """

    def unprojected(self, at: StepPrimal) -> Array:
        """Return `u` from the values that the forward pass saved."""
        raise NotImplementedError

    def project(self, u: Array) -> Array:
        """Return `h`, or its tangent from that of `u`."""
        w = self.weights.w_hr
        return u if w is None else self.heads_dot(u, w, self.spec.proj_size)

    def unproject(self, dh: Array) -> Array:
        """Return the cotangent of `u` from that of `h`."""
        w = self.weights.w_hr
        return dh if w is None else self.heads_dot_transposed(dh, w, w.shape[0])

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        """Return the base class's terms, and the tangent of `h` by that of `w_hr`."""
        terms = super().tangent_terms(x, dx, at, dweights)
        if dweights is None or dweights.w_hr is None:
            return (*terms, None)
        size = self.spec.proj_size
        return (*terms, self.heads_dot(self.unprojected(at), dweights.w_hr, size))

    def weight_gradients(
        self, x: Array, at: StepPrimal, cotangents: tuple
    ) -> LayerWeights:
        """Return all gradients; the second cotangent is that of `h`, if projected."""
        gradients = super().weight_gradients(x, at, cotangents)
        if self.weights.w_hr is None:
            return gradients
        u, size = self.unprojected(at), self.spec.proj_size
        return gradients._replace(w_hr=self.heads_outer(cotangents[1], u, size))


class LSTM(ProjectedCell):
    """The cell of mode `lstm`, with or without a projection."""

    saved = ("i", "f", "g", "o")

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        w, (h, c) = self.weights, states
        pre = self.add_bias(gx, w.b_ih) + self.recurrent_product(h, w.w_hh, w.b_hh)
        gates, c, u = pointwise.lstm(pre, c, self.spec)
        return (self.narrow(self.project(u)), c), self.narrow(gates)

    def unprojected(self, at: StepPrimal) -> Array:
        return pointwise.lstm_output(self.widen(at.gates), at.after[1])

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        (dg, dr), (dh, dc) = terms, dstates
        (_, c_prev), (_, c) = at.before, at.after
        dg = dg + self.recurrent_product(dh, self.weights.w_hh)
        gates = self.widen(at.gates)
        dc, du = pointwise.lstm_tangent(gates, c_prev, c, dg, dc, self.spec)
        dh = self.project(du)
        return (dh if dr is None else dh + dr), dc

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        w, gates, (dh, dc) = self.weights, self.widen(at.gates), dstates
        (_, c_prev), (_, c) = at.before, at.after
        du = self.unproject(dh)
        dg, dc = pointwise.lstm_backward(gates, c_prev, c, du, dc, self.spec)
        cotangents = (dg, None if w.w_hr is None else dh)
        return cotangents, (self.recurrent_gradient(dg, w.w_hh), dc)


class SLSTM(ProjectedCell):
    """The cell of mode `slstm`, with or without a projection."""

    saved = SLSTMGates._fields

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        w, (h, *cells) = self.weights, states
        pre = self.add_bias(gx, w.b_ih) + self.recurrent_product(h, w.w_hh, w.b_hh)
        gates, cells, u = pointwise.slstm(pre, cells)
        return (self.narrow(self.project(u)), *cells), self.narrow(gates)

    def unprojected(self, at: StepPrimal) -> Array:
        return pointwise.slstm_output(self.widen(at.gates), at.after[1:])

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        (dg, dr), (dh, *dcells) = terms, dstates
        dg = dg + self.recurrent_product(dh, self.weights.w_hh)
        gates = self.widen(at.gates)
        dcells, du = pointwise.slstm_tangent(
            gates, at.before[1:], at.after[1:], dg, dcells
        )
        dh = self.project(du)
        return (dh if dr is None else dh + dr, *dcells)

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        w, (dh, *dcells) = self.weights, dstates
        gates, du = self.widen(at.gates), self.unproject(dh)
        dg, dcells = pointwise.slstm_backward(
            gates, at.before[1:], at.after[1:], du, dcells
        )
        cotangents = (dg, None if w.w_hr is None else dh)
        return cotangents, (self.recurrent_gradient(dg, w.w_hh), *dcells)


class GRUResetAfter(ModeCell):
    """The cell of mode `gru` as in cuDNN: `r` scales the product `h_candidate`."""

    saved = ("r", "z", "n", "h_candidate")

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        w, (h,) = self.weights, states
        gx, gh = self.add_bias(gx, w.b_ih), self.recurrent_product(h, w.w_hh, w.b_hh)
        gates, h = pointwise.gru_after(gx, gh, self.widen(h))
        return (self.narrow(h),), self.narrow(gates)

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        dgx = self.input_tangent(x, dx, dweights)
        return dgx, self.recurrent_tangent(at, dweights, dgx)

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        (dgx, dgh), (dh,) = terms, dstates
        dgh = dgh + self.recurrent_product(dh, self.weights.w_hh)
        gates, h_prev = self.widen(at.gates), self.widen(at.before[0])
        return (pointwise.gru_after_tangent(gates, h_prev, dgx, dgh, dh),)

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        gates, h_prev = self.widen(at.gates), self.widen(at.before[0])
        dgx, dh_candidate, direct = pointwise.gru_after_backward(
            gates, h_prev, dstates[0]
        )
        dgh = jnp.concatenate([self.blocks(dgx, 0, 2), dh_candidate], axis=-1)
        return (dgx, dh_candidate), (
            direct + self.recurrent_gradient(dgh, self.weights.w_hh),
        )

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        (dgx, dh_candidate), (h_prev,) = cotangents, at.before
        return [(self.blocks(dgx, 0, 2), h_prev), (dh_candidate, h_prev)]


class GRUResetBefore(ModeCell):
    """The cell of mode `gru` with `reset_after=False`: `r` scales the state `h`."""

    saved = ("r", "z", "n")

    def _split_rows(self, a: Array | None) -> tuple[Any, Any]:
        """Return the rows of `r z`, and those of `n`, of a recurrent weight or bias."""
        return self.blocks(a, 0, 2, axis=0), self.blocks(a, 2, 3, axis=0)

    def _reset_state(self, at: StepPrimal) -> Array:
        """Return `r h_prev`, which the weights of the candidate multiply."""
        return self.widen(self.blocks(at.gates, 0, 1)) * self.widen(at.before[0])

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        w, h = self.weights, self.widen(states[0])
        (w_rz, w_n), (b_rz, b_n) = self._split_rows(w.w_hh), self._split_rows(w.b_hh)
        gx = self.add_bias(gx, w.b_ih)
        gh_rz = self.recurrent_product(h, w_rz, b_rz)
        r, z = pointwise.gru_before_gates(self.blocks(gx, 0, 2), gh_rz)
        n_pre = self.blocks(gx, 2, 3) + self.recurrent_product(r * h, w_n, b_n)
        n, h = pointwise.gru_before(z, n_pre, h)
        return (self.narrow(h),), self.narrow(jnp.concatenate([r, z, n], axis=-1))

    def recurrent_tangent(
        self, at: StepPrimal, dweights: LayerWeights | None, like: Array
    ) -> Array:
        if dweights is None:
            return jnp.zeros_like(like)
        dw_rz, dw_n = self._split_rows(dweights.w_hh)
        parts = [
            self.recurrent_product(at.before[0], dw_rz),
            self.recurrent_product(self._reset_state(at), dw_n),
        ]
        return self.add_bias(jnp.concatenate(parts, axis=-1), dweights.b_hh)

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        (dg,), (dh,) = terms, dstates
        gates, h_prev = self.widen(at.gates), self.widen(at.before[0])
        w_rz, w_n = self._split_rows(self.weights.w_hh)
        drz = self.blocks(dg, 0, 2) + self.recurrent_product(dh, w_rz)
        dr, dz = pointwise.gru_before_rz_tangent(gates, drz)
        drh = dr * h_prev + self.blocks(gates, 0, 1) * dh
        dn_pre = self.blocks(dg, 2, 3) + self.recurrent_product(drh, w_n)
        return (pointwise.gru_before_tangent(gates, h_prev, dz, dn_pre, dh),)

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        (dh,), gates = dstates, self.widen(at.gates)
        h_prev = self.widen(at.before[0])
        w_rz, w_n = self._split_rows(self.weights.w_hh)
        dz, dn = pointwise.gru_before_backward(gates, h_prev, dh)
        drh = self.recurrent_gradient(dn, w_n)
        dr, direct = pointwise.gru_before_reset_backward(gates, h_prev, dh, drh)
        drz = jnp.concatenate([dr, dz], axis=-1)
        dg = jnp.concatenate([drz, dn], axis=-1)
        return (dg,), (direct + self.recurrent_gradient(drz, w_rz),)

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        (dg,) = cotangents
        return [
            (self.blocks(dg, 0, 2), at.before[0]),
            (self.blocks(dg, 2, 3), self._reset_state(at)),
        ]
