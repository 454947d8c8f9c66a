"""The code that cells share: parameters with names and shapes, products, an LSTM unit.

Sizes: B sequences, I = input_size, H = hidden_size, G gates. The rows of weights are
grouped by gate: LSTM `i f g o`, GRU `r z n`. Arrays of one call share one dtype; with
16-bit floats, a step sums products and computes everything else in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import Cell
from .._recurrent.remat import tag
from .._rnn import pointwise
from .._rnn.accumulation import wide_product, widen
from .._typing import Array

Params = TypeVar("Params")
"""The NamedTuple of a cell's parameters."""


class SizedCell(Cell):
    """A cell that other cells can contain, because it knows its sizes and names.

    A cell of your own for a `Stack` or a wrapper derives from this class. It is a
    frozen dataclass with the fields or properties `input_size` and `output_size`, the
    features of one step's input and output, and with `recompute_names` if its step uses
    `ostinato.tag`.
    """

    input_size: Any
    output_size: Any

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts."""
        return ()

    @property
    def has_step(self) -> bool:
        """True if the cell can run one step at a time."""
        return True

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in the products of states.

        This default is for cells that read `h` only in products.
        """
        return self.step(params, with_h(states, seen), inputs_t, t)


def with_h(states: Any, h: Array) -> Any:
    """Return the states `h` or `(h, c)` with `h` replaced."""
    return (h, *states[1:]) if isinstance(states, tuple) else h


@dataclasses.dataclass(frozen=True)
class ParamsCell(SizedCell, Generic[Params]):
    """A cell of H units, whose parameters are a NamedTuple of arrays.

    A subclass lists its parameters in `param_shapes`, and defines `step`.
    """

    input_size: int
    hidden_size: int

    constants: ClassVar[dict[str, float]] = {}
    """Initial values of the parameters that are not drawn at random."""

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size"):
            set_field(self, name, _checks.check_size(name, getattr(self, name)))

    def param_shapes(self) -> Params:
        """Return the parameters' NamedTuple with shapes; None for absent ones."""
        raise NotImplementedError(f"{type(self).__name__} defines no parameters")

    @property
    def output_size(self) -> int:
        """Features H of one step's output."""
        return self.hidden_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts."""
        return ("gates",)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Params:
        """Draw parameters from U(-k, k), k = hidden_size ** -0.5; set `constants`."""
        bound = self.hidden_size**-0.5
        return draw(key, self.param_shapes(), dtype, bound, self.constants)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Features of each state, by name."""
        return {"h": self.output_size}

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """Return zeros in the `state_sizes`: `h [B, H]`, or a tuple of several."""
        batch, dtype = _checks.check_batch(batch), _checks.check_float_dtype(dtype)
        sizes = self.state_sizes.values()
        first, *others = (jnp.zeros((batch, size), dtype) for size in sizes)
        return (first, *others) if others else first

    def unpack(self, states: Any, batch: int, params: Any) -> Any:
        """Check the states; return them as a tuple of arrays of JAX."""
        return check_states(states, batch, params.w_hh, **self.state_sizes)

    def prepare(self, params: Any) -> Any:
        """Check names and shapes of `params`; return them as arrays of JAX."""
        return check_params(self, params, self.param_shapes())


@dataclasses.dataclass(frozen=True)
class GatedCell(ParamsCell[Params]):
    """A cell that reads its inputs only through one matrix, `w_ih`.

    That product runs for all steps at once, and so does the gradient of `w_ih`.
    """

    def precompute(self, params: Any, inputs: Array) -> Any:
        """Compute `w_ih @ x + b_ih` for all steps: `[..., I]` to `[..., G*H]`."""
        inputs = check_inputs(inputs, self.input_size, params=params.w_ih)
        return self.input_product(params, inputs)

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """Return the part of `precompute` that comes from features `first` and up.

        The bias is added with feature 0, so that the products of inputs which arrive in
        two parts, one of them in the loop, add up to the whole.
        """
        part = params.w_ih[:, first : first + inputs.shape[-1]]
        out = product(inputs, part)
        return out if first else add(out, params.b_ih)


