"""The LSTM with multiplicative integration."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .._typing import Array
from .base import LSTMCell, add, lstm_unit, over, product, split_gates


class MILSTMParams(NamedTuple):
    """`w_ih [4H, I]`, `w_hh [4H, H]`; all others `[4H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    alpha: Any
    beta1: Any
    beta2: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class MILSTM(LSTMCell):
    """An `LSTM` whose input and recurrent products multiply as well as add.

        x = w_ih x_t + b_ih
        p = w_hh h_{t-1} + b_hh
        i, f, g, o = split(alpha * p * x + beta1 * p + beta2 * x + b)

    and on as in `LSTM`.

    Args:
        input_size: I.
        hidden_size: H.
        forget_bias: added to the forget gate in every step; no parameter.

    Parameters: `MILSTMParams`; alpha, beta1, beta2 begin as 1 and b as 0. States:
    `(h [B, H], c [B, H])`; output: `h`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size, or in use an argument's dtype or shape is wrong;
            the message names it.

    Holds under every JAX transformation.

    References:
        Wu et al. (2016), arXiv:1606.06630; biases and initial values: Caffe2.
    """

    constants = {"alpha": 1.0, "beta1": 1.0, "beta2": 1.0, "b": 0.0}

    def param_shapes(self) -> MILSTMParams:
        """Shapes of the parameters."""
        return mi_shapes(self)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step, on what `precompute` made."""
        h, c = self.unpack(states, len(inputs_t[0]), params)
        p = split_gates(add(product(h, params.w_hh), params.b_hh))
        own = (split_gates(v) for v in mi_vectors(params))
        gates = [integrate(*one) for one in zip(*own, p, inputs_t, strict=True)]
        h, c = lstm_unit(gates, c, self.forget_bias)
        return (h, c), h


def mi_shapes(cell: LSTMCell) -> MILSTMParams:
    """Shapes of the parameters of an LSTM with multiplicative integration."""
    rows = 4 * cell.hidden_size
    return MILSTMParams(
        (rows, cell.input_size), (rows, cell.hidden_size), *[(rows,)] * 6
    )


def mi_vectors(params: Any) -> tuple[Array, Array, Array, Array]:
    """What `integrate` takes before the products."""
    return params.alpha, params.beta1, params.beta2, params.b


def integrate(
    alpha: Array, beta1: Array, beta2: Array, b: Array, p: Array, x: Array
) -> Array:
    """`alpha * p * x + beta1 * p + beta2 * x + b`."""
    both = over(alpha, x) * p * x
    return add(both + over(beta1, x) * p + over(beta2, x) * x, b)
