"""Cells around one cell: residual connections, dropout and zoneout."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.protocol import RecurrentOutput, SequenceOptions
from .._typing import Array
from .base import SizedCell, check_cell, check_rate, set_field


@dataclasses.dataclass(frozen=True)
class _Wrapper(SizedCell):
    """What a wrapper shares with its cell: parameters, states, sizes, names."""

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
        """Those of the inner cell."""
        return self.cell.recompute_names

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Parameters of the inner cell; there are no others."""
        return self.cell.init(key, dtype)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """States of the inner cell; there are no others."""
        return self.cell.initial_state(batch, dtype)

    def prepare(self, params: Any) -> Any:
        """As the inner cell."""
        return self.cell.prepare(params)

    def precompute(self, params: Any, inputs: Any) -> Any:
        """As the inner cell."""
        return self.cell.precompute(params, inputs)

    @property
    def has_step(self) -> bool:
        """As the inner cell."""
        return self.cell.has_step


@dataclasses.dataclass(frozen=True)
class Residual(_Wrapper):
    """Adds its input to its cell's output: `y_t = cell(x_t) + x_t`.

    Args:
        cell: the inner cell, with as many outputs as inputs.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: `cell` is no cell.
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
        """The inputs, and what the inner cell makes of them."""
        return inputs, self.cell.precompute(params, inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step, on what `precompute` made."""
        x, inner = inputs_t
        states, output = self.cell.step(params, states, inner, t)
        return states, output + x

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """`step`, where products of the inner cell see `seen`."""
        x, inner = inputs_t
        states, output = self.cell.step_seeing(params, states, seen, inner, t)
        return states, output + x


class DropoutMasks(NamedTuple):
    """True where a value is kept, bool `[B, F]`; None where nothing is dropped."""

    inputs: Any
    states: Any
    outputs: Any


@dataclasses.dataclass(frozen=True)
class Dropout(_Wrapper):
    """Variational dropout: one mask for a whole sequence, the same in every step.

    What is dropped is 0, what is kept is divided by 1 - rate. Without masks, as made,
    the cell is its inner cell: evaluation. For training, hand `sample(key, batch)` to
    `recurrent_net`, with a fresh key each time.

    Args:
        cell: the inner cell.
        inputs: rate of the inputs, in [0, 1).
        states: rate of `h`, where the state is `h` or `(h, c)`; it is dropped on its
            way into the products of every step. What a GRU keeps of `h` stays whole.
        outputs: rate of the outputs.
        masks: `DropoutMasks`, or None; `sample` fills them in.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: an argument of the wrong type, or a `states` rate around a cell whose
            state is neither `h` nor `(h, c)`.
        ValueError: a rate outside of [0, 1).

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

    def sample(self, key: Array, batch: int) -> Dropout:
        """The same cell with fresh masks for `batch` rows, to train with."""
        batch = _checks.check_size("batch", batch, 0)
        keys = jax.random.split(_checks.check_key(key), 3)
        rates = (self.inputs, self.states, self.outputs)
        sizes = (self.input_size, self.output_size, self.output_size)
        masks = [
            # The rate in float32: the masks do not depend on the x64 flag.
            jax.random.bernoulli(k, jnp.float32(1 - rate), (batch, size))
            if rate
            else None
            for k, rate, size in zip(keys, rates, sizes, strict=True)
        ]
        return dataclasses.replace(self, masks=DropoutMasks(*masks))

    def precompute(self, params: Any, inputs: Any) -> Any:
        """As the inner cell, of the inputs that are kept."""
        if self.masks is not None:
            inputs = self._keep("inputs", inputs)
        return self.cell.precompute(params, inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step, on what `precompute` made."""
        if self.masks is None:
            return self.cell.step(params, states, inputs_t, t)
        if self.masks.states is None:
            states, output = self.cell.step(params, states, inputs_t, t)
        else:
            seen = self._keep("states", _split_h(states)[0])
            states, output = self.cell.step_seeing(params, states, seen, inputs_t, t)
        return states, self._keep("outputs", output)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """`step`, where products see what is kept of `seen`."""
        if self.masks is not None:
            seen = self._keep("states", seen)
        states, output = self.cell.step_seeing(params, states, seen, inputs_t, t)
        return states, self._keep("outputs", output) if self.masks else output

    def _keep(self, name: str, a: Array, batch_axis: int | None = None) -> Array:
        """What the mask `[B, F]` of that name keeps of `[..., B, F]`, scaled.

        Args:
            name: of the mask and of its rate.
            a: with axes between B and F where the cell's states have them.
            batch_axis: where B is, if not there.
        """
        mask = getattr(self.masks, name)
        if mask is None:
            return a
        if batch_axis is None:
            batch_axis = a.ndim - _rank(self.cell)
        sizes = (a.shape[batch_axis], a.shape[-1])
        if mask.shape != sizes:
            raise ValueError(
                f"`masks` must be of the call's [B, F] = {list(sizes)}, got "
                f"{list(mask.shape)}; `sample` them for as many rows"
            )
        between = range(batch_axis + 1, a.ndim - 1)
        kept = jnp.expand_dims(mask, (*range(batch_axis), *between))
        kept = jnp.broadcast_to(kept, a.shape)
        rate = getattr(self, name)
        return jnp.where(kept, a / (1 - rate), jnp.zeros((), a.dtype))

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """As the inner cell, with what is kept; step by step if states are dropped."""
        run = self.cell.run_sequence
        if self.masks is None:
            return run(params, inputs, initial_states, options)
        if self.masks.states is not None or _rank(self.cell) != 2:
            return None
        batch_axis = 1 if options.time_major else 0
        inputs = _checks.check_array("inputs", inputs)
        kept = self._keep("inputs", inputs, batch_axis)
        whole = run(params, kept, initial_states, options)
        if whole is None:
            return None
        outputs = self._keep("outputs", whole.outputs, batch_axis)
        return whole._replace(outputs=outputs)