@dataclasses.dataclass(frozen=True)
class LSTMCell(GatedCell[Params]):
    """A cell with the states `(h, c)` and the gates `i f g o`."""

    forget_bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(
            self, "forget_bias", _checks.check_finite("forget_bias", self.forget_bias)
        )

    @property
    def state_sizes(self) -> dict[str, int]:
        """Features of each state, by name."""
        return {"h": self.output_size, "c": self.hidden_size}

    def input_product(self, params: Any, inputs: Array, first: int = 0) -> Any:
        """Return the product as for every cell, split into four gates `[..., H]`.

        If a loop on a CPU sliced gates out of one step of `[T, B, 4H]`, it would
        compute them number by number, since XLA does not vectorise a slice of a slice.
        """
        return split_gates(super().input_product(params, inputs, first))


def lstm_gates(params: Any, gx: Sequence[Array], h: Array) -> list[Array]:
    """Return the preactivations of `i f g o` from the input products `gx` and `h`."""
    gh = split_gates(add(product(h, params.w_hh), params.b_hh))
    return [a + b for a, b in zip(gx, gh, strict=True)]


def split_gates(pre: Array) -> list[Array]:
    """Split `[..., 4H]` into `i f g o`, each `[..., H]`."""
    return jnp.split(pre, 4, axis=-1)


def lstm_unit(
    pre: Sequence[Array], c_prev: Array, forget_bias: float
) -> tuple[Array, Array]:
    """Return `(o tanh(c), c)` from preactivations, in the dtype of `c_prev`."""
    i, f, g, o = pre
    _, c = pointwise.lstm_cell_state((i, f + forget_bias, g), widen(c_prev), tag_gate)
    u = tag_gate(jax.nn.sigmoid(o)) * tag_gate(jnp.tanh(c))
    return u.astype(c_prev.dtype), c.astype(c_prev.dtype)


def tag_gate(a: Array) -> Array:
    """Return `a` under the name that the cells use for `recompute`."""
    return tag(a, "gates")


# -------------------------------------------------------------------------- products


def product(a: Array, w: Array) -> Array:
    """Return `w @ a` over the last axis of `a [..., F]`, for `w [R, F]`: `[..., R]`."""
    return wide_product(a, w, (a.ndim - 1, 1))


def add(a: Array, b: Array) -> Array:
    """Return `a + b` for a vector `b` of the size of the last axis."""
    return a + broadcast(b, a)


def broadcast(b: Array, a: Array) -> Array:
    """Return the vector `b`, widened and repeated over the leading axes of `a`."""
    return jnp.broadcast_to(widen(b), a.shape)


# ------------------------------------------------------------------------ parameters


def draw(
    key: Array, shapes: Any, dtype: Any, bound: float, constants: dict[str, float]
) -> Any:
    """Draw parameters of these shapes from U(-bound, bound); set the `constants`."""
    key = _checks.check_key(key)
    dtype = _checks.check_float_dtype(dtype)
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
    """Set a field of a frozen cell to its normalised value, in `__post_init__`."""
    object.__setattr__(cell, name, value)


def check_rate(name: str, value: Any) -> float:
    """Return `value` as a float; raise unless it lies in [0, 1)."""
    value = _checks.check_real(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}")
    return value


