"""What the cells share: parameters with names and shapes, products, one LSTM unit.

Sizes: B rows, I = input_size, H = hidden_size, G gates. Weights are grouped by gate:
LSTM `i f g o`, GRU `r z n`. Arrays of one call share one dtype; with 16-bit floats,
products are summed, and everything between them is computed, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import Cell
from .._recurrent.remat import tag
from .._rnn import pointwise
from .._rnn.accumulation import wide_product, widen
from .._typing import Array


class SizedCell(Cell):
    """A cell that can stand inside others: it knows its sizes and names.

    A cell of your own that is to go into a `Stack` or a wrapper derives from this: a
    frozen dataclass with the fields or properties `input_size` and `output_size`,
    features of one step's input and output, and with `recompute_names` if its step uses
    `ostinato.tag`.
    """

    input_size: Any
    output_size: Any

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """The names that `recurrent_net(recompute=...)` takes."""
        return ()

    @property
    def has_step(self) -> bool:
        """Whether it can run one step at a time."""
        return True

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """`step`, but the products of states see `seen` in place of `h`.

        As it stands for cells that read `h` in products alone.
        """
        return self.step(params, with_h(states, seen), inputs_t, t)


def with_h(states: Any, h: Array) -> Any:
    """States `h` or `(h, c)` with another `h`."""
    return (h, *states[1:]) if isinstance(states, tuple) else h


@dataclasses.dataclass(frozen=True)
class GatedCell(SizedCell):
    """A cell that reads its inputs through one matrix, `w_ih`, alone.

    That product is run for all steps at once, and so is the gradient of `w_ih`. A
    subclass says in `param_shapes` which parameters it has, and defines `step`.
    """

    input_size: int
    hidden_size: int

    constants: ClassVar[dict[str, float]] = {}
    """Parameters that begin as a constant; the others are drawn."""

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size"):
            set_field(self, name, _checks.check_size(name, getattr(self, name)))

    def param_shapes(self) -> Any:
        """The parameters' NamedTuple, holding shapes; None for what is not there."""
        raise NotImplementedError(f"{type(self).__name__} defines no parameters")

    @property
    def output_size(self) -> int:
        """H, features of one step's output."""
        return self.hidden_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """The names that `recurrent_net(recompute=...)` takes."""
        return ("gates",)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Draw parameters from U(-k, k), k = hidden_size ** -0.5, or as `constants`."""
        bound = self.hidden_size**-0.5
        return draw(key, self.param_shapes(), dtype, bound, self.constants)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """Zeros: `h [B, H]`."""
        return jnp.zeros((batch, self.hidden_size), dtype)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Features of each state, by name."""
        return {"h": self.output_size}

    def unpack(self, states: Any, batch: int, params: Any) -> Any:
        """The states as a tuple, checked."""
        return check_states(states, batch, params.w_hh, **self.state_sizes)

    def prepare(self, params: Any) -> Any:
        """`params`, once their names and shapes have been checked."""
        check_params(self, params, self.param_shapes())
        return params

    def precompute(self, params: Any, inputs: Array) -> Any:
        """`w_ih @ x + b_ih` for all steps: `[..., I]` to `[..., G*H]`."""
        check_inputs(inputs, self.input_size, params=params.w_ih)
        return self.input_product(params, inputs)

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """The part of `precompute` that the features from `first` on contribute.

        The bias comes with feature 0. So inputs that arrive in two parts, some of them
        in the loop, add up.
        """
        part = params.w_ih[:, first : first + inputs.shape[-1]]
        out = product(inputs, part)
        return out if first else add(out, params.b_ih)


@dataclasses.dataclass(frozen=True)
class LSTMCell(GatedCell):
    """A cell with the states `(h, c)` and the gates `i f g o`."""

    forget_bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "forget_bias", check_number("forget_bias", self.forget_bias))

    def initial_state(
        self, batch: int, dtype: Any = jnp.float32
    ) -> tuple[Array, Array]:
        """Zeros: `h [B, S]`, S the output's size, and `c [B, H]`."""
        h = jnp.zeros((batch, self.output_size), dtype)
        return h, jnp.zeros((batch, self.hidden_size), dtype)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Features of each state, by name."""
        return {"h": self.output_size, "c": self.hidden_size}

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """As for every cell, but gates apart: four `[..., H]`.

        Gates that a loop on a CPU cut out of one step of `[T, B, 4H]` would be computed
        number by number: XLA makes no vectors of a slice inside a slice.
        """
        return split_gates(super().input_product(params, inputs, first))


def lstm_gates(params: Any, gx: Sequence[Array], h: Array) -> list[Array]:
    """What goes into `i f g o`: the inputs' part `gx` and the state's."""
    gh = split_gates(add(product(h, params.w_hh), params.b_hh))
    return [a + b for a, b in zip(gx, gh, strict=True)]


def split_gates(pre: Array) -> list[Array]:
    """`i f g o`, each `[..., H]`, of `[..., 4H]`."""
    return jnp.split(pre, 4, axis=-1)


def lstm_unit(
    gates: Sequence[Array], c_prev: Array, forget_bias: float
) -> tuple[Array, Array]:
    """`(o tanh(c), c)` from what goes into `i f g o`, in the dtype of `c_prev`."""
    i, f, g, o = gates
    pre = i, f + forget_bias, g
    _, c = pointwise.lstm_cell_state(pre, widen(c_prev), tag_gate)
    u = tag_gate(jax.nn.sigmoid(o)) * tag_gate(jnp.tanh(c))
    return u.astype(c_prev.dtype), c.astype(c_prev.dtype)


def tag_gate(a: Array) -> Array:
    """Return `a` under the name that the cells use for `recompute`."""
    return tag(a, "gates")


# -------------------------------------------------------------------------- products


def product(a: Array, w: Array) -> Array:
    """Return `w @ a` on the last axis: `[..., F]` and `[R, F]` to `[..., R]`, wide."""
    return wide_product(a, w, (a.ndim - 1, 1))


def add(a: Array, b: Array) -> Array:
    """`a + b` for a vector `b` of the last axis's size."""
    return a + over(b, a)


