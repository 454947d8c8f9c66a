"""Gated linear cells, whose gates see the inputs only: RG-LRU, minGRU and minLSTM."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._rnn.accumulation import accumulation_dtype, widen
from .._typing import Array
from .base import (
    GatedCell,
    ParamsCell,
    broadcast,
    check_inputs,
    check_states,
    draw,
    set_field,
    tag_gate,
)
from .linear_base import LinearCell


class GatedParams(NamedTuple):
    """Parameters `w_ih [G*H, I]` and `b_ih [G*H]` of G gates."""

    w_ih: Any
    b_ih: Any


class _RealCell(LinearCell, ParamsCell):
    """A linear cell with real states, which are its outputs."""

    def checked_state(self, states: Any, batch: int, params: Any) -> Array:
        """Check the state `h [B, H]` and return it."""
        (h,) = self.unpack(states, batch, params)
        return h

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Array:
        """Return zeros: `h [B, H]`, in float32 for 16 bits, as many small steps add up.

        A state in `dtype` itself is taken, too, and rounded after each part of a
        sequence, or after each step where they run one by one.
        """
        dtype = _checks.check_float_dtype(dtype)
        return super().initial_state(batch, accumulation_dtype(dtype))

    def unpack(self, states: Any, batch: int, params: Any) -> Any:
        """Check the states; return them as a tuple of arrays of JAX."""
        like = params.w_ih
        wide = accumulation_dtype(like.dtype)
        if getattr(states, "dtype", None) == wide:
            like = jax.ShapeDtypeStruct((), wide)
        return check_states(states, batch, like, **self.state_sizes)

    def read(self, params: Any, h: Array, inputs: Any) -> Array:
        """Return the states."""
        return h


@dataclasses.dataclass(frozen=True)
class MinGRU(_RealCell, GatedCell):
    """The minimal gated recurrent unit, whose gate does not see the state.

        z = sigmoid(w_iz x_t + b_iz)
        h_t = (1 - z) * h_{t-1} + z * (w_in x_t + b_in)

    Args:
        input_size: I.
        hidden_size: H.

    Parameters: `GatedParams`, the rows of z and n one after another. State and output:
    `h [B, H]`. Recompute names: `gates`, everything except the states.

    Raises:
        TypeError, ValueError: a size is wrong, or in use the dtype or shape of an
            argument; the message names it.

    Holds under every JAX transformation.

    References:
        Feng et al., Were RNNs All We Needed? (2024), arXiv:2410.01201: the first form,
        without logarithms, which are slower here and allow positive states only.
    """

    def param_shapes(self) -> GatedParams:
        """Return the shapes of the parameters."""
        rows = 2 * self.hidden_size
        return GatedParams((rows, self.input_size), (rows,))

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors and the inputs of the state, `[..., H]`."""
        z, n = jnp.split(inputs, 2, axis=-1)
        return tag_gate(jax.nn.sigmoid(-z)), tag_gate(jax.nn.sigmoid(z) * n)