def check_cell(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a cell that another cell can contain."""
    if not isinstance(value, SizedCell):
        raise TypeError(
            f"`{name}` must be a cell of ostinato.cells, or derive from its SizedCell, "
            f"got {_checks.describe(value)}"
        )


def params_dtype(params: Any) -> Any:
    """Return the dtype of the first array of floats, which states have, too.

    Numbers of Python take the dtype of the arrays that they meet.
    """
    arrays = (a for a in jax.tree.leaves(params) if hasattr(a, "dtype"))
    found = map(jnp.result_type, arrays)
    return next((d for d in found if jnp.issubdtype(d, jnp.floating)), jnp.float32)


def check_output(cell: Any, output: Any) -> Any:
    """Return the output of a cell inside of another one; check that it is an array."""
    if not hasattr(output, "dtype"):
        raise TypeError(
            "`cell` must give one array in each step to the cell around it, got "
            f"{type(output).__name__} from {type(cell).__name__}; wrap a cell without "
            "further outputs"
        )
    return output


def check_params_type(cell: Any, params: Any, wanted: type) -> None:
    """Raise TypeError unless `params` is of the type that `cell.init` returns."""
    if not isinstance(params, wanted):
        hint = "; give params=cell.init(key)" if params is None else ""
        raise TypeError(
            f"`params` of {type(cell).__name__} must be {wanted.__name__}, as `init` "
            f"makes them, got {_checks.describe(params)}{hint}"
        )


def check_params(cell: Any, params: Any, shapes: Any) -> Any:
    """Return `params` as arrays of JAX; check that they match `shapes`, of `cell.init`.

    Raises:
        TypeError, ValueError: they do not; the message names the parameter.
    """
    check_params_type(cell, params, type(shapes))
    arrays = {}
    for name, shape, value in zip(shapes._fields, shapes, params, strict=True):
        if (shape is None) != (value is None):
            wanted = "None" if shape is None else f"an array of shape {shape}"
            got = "None" if value is None else _checks.describe(value)
            raise ValueError(f"`params.{name}` must be {wanted}, got {got}")
        if shape is None:
            continue
        value = arrays[name] = _checks.check_array(f"params.{name}", value)
        if value.shape != tuple(shape):
            raise ValueError(
                f"`params.{name}` must have shape {tuple(shape)} for {cell}, got "
                f"{value.shape}"
            )
    _checks.check_same_dtype(**{f"params.{n}": a for n, a in arrays.items()})
    return params._replace(**arrays)


def check_inputs(inputs: Any, size: int, **like: Array) -> Array:
    """Return inputs as an array of JAX; check `size` and the dtype of `like`.

    Raises:
        TypeError, ValueError: they have another dtype, or no last axis of `size`.
    """
    inputs = _checks.check_array("inputs", inputs)
    _checks.check_floating("inputs", inputs, _checks.FLOATS)
    _checks.check_same_dtype(inputs=inputs, **like)
    if inputs.ndim < 2 or inputs.shape[-1] != size:
        hint = "; one sequence needs a batch axis of 1" if inputs.ndim < 2 else ""
        raise ValueError(
            f"`inputs` must have shape [..., B, input_size] with input_size={size}, "
            f"got {list(inputs.shape)}{hint}"
        )
    return inputs


def check_states(states: Any, batch: int, weights: Any, **sizes: int) -> Any:
    """Check `states`, arrays `[B, size]` named in `sizes`.

    Returns:
        A tuple of arrays of JAX; for one size, `states` is the array itself.
    """
    names = ", ".join(sizes)
    if len(sizes) == 1:
        states = (states,)
    if not isinstance(states, (tuple, list)) or len(states) != len(sizes):
        raise TypeError(
            f"`states` must be ({names}), as `initial_state` makes them, got "
            f"{_checks.describe(states)}"
        )
    arrays = []
    for (name, size), state in zip(sizes.items(), states, strict=True):
        a = _checks.check_array(name, state)
        if a.ndim == 3 and (a.shape[0], a.shape[2]) == (batch, size):
            raise ValueError(
                "`window` must be 1 for a cell, whose step reads one past state, got "
                f"`{name}` with {a.shape[1]} of them"
            )
        _checks.check_shape(name, a, B=batch, H=size)
        _checks.check_same_dtype(params=weights, **{name: a})
        arrays.append(a)
    return tuple(arrays)