@dataclasses.dataclass(frozen=True)
class Zoneout(_Wrapper):
    """Lets units keep their state: a random choice in every step, of every unit.

    With `m` 1 for a unit that keeps its state, which happens at the rate given:

        h_t = m * h_{t-1} + (1 - m) * cell(x_t, h_{t-1})            training
        h_t = rate * h_{t-1} + (1 - rate) * cell(x_t, h_{t-1})      evaluation

    and so for `c`. The output is `h_t`. As made, the cell evaluates; for training, hand
    `sample(key)` to `recurrent_net`, with a fresh key each time. The choice of step t
    follows from `fold_in(key, t)`.

    Args:
        cell: the inner cell; its state is `h` or `(h, c)`, its output `h`. What adds to
            the output goes around: `Residual(Zoneout(cell))`.
        h_rate: rate of `h`, in [0, 1).
        c_rate: rate of `c`, in [0, 1); 0 where there is none.
        key: a PRNG key, or None; `sample` fills it in.

    Parameters, states and recompute names: those of `cell`.

    Raises:
        TypeError: an argument of the wrong type, or a cell with other states.
        ValueError: a rate outside of [0, 1), `c_rate` for a cell without `c`, or a cell
            whose output is not its `h`.

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
        _check_gives_h(self.cell)
        if self.c_rate and not has_c:
            raise ValueError(
                f"`c_rate` must be 0 for {type(self.cell).__name__}, which has no c, "
                f"got {self.c_rate}"
            )

    def sample(self, key: Array) -> Zoneout:
        """The same cell with random choices from `key`, to train with."""
        return dataclasses.replace(self, key=_checks.check_key(key))

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step, on what `precompute` made."""
        new, _ = self.cell.step(params, states, inputs_t, t)
        return self._choose(states, new, t)

    def step_seeing(
        self, params: Any, states: Any, seen: Array, inputs_t: Any, t: Array
    ) -> Any:
        """`step`, where products see `seen`; what a unit keeps is `h` itself."""
        new, _ = self.cell.step_seeing(params, states, seen, inputs_t, t)
        return self._choose(states, new, t)

    def _choose(self, states: Any, new: Any, t: Array) -> Any:
        """Of each unit the old state or the new one."""
        h_prev, c_prev = _split_h(states)
        h, c = _split_h(new)
        keys = (None, None)
        if self.key is not None:
            keys = jax.random.split(jax.random.fold_in(self.key, t))
        h = _zoneout(keys[0], self.h_rate, h_prev, h)
        if c is not None:
            c = _zoneout(keys[1], self.c_rate, c_prev, c)
        return _join_h(h, c), h


def _zoneout(key: Any, rate: float, old: Array, new: Array) -> Array:
    if not rate:
        return new
    if key is None:
        return rate * old + (1 - rate) * new
    kept = jax.random.bernoulli(key, jnp.float32(rate), new.shape)
    return jnp.where(kept, old, new)


def _rank(cell: SizedCell) -> int:
    """The axes of one step's inputs and outputs: 2, or more if they are images."""
    states = jax.eval_shape(lambda: cell.initial_state(1, jnp.float32))
    return max((a.ndim for a in jax.tree.leaves(states)), default=2)


def _check_gives_h(cell: SizedCell) -> None:
    """ValueError where a wrapper adds to the output, which Zoneout does not hand on."""
    while isinstance(cell, _Wrapper):
        if isinstance(cell, Residual) or isinstance(cell, Dropout) and cell.outputs:
            raise ValueError(
                f"`cell` must give its h as it is, got {type(cell).__name__}, which "
                f"changes it; wrap {type(cell).__name__} around Zoneout instead"
            )
        cell = cell.cell


def _check_has_h(cell: SizedCell, name: str) -> bool:
    """Whether there is a `c` beside `h`; TypeError if the states are neither."""
    states = jax.eval_shape(lambda: cell.initial_state(1, jnp.float32))
    pair = type(states) is tuple and len(states) == 2
    if not all(hasattr(a, "shape") for a in (states if pair else (states,))):
        raise TypeError(
            f"`{name}` needs a cell whose state is h or (h, c), got "
            f"{type(cell).__name__}; wrap the cell inside instead"
        )
    return pair


def _split_h(states: Any) -> tuple[Array, Any]:
    return states if isinstance(states, tuple) else (states, None)


def _join_h(h: Array, c: Any) -> Any:
    return h if c is None else (h, c)
