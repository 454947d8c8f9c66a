"""Cells made of several cells: stacked layers, and two directions."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.net import run_checked
from .._recurrent.protocol import RecurrentOutput, SequenceOptions, overrides_step
from .._typing import Array
from . import fused
from .base import SizedCell, check_cell, check_output


@dataclasses.dataclass(frozen=True)
class Stack(SizedCell):
    """A stack of any cells of any widths; the output of each is the input of the next.

    `recurrent_net` runs the layers one after the other over the whole sequence, so that
    each layer has its input products outside the loop, and runs fused if it can. With
    `recompute=True` or a `segment_length`, it runs all layers at each step instead,
    which stores no values between layers.

    Args:
        cells: the layers, first to last; the `input_size` of each is the `output_size`
            of the one before.

    Parameters and states: tuples with one item for each layer. Output: that of the last
    layer. Recompute names: those of all layers.

    Raises:
        TypeError: `cells` is not a tuple or list of cells.
        ValueError: it is empty, or sizes do not match; the message says which.

    Holds under every JAX transformation.
    """

    cells: tuple[SizedCell, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.cells, (tuple, list)):
            raise TypeError(
                f"`cells` must be a tuple of cells, got {_checks.describe(self.cells)}"
            )
        object.__setattr__(self, "cells", tuple(self.cells))
        if not self.cells:
            raise ValueError("`cells` must hold at least one cell, got none")
        for n, cell in enumerate(self.cells):
            check_cell(f"cells[{n}]", cell)
        for n, (below, cell) in enumerate(itertools.pairwise(self.cells), 1):
            if cell.input_size != below.output_size:
                raise ValueError(
                    f"`cells[{n}]` must have input_size={below.output_size}, the "
                    f"output_size of the cell below, got {cell.input_size}"
                )

    @property
    def input_size(self) -> int:
        """Features of the first layer's input."""
        return self.cells[0].input_size

    @property
    def output_size(self) -> int:
        """Features of the last layer's output."""
        return self.cells[-1].output_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts: those of all layers."""
        return tuple(dict.fromkeys(n for c in self.cells for n in c.recompute_names))

    @property
    def has_step(self) -> bool:
        """True if every layer can run one step at a time."""
        return all(cell.has_step for cell in self.cells)

    def init(self, key: Array, dtype: Any = jnp.float32) -> tuple:
        """Draw the parameters of every layer, each from a key of its own."""
        keys = jax.random.split(_checks.check_key(key), len(self.cells))
        return tuple(c.init(k, dtype) for c, k in zip(self.cells, keys, strict=True))

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> tuple:
        """Return the initial states of every layer."""
        return tuple(cell.initial_state(batch, dtype) for cell in self.cells)

    def prepare(self, params: Any) -> tuple:
        """Prepare the parameters of every layer."""
        self._check_items("params", params)
        return tuple(c.prepare(p) for c, p in zip(self.cells, params, strict=True))

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Run `precompute` of the first layer."""
        return self.cells[0].precompute(params[0], inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step of all layers on a result of `precompute`."""
        self._check_items("states", states)
        new_states, output = [], inputs_t
        for n, cell in enumerate(self.cells):
            if n:
                output = cell.precompute(params[n], output)
            state, output = cell.step(params[n], states[n], output, t)
            new_states.append(state)
        return tuple(new_states), output

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run layer after layer; return None if the options ask to store little."""
        if overrides_step(self) or not self.runs_layers(
            options.recompute, options.segment_length, options.window
        ):
            return None
        _check_names(self, options.recompute)
        self._check_items("params", params)
        self._check_items("states", initial_states)
        states, all_states = [], []
        for n, cell in enumerate(self.cells):
            result = _run_cell(cell, params[n], inputs, initial_states[n], options)
            inputs = result.outputs
            states.append(result.states)
            all_states.append(result.all_states)
        kept = tuple(all_states) if options.return_all_states else None
        return RecurrentOutput(inputs, tuple(states), kept)

    def runs_layers(
        self, recompute: Any, segment_length: Any, window: int | None
    ) -> bool:
        """Return whether each layer runs over the whole sequence before the next."""
        saves_most = recompute is True or segment_length is not None
        return not (self.has_step and (saves_most or window != 1))

    def _check_items(self, name: str, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.cells):
            raise TypeError(
                f"`{name}` must be a tuple with one item for each of the "
                f"{len(self.cells)} cells, got {_checks.describe(value)}"
            )


class BothDirections(NamedTuple):
    """Parameters or states of a `Bidirectional` cell, one item for each direction."""

    forward: Any
    backward: Any


@dataclasses.dataclass(frozen=True)
class Bidirectional(SizedCell):
    """Two cells over the same sequence, one from each end, with concatenated outputs.

    The backward cell starts at the end of each sequence. The cell runs only whole
    sequences in `recurrent_net`: it has no single step, and takes no `resets` and no
    `reverse`. Two standard cells of one kind run as one fused call.

    Args:
        forward: the cell that runs from the start.
        backward: the cell that runs from the end; None takes one like `forward`, with
            parameters of its own. Random choices of a sampled `Dropout` or `Zoneout`
            are then the same in both; for different ones, give two samples.

    Parameters and states: `BothDirections`. Output: the outputs of `forward`, then of
    `backward`, on the last axis, in the order of the inputs. Recompute names: those of
    both.

    Raises:
        TypeError: an argument is not a cell.
        ValueError: the cells' input sizes differ.

    Holds under every JAX transformation.

    References:
        Schuster and Paliwal (1997), doi:10.1109/78.650093
    """

    forward: SizedCell
    backward: SizedCell | None = None

    def __post_init__(self) -> None:
        check_cell("forward", self.forward)
        if self.backward is None:
            return
        check_cell("backward", self.backward)
        if self.backward.input_size != self.forward.input_size:
            raise ValueError(
                f"`backward` must have input_size={self.forward.input_size}, that of "
                f"`forward`, got {self.backward.input_size}"
            )

    @property
    def both(self) -> BothDirections:
        """The two cells, forward and backward."""
        backward = self.forward if self.backward is None else self.backward
        return BothDirections(self.forward, backward)

    @property
    def input_size(self) -> int:
        """Features of one input step."""
        return self.forward.input_size

    @property
    def output_size(self) -> int:
        """Features of both outputs."""
        return sum(cell.output_size for cell in self.both)

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts: those of both cells."""
        return tuple(dict.fromkeys(n for c in self.both for n in c.recompute_names))

    @property
    def has_step(self) -> bool:
        """False, since both directions need the whole sequence."""
        return False

    def init(self, key: Array, dtype: Any = jnp.float32) -> BothDirections:
        """Draw the parameters of both cells, each from a key of its own."""
        keys = jax.random.split(_checks.check_key(key))
        pairs = zip(self.both, keys, strict=True)
        return BothDirections(*(cell.init(k, dtype) for cell, k in pairs))

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> BothDirections:
        """Return the initial states of both cells; `backward` starts at the end."""
        return BothDirections(*(c.initial_state(batch, dtype) for c in self.both))

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Raise ValueError, since the cell has no single step."""
        raise ValueError(
            "a `Bidirectional` cell has no single step, it needs the whole sequence: "
            "hand it to `recurrent_net`, with window=1, by itself or in a `Stack`"
        )

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run both directions, in one fused call if possible."""
        if overrides_step(self) or options.window != 1:
            return None  # `step` says why not
        if options.reverse or options.resets is not None:
            name = "reverse" if options.reverse else "resets"
            raise ValueError(
                f"`{name}` needs cells of one direction, got a Bidirectional cell"
            )
        for name, value in (("params", params), ("states", initial_states)):
            if not isinstance(value, BothDirections):
                raise TypeError(
                    f"`{name}` must be BothDirections(forward, backward), got "
                    f"{_checks.describe(value)}"
                )
        _check_names(self, options.recompute)
        cells = self.both
        whole = options.segment_length is None and fused.have_same_spec(*cells)
        if whole and fused.supports(options):
            return fused.run_both(cells, params, inputs, initial_states, options)
        forward, backward = (
            _run_cell(cell, p, inputs, s, options._replace(reverse=reverse))
            for cell, p, s, reverse in zip(
                cells, params, initial_states, (False, True), strict=True
            )
        )
        both = zip(cells, (forward.outputs, backward.outputs), strict=True)
        outputs = jnp.concatenate([check_output(*pair) for pair in both], axis=-1)
        kept = None
        if options.return_all_states:
            kept = BothDirections(forward.all_states, backward.all_states)
        return RecurrentOutput(
            outputs, BothDirections(forward.states, backward.states), kept
        )


def _check_names(cell: SizedCell, recompute: Any) -> None:
    """Raise ValueError for a name that no inner cell has."""
    for name in () if recompute is True else recompute:
        if name not in cell.recompute_names:
            names = ", ".join(map(repr, cell.recompute_names)) or "none"
            raise ValueError(
                f"`recompute` must hold names that the cells give with ostinato.tag "
                f"and list in `recompute_names`, got {name!r}; they have: {names}"
            )


def _run_cell(
    cell: SizedCell, params: Any, inputs: Any, states: Any, options: SequenceOptions
) -> RecurrentOutput:
    """Run one inner cell with the same options, and those of the names that it has."""
    if options.recompute is not True:
        names = tuple(n for n in options.recompute if n in cell.recompute_names)
        options = options._replace(recompute=names)
    return run_checked(cell, params, inputs, states, options)
