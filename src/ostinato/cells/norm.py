"""Cells with layer normalisation of the preactivations of their gates."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import _checks
from .._typing import Array
from .base import (
    GatedCell,
    LSTMCell,
    Params,
    add,
    broadcast,
    lstm_unit,
    product,
    set_field,
    split_gates,
)
from .basic import gru_unit
from .milstm import integrate, mi_shapes, mi_vectors


class LayerNormParams(NamedTuple):
    """Parameters `w_ih [G*H, I]` and `w_hh [G*H, H]`; all others are `[G*H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    scale: Any
    offset: Any


class LayerNormMILSTMParams(NamedTuple):
    """Parameters `w_ih [4H, I]` and `w_hh [4H, H]`; all others are `[4H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    alpha: Any
    beta1: Any
    beta2: Any
    b: Any
    scale: Any
    offset: Any


def layer_norm(a: Array, scale: Array, offset: Array, epsilon: float) -> Array:
    """Return `scale * (a - mean) / sqrt(var + epsilon) + offset` over the last axis."""
    centred = a - jnp.mean(a, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return add(centred * lax.rsqrt(variance + epsilon) * broadcast(scale, a), offset)


@dataclasses.dataclass(frozen=True)
class _NormLSTM(LSTMCell[Params]):
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_epsilon(self)

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """Return the products of all gates in one array, since they share one norm."""
        return GatedCell.input_product(self, params, inputs, first)

    def _normalised_unit(self, params: Any, states: Any, pre: Array) -> Any:
        pre = layer_norm(pre, params.scale, params.offset, self.epsilon)
        h, c = lstm_unit(split_gates(pre), states[1], self.forget_bias)
        return (h, c), h


@dataclasses.dataclass(frozen=True)
class LayerNormLSTM(_NormLSTM[LayerNormParams]):
    """An `LSTM` whose gates are normalised together, over all 4H of them.

        i, f, g, o = split(norm(w_ih x_t + b_ih + w_hh h_{t-1} + b_hh))
        norm(a) = scale * (a - mean(a)) / sqrt(var(a) + epsilon) + offset

    and the rest as in `LSTM`.

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: a constant, added to the forget gate in every step, after the norm.
        epsilon: a small number above 0, added to the variance.

    Parameters: `LayerNormParams`; scale begins as 1 and offset as 0. States: `(h [B,
    H], c [B, H])`; output: `h`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Ba, Kiros and Hinton (2016), arXiv:1607.06450. The norm is that of the sum of
        both products, as in Caffe2; the paper normalises each product and c separately.
    """

    constants = {"scale": 1.0, "offset": 0.0}

    def param_shapes(self) -> LayerNormParams:
        """Return the shapes of the parameters."""
        return _layer_norm_shapes(self, 4)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        states = self.unpack(states, inputs_t.shape[0], params)
        pre = inputs_t + add(product(states[0], params.w_hh), params.b_hh)
        return self._normalised_unit(params, states, pre)


@dataclasses.dataclass(frozen=True)
class LayerNormMILSTM(_NormLSTM[LayerNormMILSTMParams]):
    """An `MILSTM` whose integrated gates are normalised as in `LayerNormLSTM`.

        i, f, g, o = split(norm(alpha * p * x + beta1 * p + beta2 * x + b))

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: a constant, added to the forget gate in every step, after the norm.
        epsilon: a small number above 0, added to the variance.

    Parameters: `LayerNormMILSTMParams`. States: `(h [B, H], c [B, H])`; output: `h`.
    Recompute names: `gates`.

    Raises:
        TypeError, ValueError: as for `LayerNormLSTM`.

    Holds under every JAX transformation.

    References:
        Wu et al. (2016), arXiv:1606.06630; Ba et al. (2016), arXiv:1607.06450; combined
        as in Caffe2.
    """

    constants = {
        "alpha": 1.0,
        "beta1": 1.0,
        "beta2": 1.0,
        "b": 0.0,
        "scale": 1.0,
        "offset": 0.0,
    }

    def param_shapes(self) -> LayerNormMILSTMParams:
        """Return the shapes of the parameters."""
        rows = (4 * self.hidden_size,)
        return LayerNormMILSTMParams(*mi_shapes(self), scale=rows, offset=rows)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        states = self.unpack(states, inputs_t.shape[0], params)
        p = add(product(states[0], params.w_hh), params.b_hh)
        pre = integrate(*mi_vectors(params), p, inputs_t)
        return self._normalised_unit(params, states, pre)


@dataclasses.dataclass(frozen=True)
class LayerNormGRU(GatedCell[LayerNormParams]):
    """A `GRU` (reset after the product) with normalised gates and candidate.

        r, z = split(sigmoid(norm(w_irz x_t + b_irz + w_hrz h_{t-1} + b_hrz)))
        n = tanh(norm(w_in x_t + b_in + r * (w_hn h_{t-1} + b_hn)))
        h_t = (1 - z) * n + z * h_{t-1}

    The first norm runs over 2H values and takes the first 2H of scale and offset, the
    second over H and takes the rest; see `LayerNormLSTM`.

    Args:
        input_size: I.
        hidden_size: H.
        epsilon: a small number above 0, added to the variance.

    Parameters: `LayerNormParams`. State and output: `h [B, H]`. Recompute names:
    `gates`.

    Raises:
        TypeError, ValueError: as for `LayerNormLSTM`.

    Holds under every JAX transformation.

    References:
        Ba, Kiros and Hinton (2016), arXiv:1607.06450, who normalise each product
        separately; Cho et al. (2014), arXiv:1406.1078
    """

    epsilon: float = 1e-4

    constants = {"scale": 1.0, "offset": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_epsilon(self)

    def param_shapes(self) -> LayerNormParams:
        """Return the shapes of the parameters."""
        return _layer_norm_shapes(self, 3)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        return self.step_seeing(params, states, states, inputs_t, t)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Array, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in products; `z` keeps `h` itself."""
        (h,) = self.unpack(states, inputs_t.shape[0], params)

        def norm(rows: slice) -> Any:
            scale, offset = params.scale[rows], params.offset[rows]
            return lambda a: layer_norm(a, scale, offset, self.epsilon)

        split = 2 * self.hidden_size
        out = gru_unit(
            params,
            h,
            seen,
            inputs_t,
            True,
            norm(slice(split)),
            norm(slice(split, None)),
        ).astype(h.dtype)
        return out, out


def _layer_norm_shapes(cell: GatedCell, gates: int) -> LayerNormParams:
    rows = gates * cell.hidden_size
    return LayerNormParams(
        (rows, cell.input_size), (rows, cell.hidden_size), *[(rows,)] * 4
    )


def _check_epsilon(cell: Any) -> None:
    set_field(cell, "epsilon", _checks.check_finite("epsilon", cell.epsilon))
    if cell.epsilon <= 0:
        raise ValueError(f"`epsilon` must be above 0, got {cell.epsilon}")
