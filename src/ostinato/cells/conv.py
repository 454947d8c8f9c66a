"""The LSTM over images or other grids."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import _checks
from .._rnn.accumulation import widen
from .._typing import Array
from .base import (
    SizedCell,
    add,
    check_inputs,
    check_params,
    draw,
    lstm_unit,
    set_field,
    split_gates,
)


class ConvLSTMParams(NamedTuple):
    """Parameters `w_ih [4H, I, *kernel]`, `w_hh [4H, H, *kernel]`, biases `[4H]`."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any


@dataclasses.dataclass(frozen=True)
class ConvLSTM(SizedCell):
    """An `LSTM` whose products are convolutions over a grid.

        i, f, g, o = split(w_ih * x_t + b_ih + w_hh * h_{t-1} + b_hh)

    and the rest as in `LSTM`, at every point of the grid. Convolutions
    (cross-correlations, as everywhere in deep learning) keep the size of the grid:
    values outside it count as 0. With an even kernel, the far edge has one more of
    them.

    Args:
        input_size: I, channels of the input.
        hidden_size: H, channels of the states.
        grid: one to three sizes of the grid, for example `(height, width)`.
        kernel: the size of the kernel along each axis of the grid.
        forget_bias: a constant, added to the forget gate in every step.

    Inputs: `[B, *grid, I]` at each step. Parameters: `ConvLSTMParams`. States:
    `(h, c)`, each `[B, *grid, H]`; output: `h`. Recompute names: `gates`.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Shi et al. (2015), arXiv:1506.04214, without its peepholes, as in Keras.
    """

    input_size: int
    hidden_size: int
    grid: tuple[int, ...]
    kernel: tuple[int, ...]
    forget_bias: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size"):
            set_field(self, name, _checks.check_size(name, getattr(self, name)))
        for name in ("grid", "kernel"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise TypeError(
                    f"`{name}` must be a tuple of sizes, got {_checks.describe(value)}"
                )
            sizes = tuple(_checks.check_size(name, size) for size in value)
            set_field(self, name, sizes)
        if len(self.grid) not in (1, 2, 3) or len(self.kernel) != len(self.grid):
            raise ValueError(
                "`grid` and `kernel` must have the same 1, 2 or 3 axes, got "
                f"grid={self.grid}, kernel={self.kernel}"
            )
        set_field(
            self, "forget_bias", _checks.check_finite("forget_bias", self.forget_bias)
        )

    @property
    def output_size(self) -> int:
        """Channels H of the output."""
        return self.hidden_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts."""
        return ("gates",)

    def param_shapes(self) -> ConvLSTMParams:
        """Return the shapes of the parameters."""
        rows = 4 * self.hidden_size
        return ConvLSTMParams(
            (rows, self.input_size, *self.kernel),
            (rows, self.hidden_size, *self.kernel),
            (rows,),
            (rows,),
        )

    def init(self, key: Array, dtype: Any = jnp.float32) -> ConvLSTMParams:
        """Draw parameters from U(-k, k), k = (hidden_size * kernel points) ** -0.5."""
        bound = (self.hidden_size * math.prod(self.kernel)) ** -0.5
        return draw(key, self.param_shapes(), dtype, bound, {})

    def initial_state(
        self, batch: int, dtype: Any = jnp.float32
    ) -> tuple[Array, Array]:
        """Return zeros: `(h, c)`, each `[B, *grid, H]`."""
        batch, dtype = _checks.check_batch(batch), _checks.check_float_dtype(dtype)
        zeros = jnp.zeros((batch, *self.grid, self.hidden_size), dtype)
        return zeros, zeros

    def prepare(self, params: Any) -> Any:
        """Check names and shapes of `params`; return them as arrays of JAX."""
        return check_params(self, params, self.param_shapes())

    def precompute(self, params: Any, inputs: Array) -> Array:
        """Compute `w_ih * x + b_ih` for all steps: `[..., *grid, 4H]`."""
        inputs = check_inputs(inputs, self.input_size, params=params.w_ih)
        axes = len(self.grid) + 1
        got = tuple(inputs.shape[-axes:-1])
        if inputs.ndim < axes + 1 or got != self.grid:
            raise ValueError(
                f"`inputs` must have shape [..., B, *grid, input_size] with grid="
                f"{self.grid}, got {list(inputs.shape)}"
            )
        return self._convolve(inputs, params.w_ih, params.b_ih)

    def step(self, params: Any, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        if not isinstance(states, (tuple, list)) or len(states) != 2:
            raise TypeError(
                "`states` must be (h, c), as `initial_state` makes them, got "
                f"{_checks.describe(states)}"
            )
        want = (inputs_t.shape[0], *self.grid, self.hidden_size)
        states = [_checks.check_array(n, a) for n, a in zip("hc", states, strict=True)]
        for name, a in zip("hc", states, strict=True):
            _checks.check_same_dtype(params=params.w_hh, **{name: a})
            if tuple(a.shape) != want:
                raise ValueError(
                    f"`{name}` must have shape [B, *grid, H] = {want}, got "
                    f"{tuple(a.shape)}"
                )
        h, c = states
        pre = inputs_t + self._convolve(h, params.w_hh, params.b_hh)
        h, c = lstm_unit(split_gates(pre), c, self.forget_bias)
        return (h, c), h

    def _convolve(self, a: Array, w: Array, b: Array) -> Array:
        """Convolve `[..., *grid, F]` with `[R, F, *kernel]`, wide, and add `b`."""
        axes = len(self.grid) + 1
        lead = a.shape[:-axes]
        space = "".join("XYZ"[: len(self.grid)])
        out = lax.conv_general_dilated(
            widen(a.reshape(math.prod(lead), *a.shape[-axes:])),
            widen(w),
            window_strides=(1,) * len(self.grid),
            padding="SAME",
            dimension_numbers=(f"N{space}C", f"OI{space}", f"N{space}C"),
        )
        return add(out.reshape(*lead, *out.shape[1:]), b)
