"""Cells as layers of `flax.nnx`, which `ostinato.nn.flax` exports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .. import RNNOutput, _checks
from .._typing import Array, ArrayLike, Bool, Int, Padding
from ..cells import Cell
from ..cells.sampling import is_random
from . import _cells
from ._cells import FrozenCell
from ._flax_rngs import call_key, check_rngs, dropout_stream

nnx.register_data_type(FrozenCell)  # so that a module can have one as an attribute


class Recurrent(nnx.Module):
    """Any cell of `ostinato.cells` as a layer, run by `ostinato.recurrent_net`.

    Args:
        cell: a cell, which may consist of others: `cells.Stack`, `cells.Dropout`, ...
            It holds no arrays; one with a memory is given to a call.
        dtype: of the parameters.
        recompute: as for `ostinato.recurrent_net`.
        segment_length: as for `ostinato.recurrent_net`.
        rngs: the stream `params` draws the parameters; if the cell has a
            `cells.Dropout` or `cells.Zoneout`, the stream `dropout` gives a key to each
            call.

    Attributes:
        cell: the cell.
        params: its parameters, in the structure of `cell.init`; every array is an
            `nnx.Param`.
        deterministic: True turns random choices off; `layer.eval()` and `layer.train()`
            set it.

    Raises:
        TypeError: `cell` is not a cell, or holds arrays.

    Holds under every JAX and nnx transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> from flax import nnx
        >>> from ostinato.nn.flax import Recurrent
        >>> layer = Recurrent(ost.cells.LayerNormGRU(3, 5), rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((2, 7, 3)))
        >>> y.shape, state.shape, layer.params.w_hh.shape
        ((2, 7, 5), (2, 5), (15, 5))
    """

    def __init__(
        self,
        cell: Cell,
        *,
        dtype: Any = jnp.float32,
        recompute: Iterable[str] | bool = (),
        segment_length: int | Literal["auto"] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.cell = _cells.check_cell(cell)
        self.recompute = _cells.hashable_recompute(recompute)
        self.segment_length = segment_length
        self.deterministic = False
        params = self.cell.init(check_rngs(rngs).params(), dtype)
        self.params: Any = nnx.data(jax.tree.map(nnx.Param, params))
        random = is_random(cell)
        self.rngs = dropout_stream(rngs) if random else nnx.data(None)

    def __call__(
        self,
        x: Any,
        initial_state: Any = None,
        *,
        seq_lengths: Int[ArrayLike, " B"] | None = None,
        mask: Bool[ArrayLike, "B T"] | None = None,
        resets: Bool[Array, "B T"] | None = None,
        key: Array | None = None,
        padding: Padding = "zero",
        time_major: bool = False,
        cell: Cell | None = None,
    ) -> RNNOutput:
        """Run the cell over a batch of sequences.

        Args:
            x: the inputs of the cell, arrays `[B, T, ...]`, or `[T, B, ...]` if
                `time_major`.
            initial_state: as `initial_state` returns it; None: that.
            seq_lengths: integers `[B]`, each in 0..T.
            mask: bool `[B, T]`, True at valid steps, with gaps anywhere, instead of
                `seq_lengths`. A masked step leaves the state as it is; with
                `padding="hold"`, outputs before the first valid step are 0.
            resets: bool `[B, T]`: where True, the state becomes 0 before that step;
                they do nothing past the end of a sequence.
            key: a PRNG key for random choices; None takes one from the stream
                `dropout`.
            padding: what outputs are past the end: `"zero"`, `"hold"` or `"drop"`.
            time_major: whether time is the first axis.
            cell: run this cell with the parameters of the layer, such as
                `layer.cell.attend(memory)`; None: `layer.cell`.

        Returns:
            `RNNOutput(y, state)`: the outputs of all steps and the final states.

        Raises:
            TypeError, ValueError: as `ostinato.recurrent_net`, which says more on every
                argument.
            ValueError: there are random choices, and neither a `key` nor a stream.
        """
        cell = self.cell if cell is None else cell
        key = call_key(self, key, is_random(cell))
        return _cells.run_cell(
            cell,
            self._arrays(),
            x,
            initial_state,
            key=key,
            seq_lengths=seq_lengths,
            mask=mask,
            resets=resets,
            padding=padding,
            time_major=time_major,
            recompute=self.recompute,
            segment_length=self.segment_length,
        )

    def step(
        self,
        x_t: Any,
        state: Any = None,
        *,
        resets: Bool[ArrayLike, " B"] | None = None,
        active: Bool[ArrayLike, " B"] | None = None,
        cell: Cell | None = None,
    ) -> RNNOutput:
        """Run one step without random choices.

        Args:
            x_t: arrays `[B, ...]`.
            state: as the step before returned it; None: as `initial_state` returns it.
            resets: bool `[B]`: where True, the state becomes 0 before the step.
            active: bool `[B]`: where False, a stream keeps its state, and its output is
                0.
            cell: as for a call.

        Returns:
            `RNNOutput(y, state)`.

        Raises:
            ValueError: the cell has two directions, or a shape is wrong.
        """
        cell = self.cell if cell is None else cell
        params = self._arrays()
        return _cells.step_cell(cell, params, x_t, state, resets=resets, active=active)

    def initial_state(self, batch: int) -> Any:
        """Return the states of `batch` sequences before the first step."""
        return _cells.initial_state(self.cell, self._arrays(), batch)

    def freeze(self) -> FrozenCell:
        """Return the layer for serving, with its parameters as plain arrays."""
        return FrozenCell(self.cell, self._arrays())

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the attribute `deterministic`, for `nnx.view`.

        Args:
            deterministic: True turns random choices off; None leaves it as it is.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _arrays(self) -> Any:
        is_variable = lambda a: isinstance(a, nnx.Variable)  # noqa: E731
        return jax.tree.map(_checks.unwrap, self.params, is_leaf=is_variable)