@dataclasses.dataclass(frozen=True)
class MinLSTM(_RealCell, GatedCell):
    """The minimal LSTM, whose gates do not see the state and add up to 1.

        i, f, g = split(w_ih x_t + b_ih)
        i, f = sigmoid(i), sigmoid(f)
        h_t = f / (f + i) * h_{t-1} + i / (f + i) * g

    Args:
        input_size: I.
        hidden_size: H.

    Parameters: `GatedParams`, the rows of i, f and g one after another. State and
    output: `h [B, H]`. Recompute names: `gates`, everything except the states.

    Raises:
        TypeError, ValueError: as for `MinGRU`.

    Holds under every JAX transformation.

    References:
        Feng et al. (2024), arXiv:2410.01201, the first form, without logarithms.
    """

    def param_shapes(self) -> GatedParams:
        """Return the shapes of the parameters."""
        rows = 3 * self.hidden_size
        return GatedParams((rows, self.input_size), (rows,))

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors and the inputs of the state, `[..., H]`."""
        i, f, g = jnp.split(inputs, 3, axis=-1)
        # f / (f + i) = sigmoid(log f - log i), which neither over- nor underflows.
        balance = jax.nn.log_sigmoid(f) - jax.nn.log_sigmoid(i)
        return (
            tag_gate(jax.nn.sigmoid(balance)),
            tag_gate(jax.nn.sigmoid(-balance) * g),
        )


class RGLRUParams(NamedTuple):
    """Parameters `w_ih [heads, 2D, D]`, `b_ih [2H]` and `decay [H]`, H = heads * D.

    The rows of each head are those of the gates r and i; so are those of `b_ih`, head
    for head.
    """

    w_ih: Any
    b_ih: Any
    decay: Any


@dataclasses.dataclass(frozen=True)
class RGLRU(_RealCell):
    """The real-gated linear recurrent unit of Griffin.

        r = sigmoid(w_ir x_t + b_ir),  i = sigmoid(w_ii x_t + b_ii)
        a = sigmoid(decay) ** (8 r)
        h_t = a * h_{t-1} + sqrt(1 - a^2) * (i * x_t)

    Args:
        hidden_size: H, of inputs and states.
        num_heads: blocks of the two matrices, each of H / num_heads units.

    Parameters: `RGLRUParams`; `decay` begins so that `sigmoid(decay) ** 8` is from
    U(0.9, 0.999). State and output: `h [B, H]`. Recompute names: `gates`, everything
    except the states.

    Raises:
        TypeError, ValueError: as for `MinGRU`; `num_heads` does not divide
            `hidden_size`.

    Holds under every JAX transformation.

    References:
        De et al., Griffin: Mixing Gated Linear Recurrences with Local Attention (2024),
        arXiv:2402.19427. The first step of a sequence is as every other one.
    """

    input_size: int = dataclasses.field(init=False)
    num_heads: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        set_field(self, "input_size", self.hidden_size)
        super().__post_init__()
        set_field(self, "num_heads", _checks.check_size("num_heads", self.num_heads))
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide hidden_size={self.hidden_size}, got "
                f"{self.num_heads}"
            )

    def param_shapes(self) -> RGLRUParams:
        """Return the shapes of the parameters."""
        each = self.hidden_size // self.num_heads
        return RGLRUParams(
            (self.num_heads, 2 * each, each),
            (2 * self.hidden_size,),
            (self.hidden_size,),
        )

    def init(self, key: Array, dtype: Any = jnp.float32) -> RGLRUParams:
        """Draw weights from U(-k, k), k = (H / num_heads) ** -0.5, and decays."""
        dtype = _checks.check_float_dtype(dtype)
        bound = (self.hidden_size // self.num_heads) ** -0.5
        params = draw(key, self.param_shapes(), jnp.float32, bound, {"b_ih": 0.0})
        uniform = (params.decay / bound + 1) / 2
        power = (0.9 + 0.099 * uniform) ** (1 / 8)
        decay = jnp.log(power) - jnp.log1p(-power)
        params = params._replace(decay=decay)
        return jax.tree.map(lambda a: a.astype(dtype), params)

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Compute the two gates' products for all steps, head by head."""
        inputs = check_inputs(inputs, self.input_size, params=params.w_ih)
        each = self.hidden_size // self.num_heads
        heads = inputs.reshape(*inputs.shape[:-1], self.num_heads, each)
        wide = widen(inputs).dtype
        gates = jnp.einsum(
            "...hd,hgd->...hg", heads, params.w_ih, preferred_element_type=wide
        )
        bias = widen(params.b_ih).reshape(self.num_heads, -1)
        return gates + jnp.broadcast_to(bias, gates.shape), inputs

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors and the inputs of the state, `[..., H]`."""
        gates, x = inputs
        r, i = (
            jax.nn.sigmoid(g).reshape(x.shape) for g in jnp.split(gates, 2, axis=-1)
        )
        log_a = 8 * jax.nn.log_sigmoid(broadcast(params.decay, r)) * r
        # 1 - a^2, kept off 0, where the root has no derivative.
        rest = jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(log_a.dtype).tiny)
        b = jnp.sqrt(rest) * i * widen(x)
        return tag_gate(jnp.exp(log_a)), tag_gate(b)