def over(b: Array, a: Array) -> Array:
    """The vector `b`, widened and repeated over the leading axes of `a`."""
    return jnp.broadcast_to(widen(b), a.shape)


# ------------------------------------------------------------------------ parameters


def draw(
    key: Array, shapes: Any, dtype: Any, bound: float, constants: dict[str, float]
) -> Any:
    """Parameters of these shapes: from U(-bound, bound), or constant where named."""
    key = _checks.check_key(key)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a floating dtype, got {dtype}")
    keys = jax.random.split(key, len(shapes))
    values = {}
    for name, shape, k in zip(shapes._fields, shapes, keys, strict=True):
        if shape is None:
            values[name] = None
        elif name in constants:
            values[name] = jnp.full(shape, constants[name], dtype)
        else:
            values[name] = jax.random.uniform(k, shape, dtype, -bound, bound)
    return type(shapes)(**values)


# ---------------------------------------------------------------------------- checks


def set_field(cell: Any, name: str, value: Any) -> None:
    """Normalise a field of a frozen cell, in its `__post_init__`."""
    object.__setattr__(cell, name, value)


def check_number(name: str, value: Any) -> float:
    """A finite float."""
    value = _checks.check_real(name, value)
    if not abs(value) < float("inf"):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return value


def check_rate(name: str, value: Any) -> float:
    """A probability below 1."""
    value = _checks.check_real(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}")
    return value


def check_cell(name: str, value: Any) -> None:
    """TypeError unless `value` is a cell that can stand inside another."""
    if not isinstance(value, SizedCell):
        raise TypeError(
            f"`{name}` must be a cell of ostinato.cells, or derive from its SizedCell, "
            f"got {_checks.describe(value)}"
        )


def check_kind(cell: Any, params: Any, kind: type) -> None:
    """TypeError unless `params` is the tuple that `cell.init` makes."""
    if not isinstance(params, kind):
        raise TypeError(
            f"`params` of {type(cell).__name__} must be {kind.__name__}, as `init` "
            f"makes them, got {_checks.describe(params)}"
        )


def check_params(cell: Any, params: Any, shapes: Any) -> None:
    """TypeError or ValueError unless `params` are what `cell.init` makes."""
    check_kind(cell, params, type(shapes))
    kind = type(shapes)
    for name, shape, value in zip(kind._fields, shapes, params, strict=True):
        if (shape is None) != (value is None):
            wanted = "None" if shape is None else f"an array of shape {shape}"
            got = "None" if value is None else _checks.describe(value)
            raise ValueError(f"`params.{name}` must be {wanted}, got {got}")
        if shape is not None and tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"`params.{name}` must have shape {tuple(shape)} for {cell}, got "
                f"{tuple(value.shape)}"
            )
    _checks.check_same_dtype(
        **{f"params.{n}": v for n, v in zip(kind._fields, params, strict=True)}
    )


def check_inputs(inputs: Any, size: int, **like: Array) -> None:
    """Inputs are floats with `size` features and the dtype of the array `like`."""
    _checks.check_array("inputs", inputs)
    _checks.check_floating("inputs", inputs, _checks.FLOATS)
    _checks.check_same_dtype(inputs=inputs, **like)
    if inputs.ndim < 2 or inputs.shape[-1] != size:
        raise ValueError(
            f"`inputs` must have shape [..., B, input_size] with input_size={size}, "
            f"got {list(inputs.shape)}"
        )


def check_states(states: Any, batch: int, weights: Array, **sizes: int) -> Any:
    """`states` as a tuple of `[B, size]`, named as in `sizes`; one size, one array."""
    names = ", ".join(sizes)
    if len(sizes) == 1:
        states = (states,)
    if not isinstance(states, (tuple, list)) or len(states) != len(sizes):
        raise TypeError(
            f"`states` must be ({names}), as `initial_state` makes them, got "
            f"{_checks.describe(states)}"
        )
    for (name, size), a in zip(sizes.items(), states, strict=True):
        _checks.check_array(name, a)
        _checks.check_shape(name, a, B=batch, H=size)
        _checks.check_same_dtype(params=weights, **{name: a})
    return tuple(states)
