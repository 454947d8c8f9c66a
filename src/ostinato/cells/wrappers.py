"""Wrappers of one cell: residual connections, dropout and zoneout."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks, _padding
from .._recurrent.protocol import RecurrentOutput, SequenceOptions, overrides_step
from .._recurrent.sharding import sharded_like
from .._typing import Array
from .base import SizedCell, check_cell, check_output, check_rate, set_field
from .linear_base import LinearCell
from .stack import Stack


@dataclasses.dataclass(frozen=True)
class _Wrapper(SizedCell):
    """A wrapper with the parameters, states, sizes and names of its inner cell."""

    cell: SizedCell

    def __post_init__(self) -> None:
        check_cell("cell", self.cell)

    @property
    def input_size(self) -> int:
        """Features of one input step."""
        return self.cell.input_size

    @property
    def output_size(self) -> int:
        """Features of one step's output."""
        return self.cell.output_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts, from the inner cell."""
        return self.cell.recompute_names

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Draw the parameters of the inner cell; the wrapper has no others."""
        return self.cell.init(key, dtype)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """Return the states of the inner cell; the wrapper has no others."""
        return self.cell.initial_state(batch, dtype)

    def prepare(self, params: Any) -> Any:
        """Prepare the parameters of the inner cell."""
        return self.cell.prepare(params)

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Run `precompute` of the inner cell."""
        return self.cell.precompute(params, inputs)

    @property
    def has_step(self) -> bool:
        """True if the inner cell can run one step at a time."""
        return self.cell.has_step


@dataclasses.dataclass(frozen=True)
class Residual(_Wrapper):
    """A residual connection around a cell: `y_t = cell(x_t) + x_t`.

    Args:
        cell: the inner cell, with as many outputs as inputs.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: `cell` is not a cell.
        ValueError: its input and output sizes differ.

    Holds under every JAX transformation.

    References:
        He et al. (2015), arXiv:1512.03385; in recurrent networks Wu et al. (2016),
        arXiv:1609.08144, and Caffe2's `residual_output_layers`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_size != self.output_size:
            raise ValueError(
                "`cell` must have as many outputs as inputs, got input_size="
                f"{self.input_size} and output_size={self.output_size}"
            )

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Return the inputs, and `precompute` of the inner cell on them."""
        return inputs, self.cell.precompute(params, inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        x, inner = inputs_t
        states, output = self.cell.step(params, states, inner, t)
        return states, check_output(self.cell, output) + x

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in products of the inner cell."""
        x, inner = inputs_t
        states, output = self.cell.step_seeing(params, states, seen, inner, t)
        return states, check_output(self.cell, output) + x

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run the inner cell, and add the inputs to its outputs."""
        if overrides_step(self):
            return None
        whole = self.cell.run_sequence(params, inputs, initial_states, options)
        if whole is None:
            return None
        axis, lengths = 0 if options.time_major else 1, options.seq_lengths
        if lengths is not None:
            fill = _padding.hold if options.padding == "hold" else _padding.zero
            inputs = fill(inputs, lengths, axis)
        outputs = check_output(self.cell, whole.outputs)
        return whole._replace(outputs=outputs + inputs)


class DropoutMasks(NamedTuple):
    """Masks bool `[B, F]`, True where a value is kept; None if nothing is dropped."""

    inputs: Any
    states: Any
    outputs: Any


@dataclasses.dataclass(frozen=True)
class Dropout(_Wrapper):
    """Variational dropout: one mask for a whole sequence, the same in every step.

    Dropped values become 0, and kept values are divided by 1 - rate. A new instance has
    no masks and equals its inner cell, for evaluation. For training, pass
    `sample(key, batch)` to `recurrent_net`, with a new key each time.

    Args:
        cell: the inner cell.
        inputs: dropout rate of the inputs, in [0, 1).
        states: dropout rate of `h`, for a state `h` or `(h, c)`. The products of every
            step read the dropped `h`; the part of `h` that a GRU keeps is not dropped.
        outputs: dropout rate of the outputs.
        masks: `DropoutMasks`, or None; set by `sample`.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: an argument has the wrong type, or `states` is not 0 and the state of
            the cell is neither `h` nor `(h, c)`, or is in no product.
        ValueError: a rate is outside [0, 1).

    Holds under every JAX transformation.

    References:
        Gal and Ghahramani (2016), arXiv:1512.05287
    """

    inputs: float = 0.0
    states: float = 0.0
    outputs: float = 0.0
    masks: DropoutMasks | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("inputs", "states", "outputs"):
            set_field(self, name, check_rate(name, getattr(self, name)))
        if self.states:
            _check_has_h(self.cell, "states")
            inner = _innermost(self.cell)
            if isinstance(inner, LinearCell):
                raise TypeError(
                    "`states` needs a cell with products of its states, got "
                    f"{type(inner).__name__}; drop its inputs or outputs instead"
                )

    def sample(self, key: Array, batch: int) -> Dropout:
        """Return the cell with new random masks for `batch` sequences, for training.

        Cells inside keep theirs; `cells.sample` draws all.
        """
        batch = _checks.check_batch(batch)
        keys = jax.random.split(_checks.check_key(key), 3)
        rates = (self.inputs, self.states, self.outputs)
        h_size = _h_of(self.cell).shape[-1] if self.states else 0
        sizes = (self.input_size, h_size, self.output_size)
        masks = [
            # With the rate in float32, the masks do not depend on the x64 flag.
            jax.random.bernoulli(k, jnp.float32(1 - rate), (batch, size))
            if rate
            else None
            for k, rate, size in zip(keys, rates, sizes, strict=True)
        ]
        return dataclasses.replace(self, masks=DropoutMasks(*masks))

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Run `precompute` of the inner cell, or leave inputs with a mask to `step`.

        Only there is it known that B is the first axis.
        """
        if self._mask("inputs") is not None:
            return inputs
        return self.cell.precompute(params, inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        if self._mask("states") is not None:
            return self.step_seeing(params, states, _split_h(states)[0], inputs_t, t)
        inputs_t = self._precompute_masked(params, inputs_t)
        states, output = self.cell.step(params, states, inputs_t, t)
        return states, self._apply_mask("outputs", output)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """Run `step` with the masked `seen` in place of `h` in products."""
        inputs_t = self._precompute_masked(params, inputs_t)
        seen = self._apply_mask("states", seen)
        states, output = self.cell.step_seeing(params, states, seen, inputs_t, t)
        return states, self._apply_mask("outputs", output)

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run the inner cell between the masks; return None if states are dropped."""
        if overrides_step(self) or self._mask("states") is not None:
            return None
        axis = 1 if options.time_major else 0
        kept = self._apply_mask("inputs", inputs, axis)
        whole = self.cell.run_sequence(params, kept, initial_states, options)
        if whole is None:
            return None
        return whole._replace(outputs=self._apply_mask("outputs", whole.outputs, axis))

    def _mask(self, name: str) -> Any:
        return getattr(self.masks, name, None)

    def _precompute_masked(self, params: Any, inputs_t: Any) -> Any:
        """Do for one step what `precompute` leaves to it."""
        if self._mask("inputs") is None:
            return inputs_t
        return self.cell.precompute(params, self._apply_mask("inputs", inputs_t))

    def _apply_mask(self, name: str, a: Any, batch_axis: int = 0) -> Any:
        """Return `a` with the mask `[B, F]` applied, scaled; `a` if there is no mask.

        Args:
            name: the name of the mask and of its rate.
            a: the array, whose last axis is F.
            batch_axis: the axis of B.
        """
        mask = self._mask(name)
        if mask is None:
            return a
        a = _checks.check_array(name, a)
        sizes = (a.shape[batch_axis], a.shape[-1])
        if mask.shape != sizes:
            raise ValueError(
                f"`masks` must be of the call's [B, F] = {list(sizes)}, got "
                f"{list(mask.shape)}; `sample` them for as many sequences"
            )
        between = range(batch_axis + 1, a.ndim - 1)
        kept = jnp.expand_dims(mask, (*range(batch_axis), *between))
        kept = jnp.broadcast_to(kept, a.shape)
        rate = getattr(self, name)
        return jnp.where(kept, a / (1 - rate), jnp.zeros((), a.dtype))


@dataclasses.dataclass(frozen=True)
class Zoneout(_Wrapper):
    """Zoneout, which lets random units keep their state in every step.

    With `m` 1 for a unit that keeps its state, which happens with probability `rate`:

        h_t = m * h_{t-1} + (1 - m) * cell(x_t, h_{t-1})            training
        h_t = rate * h_{t-1} + (1 - rate) * cell(x_t, h_{t-1})      evaluation

    and in the same way for `c`. The output is `h_t`. A new instance is for evaluation;
    for training, pass `sample(key)` to `recurrent_net`, with a new key each time. The
    choices of step t are drawn from `fold_in(key, t)`.

    Args:
        cell: the inner cell; its state is `h` or `(h, c)`, its output `h`. A wrapper
            that changes the output goes outside: `Residual(Zoneout(cell))`.
        h_rate: rate of `h`, in [0, 1).
        c_rate: rate of `c`, in [0, 1); 0 for a cell without `c`.
        key: a PRNG key, or None; set by `sample`.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: an argument has the wrong type, or the cell has other states.
        ValueError: a rate is outside [0, 1), `c_rate` is not 0 for a cell without `c`,
            or the output of the cell is not its `h`.

    Holds under every JAX transformation.

    References:
        Krueger et al. (2016), arXiv:1606.01305
    """

    h_rate: float = 0.0
    c_rate: float = 0.0
    key: Array | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("h_rate", "c_rate"):
            set_field(self, name, check_rate(name, getattr(self, name)))
        has_c = _check_has_h(self.cell, "cell")
        _check_output_is_h(self.cell)
        if self.c_rate and not has_c:
            raise ValueError(
                f"`c_rate` must be 0 for {type(self.cell).__name__}, which has no c, "
                f"got {self.c_rate}"
            )

    def sample(self, key: Array) -> Zoneout:
        """Return the cell with random choices drawn from `key`, for training.

        Cells inside keep theirs; `cells.sample` draws all.
        """
        return dataclasses.replace(self, key=_checks.check_key(key))

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        new, output = self.cell.step(params, states, inputs_t, t)
        return self._zone_out(states, new, output.dtype, t)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """Run `step` with `seen` in place of `h` in products; units keep `h` itself."""
        new, output = self.cell.step_seeing(params, states, seen, inputs_t, t)
        return self._zone_out(states, new, output.dtype, t)

    def _zone_out(self, states: Any, new: Any, dtype: Any, t: Array) -> Any:
        """Return states with the old or the new value of each unit, and the output.

        The output is `h` in `dtype`: states may be wider.
        """
        h_prev, c_prev = _split_h(states)
        h, c = _split_h(new)
        keys = (None, None)
        if self.key is not None:
            keys = jax.random.split(jax.random.fold_in(self.key, t))
        h = _zoneout(keys[0], self.h_rate, h_prev, h)
        if c is not None:
            c = _zoneout(keys[1], self.c_rate, c_prev, c)
        return _join_h(h, c), h.astype(dtype)


def _zoneout(key: Any, rate: float, old: Array, new: Array) -> Array:
    if not rate:
        return new
    if key is None:
        return rate * old + (1 - rate) * new
    kept = jax.random.bernoulli(key, jnp.float32(rate), new.shape)
    return jnp.where(sharded_like(kept, new), old, new)


def whole_sequence_cell(cell: Any) -> Any:
    """Return the cell to which wrappers leave whole sequences; itself for others."""
    while not overrides_step(cell) and (
        isinstance(cell, Residual)
        or (isinstance(cell, Dropout) and getattr(cell.masks, "states", None) is None)
    ):
        cell = cell.cell
    return cell


def _innermost(cell: SizedCell) -> SizedCell:
    """Return the cell inside of all wrappers."""
    while isinstance(cell, _Wrapper):
        cell = cell.cell
    return cell


def _check_output_is_h(cell: SizedCell) -> None:
    """Raise ValueError if the output is not `h`, in whose place Zoneout returns it."""
    inner = cell
    while isinstance(inner, _Wrapper):
        if isinstance(inner, Residual) or isinstance(inner, Dropout) and inner.outputs:
            raise ValueError(
                f"`cell` must give its h as it is, got {type(inner).__name__}, which "
                f"changes it; wrap {type(inner).__name__} around Zoneout instead"
            )
        inner = inner.cell
    h = _h_of(cell)
    is_complex = jnp.issubdtype(h.dtype, jnp.complexfloating)
    if is_complex or h.shape[-1] != cell.output_size:
        raise ValueError(
            f"`cell` must give its h as it is, got {type(inner).__name__} with "
            f"{cell.output_size} outputs and an h of {h.shape[-1]} in {h.dtype}"
        )


def _check_has_h(cell: SizedCell, name: str) -> bool:
    """Return True for states `(h, c)`, False for `h`; raise TypeError for others."""
    states = _state_shapes(cell)
    pair = type(states) is tuple and len(states) == 2
    known = all(hasattr(a, "shape") for a in (states if pair else (states,)))
    if not known or isinstance(_innermost(cell), Stack):  # whose pair is (h, h)
        raise TypeError(
            f"`{name}` needs a cell whose state is h or (h, c), got "
            f"{type(cell).__name__}; wrap the cell inside instead"
        )
    return pair


def _h_of(cell: SizedCell) -> Any:
    """Return the shape and dtype of `h` of one sequence."""
    return _split_h(_state_shapes(cell))[0]


def _state_shapes(cell: SizedCell) -> Any:
    return jax.eval_shape(lambda: cell.initial_state(1, jnp.float32))


def _split_h(states: Any) -> tuple[Any, Any]:
    return states if isinstance(states, tuple) else (states, None)


def _join_h(h: Array, c: Any) -> Any:
    return h if c is None else (h, c)
