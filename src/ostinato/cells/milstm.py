"""The LSTM with multiplicative integration."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .._typing import Array
from .base import LSTMCell, add, broadcast, lstm_unit, product, split_gates


class MILSTMParams(NamedTuple):
    """Parameters `w_ih [4H, I]` and `w_hh [4H, H]`; all others are `[4H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    alpha: Any
    beta1: Any
    beta2: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class MILSTM(LSTMCell[MILSTMParams]):
    """An `LSTM` whose input and recurrent products multiply as well as add.

        x = w_ih x_t + b_ih
        p = w_hh h_{t-1} + b_hh
        i, f, g, o = split(alpha * p * x + beta1 * p + beta2 * x + b)

    and the rest as in `LSTM`.

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: a constant, added to the forget gate in every step.

    Parameters: `MILSTMParams`; alpha, beta1, beta2 begin as 1 and b as 0. States:
    `(h [B, H], c [B, H])`; output: `h`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Wu et al. (2016), arXiv:1606.06630; biases and initial values: Caffe2.
    """

    constants = {"alpha": 1.0, "beta1": 1.0, "beta2": 1.0, "b": 0.0}

    def param_shapes(self) -> MILSTMParams:
        """Return the shapes of the parameters."""
        return mi_shapes(self)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        h, c = self.unpack(states, inputs_t[0].shape[0], params)
        p = split_gates(add(product(h, params.w_hh), params.b_hh))
        own = (split_gates(v) for v in mi_vectors(params))
        gates = [integrate(*one) for one in zip(*own, p, inputs_t, strict=True)]
        h, c = lstm_unit(gates, c, self.forget_bias)
        return (h, c), h


def mi_shapes(cell: LSTMCell) -> MILSTMParams:
    """Return the shapes of parameters of an LSTM with multiplicative integration."""
    rows = 4 * cell.hidden_size
    return MILSTMParams(
        (rows, cell.input_size), (rows, cell.hidden_size), *[(rows,)] * 6
    )


def mi_vectors(params: Any) -> tuple[Array, Array, Array, Array]:
    """Return the first four arguments of `integrate`."""
    return params.alpha, params.beta1, params.beta2, params.b


def integrate(
    alpha: Array, beta1: Array, beta2: Array, b: Array, p: Array, x: Array
) -> Array:
    """Return `alpha * p * x + beta1 * p + beta2 * x + b`."""
    both = broadcast(alpha, x) * p * x
    return add(both + broadcast(beta1, x) * p + broadcast(beta2, x) * x, b)
