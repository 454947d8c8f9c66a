"""Several cells as one: layers on top of each other, and both directions."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.net import recurrent_net
from .._recurrent.protocol import RecurrentOutput, SequenceOptions
from .._typing import Array
from . import fused
from .base import SizedCell, check_cell


@dataclasses.dataclass(frozen=True)
class Stack(SizedCell):
    """Layers of any cells and widths: each one's output is the next one's input.

    `recurrent_net` runs the layers one after the other over the whole sequence, so that
    each has its input products out of the loop, and runs fused where it can. With
    `recompute=True` or a `segment_length` it steps through all layers at once instead,
    which stores nothing between layers.

    Args:
        cells: the layers, first to last; each one's `input_size` is the `output_size`
            of the one before.

    Parameters and states: tuples, one item a layer. Output: the last layer's.
    Recompute names: those of all layers.

    Raises:
        TypeError: `cells` is no sequence of cells.
        ValueError: there are none, or their sizes do not fit; the message says which.

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
        """Those of all layers."""
        return tuple(dict.fromkeys(n for c in self.cells for n in c.recompute_names))

    @property
    def has_step(self) -> bool:
        """Whether every layer has."""
        return all(cell.has_step for cell in self.cells)

    def init(self, key: Array, dtype: Any = jnp.float32) -> tuple:
        """Parameters of every layer, each from a key of its own."""
        keys = jax.random.split(_checks.check_key(key), len(self.cells))
        return tuple(c.init(k, dtype) for c, k in zip(self.cells, keys, strict=True))

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> tuple:
        """The initial states of every layer."""
        return tuple(cell.initial_state(batch, dtype) for cell in self.cells)

    def prepare(self, params: Any) -> tuple:
        """As every layer."""
        self._check_items("params", params)
        return tuple(c.prepare(p) for c, p in zip(self.cells, params, strict=True))

    def precompute(self, params: Any, inputs: Any) -> Any:
        """As the first layer."""
        return self.cells[0].precompute(params[0], inputs)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step through all layers, on what `precompute` made."""
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
        """Layer after layer, unless the caller wants as little stored as can be."""
        saves_most = options.recompute is True or options.segment_length is not None
        if self.has_step and (saves_most or options.window != 1):
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

    def _check_items(self, name: str, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.cells):
            raise TypeError(
                f"`{name}` must be a tuple with one item for each of the "
                f"{len(self.cells)} cells, got {_checks.describe(value)}"
            )


class BothDirections(NamedTuple):
    """Parameters or states of a `Bidirectional` cell: one item for each direction."""

    forward: Any
    backward: Any


@dataclasses.dataclass(frozen=True)
class Bidirectional(SizedCell):
    """Two cells over the same sequence, one from each end, outputs joined.

    The backward cell starts at each row's own end. For whole sequences in
    `recurrent_net` alone: it has no single step, takes no `resets` and no `reverse`.
    Two standard cells of one kind run as one fused call.

    Args:
        forward: the cell that runs from the start.
        backward: the cell that runs from the end; None takes one like `forward`, with
            parameters of its own. Random choices, of a sampled `Dropout` or `Zoneout`,
            are then the same in both: for others hand over two samples.

    Parameters and states: `BothDirections`. Output: `[forward's, backward's]` in the
    order of the inputs. Recompute names: those of both.

    Raises:
        TypeError: an argument is no cell.
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
        """The two cells."""
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
        """Those of both cells."""
        return tuple(dict.fromkeys(n for c in self.both for n in c.recompute_names))

    @property
    def has_step(self) -> bool:
        """It has none."""
        return False

    def init(self, key: Array, dtype: Any = jnp.float32) -> BothDirections:
        """Parameters of both cells, each from a key of its own."""
        keys = jax.random.split(_checks.check_key(key))
        pairs = zip(self.both, keys, strict=True)
        return BothDirections(*(cell.init(k, dtype) for cell, k in pairs))

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> BothDirections:
        """The initial states of both cells; the backward one's stand at the end."""
        return BothDirections(*(c.initial_state(batch, dtype) for c in self.both))

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Not one at a time."""
        raise ValueError(
            "a `Bidirectional` cell has no single step, it needs the whole sequence: "
            "hand it to `recurrent_net`, with window=1, by itself or in a `Stack`"
        )

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Both directions, in one fused call where that can be."""
        if options.window != 1:
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
        whole = options.segment_length is None and fused.alike(*cells)
        if whole and fused.supports(options):
            return fused.run_both(cells, params, inputs, initial_states, options)
        forward, backward = (
            _run_cell(cell, p, inputs, s, options._replace(reverse=reverse))
            for cell, p, s, reverse in zip(
                cells, params, initial_states, (False, True), strict=True
            )
        )
        outputs = jnp.concatenate([forward.outputs, backward.outputs], axis=-1)
        kept = None
        if options.return_all_states:
            kept = BothDirections(forward.all_states, backward.all_states)
        return RecurrentOutput(
            outputs, BothDirections(forward.states, backward.states), kept
        )


def _check_names(cell: SizedCell, recompute: Any) -> None:
    """ValueError for a name that none of the inner cells has."""
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
    """`recurrent_net` over one of several cells, with the names that it has."""
    recompute = options.recompute
    if recompute is not True:
        recompute = tuple(n for n in recompute if n in cell.recompute_names)
    return recurrent_net(
        cell,
        inputs,
        states,
        params=params,
        seq_lengths=options.seq_lengths,
        resets=options.resets,
        reverse=options.reverse,
        time_major=options.time_major,
        padding=options.padding,
        recompute=recompute,
        segment_length=options.segment_length,
        return_all_states=options.return_all_states,
        window=options.window,
    )
