"""Recurrent layers of `flax.nnx`: over the user's own cells, and layers of our own.

    from ostinato.nn.flax import RNN, Bidirectional           # over cells
    from ostinato.nn.flax import LSTM, GRU, RNN, Recurrent    # of our own

`RNN` and `Bidirectional` take the place of `nnx.RNN` and `nnx.Bidirectional`: the same
arguments, the same tree of parameters, the same numbers. `LSTM`, `GRU`, `Layer` and
`Recurrent` have parameters of their own. So has `RNN(input_size, hidden_size)`, called
with sizes in place of a cell: it makes a `PlainRNN`.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp

from .._modules import not_installed

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise not_installed(error, "flax") from None

from .. import LayerWeights, _checks, pack_weights, unpack_weights
from .._padding import select
from .._rnn import backends
from .._rnn.backends import Explanation
from .._typing import Array, Bool, Float, Int
from ..interop.flax import from_cell
from ..interop.imported import Imported
from . import _flax_serialization as _flax_serialization
from ._cells import FrozenCell
from ._flax_cells import Recurrent
from ._flax_layers import GRU, LSTM, Layer, PlainRNN
from ._layers import FrozenLayer
from ._sequences import (
    cell_dtype_reason,
    check_carry,
    from_carry,
    leading_sizes,
    run_fused,
    to_carry,
    too_short_reason,
)

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "FrozenCell",
    "FrozenLayer",
    "Layer",
    "PlainRNN",
    "Recurrent",
]


class RNN(nnx.RNN):
    """`nnx.RNN` that runs standard cells on the fused operator.

    Takes the arguments of `nnx.RNN`. The fused operator runs `LSTMCell`,
    `OptimizedLSTMCell`, `GRUCell` and `SimpleCell` with their default activations,
    layers that are plain `nnx.Linear`, and without a residual connection, on inputs,
    parameters and carry of one dtype; every other cell, and calls of a few steps
    without `seq_lengths` and `resets`, run as in `nnx.RNN`. `explain(x)` tells which.

    Past the end of a sequence, the fused operator and calls with `resets` return
    outputs of 0, where `nnx.RNN` goes on with the padding; a sequence of length 0 then
    returns its initial carry. `unroll` means nothing to the fused operator.

    With two sizes in place of a cell, `RNN(input_size, hidden_size, ...)` makes a
    `PlainRNN`, a layer of our own with other arguments and results.

    Holds under every nnx transformation, and under those of JAX where
    `initial_carry` is given: like `nnx.RNN`, a call without it draws from `rngs`, which
    only nnx's own transformations may change.
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, input_size: int, hidden_size: int, *args: Any, **options: Any
        ) -> PlainRNN: ...

        @overload
        def __new__(cls, cell: Any, **options: Any) -> RNN: ...

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make a `PlainRNN` of sizes, and an `RNN` of a cell."""
        sizes = "input_size" in options or isinstance(
            (*args, None)[0], numbers.Integral
        )
        # The metaclass of nnx goes on to call `__init__` of the class of the result.
        return object.__new__(PlainRNN if cls is RNN and sizes else cls)

    def __call__(
        self,
        inputs: Float[Array, "*B T I"],
        *,
        initial_carry: Any = None,
        seq_lengths: Int[Array, "*B"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Any = None,
        resets: Bool[Array, "*B T"] | None = None,
    ) -> Any:
        """Run the cell over the sequences.

        Args:
            inputs: `[*batch, T, I]`, or `[T, *batch, I]` if `time_major`.
            initial_carry: as the cell's `initialize_carry` returns it; None: that.
            seq_lengths: integers `[*batch]`, each in 0..T.
            return_carry: whether to return `(carry, outputs)`; None: as constructed.
            time_major: None: as constructed.
            reverse: None: as constructed.
            keep_order: None: as constructed.
            rngs: for the cell's `initialize_carry`.
            resets: bool `[*batch, T]`, or `[T, *batch]`: True makes the carry 0 before
                that step. Not with `reverse`.

        Returns:
            The outputs, laid out as `inputs`, or `(carry, outputs)`.

        Raises:
            TypeError: `resets` are not bools.
            ValueError: `resets` with `reverse`, or a wrong shape.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        if resets is not None and reverse:
            raise ValueError("`resets` must be None with reverse=True")
        network = _network(self.cell, inputs, initial_carry)
        if isinstance(network, str) and resets is None:
            return super().__call__(
                inputs,
                initial_carry=initial_carry,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                reverse=reverse,
                keep_order=keep_order,
                rngs=rngs,
            )
        if initial_carry is None:
            initial_carry = self._initial_carry(inputs, time_major, rngs)
        if isinstance(network, str):
            carry, outputs = _scan_with_resets(
                self, initial_carry, inputs, seq_lengths, resets, time_major
            )
            return (carry, outputs) if return_carry else outputs
        if resets is None and seq_lengths is None:
            if too_short_reason(network.spec, inputs):
                axis = 0 if time_major else inputs.ndim - 2
                carry, outputs = _scan(self.cell, initial_carry, inputs, axis, reverse)
                if reverse and keep_order:
                    outputs = jnp.flip(outputs, axis)
                return (carry, outputs) if return_carry else outputs
        check_carry("initial_carry", initial_carry, network.spec, inputs, time_major)
        states, outputs = run_fused(
            network.spec,
            network.weights,
            inputs,
            from_carry(initial_carry),
            seq_lengths=seq_lengths,
            resets=resets,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
        )
        return (to_carry(states), outputs) if return_carry else outputs

    def explain(self, inputs: Any) -> Explanation:
        """Say whether the fused operator runs the cell on `inputs`, and why not.

        Returns:
            `ostinato.Explanation`: that of `ostinato.explain`, or the backend
            `"flax"` with the reason why the cell runs as in `nnx.RNN`.
        """
        network = _network(self.cell, inputs, None)
        if isinstance(network, str):
            reason = network
        else:
            reason = too_short_reason(network.spec, inputs)
            if reason is None:
                return backends.explain(network.spec, inputs)
        rejected = {name: reason for name in ("cuda", "cpu", "xla")}
        return Explanation("flax", "step by step, as nnx.RNN runs it", rejected)

    def _initial_carry(self, inputs: Array, time_major: bool, rngs: Any) -> Any:
        axis = 0 if time_major else inputs.ndim - 2
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.carry.fork()
        shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
        return self.cell.initialize_carry(shape, rngs)


RNN.register(PlainRNN)  # so that what `RNN` makes is an instance of it


def _network(cell: Any, inputs: Any, carry: Any) -> Imported | str:
    """Return the cell as the fused operator runs it, or why it does not."""
    try:
        network = from_cell(cell)
    except (TypeError, ValueError) as error:
        return str(error)
    return cell_dtype_reason(cell, network.weights.dtype, inputs, carry) or network


def _scan(
    cell: Any, carry: Any, inputs: Array, axis: int, reverse: bool
) -> tuple[Any, Array]:
    """Run a standard cell step by step, with outputs in the order of the steps run."""
    graph, state = nnx.split(cell)  # `nnx.scan` takes no cell of an outer trace
    xs = jnp.moveaxis(inputs, axis, 0)
    carry, ys = jax.lax.scan(
        lambda carry, x: nnx.merge(graph, state)(carry, x),
        carry,
        jnp.flip(xs, 0) if reverse else xs,
    )
    return carry, jnp.moveaxis(ys, 0, axis)


def _scan_with_resets(
    layer: RNN,
    carry: Any,
    inputs: Array,
    seq_lengths: Array | None,
    resets: Array | None,
    time_major: bool,
) -> tuple[Any, Array]:
    """Run any cell step by step, with a carry that becomes 0 at resets."""
    cell = layer.cell
    time_axis = 0 if time_major else inputs.ndim - (cell.num_feature_axes + 1)
    leading = inputs.shape[: inputs.ndim - cell.num_feature_axes]
    resets = _checks.check_mask("resets", resets, **leading_sizes(leading, time_axis))
    xs = jnp.moveaxis(inputs, time_axis, 0)
    valid = None
    if seq_lengths is not None:
        t = jnp.arange(len(xs), dtype=jnp.int32)
        t = jnp.expand_dims(t, tuple(range(1, 1 + jnp.ndim(seq_lengths))))
        valid = t < jnp.asarray(seq_lengths).astype(jnp.int32)[None]
    resets = jnp.moveaxis(resets, time_axis, 0)

    broadcast = nnx.All(nnx.RngState, layer.broadcast_rngs)
    axes = nnx.StateAxes({broadcast: None, **layer.state_axes})

    # As nnx.RNN does it: what is broadcast is drawn anew at each call, not each step.
    @nnx.split_rngs(splits=1, only=layer.broadcast_rngs, squeeze=True)
    @nnx.scan(in_axes=(axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(cell: Any, old: Any, at: tuple) -> tuple[Any, Array]:
        x, reset, valid = at
        new, y = cell(select(~reset, old), x)
        return (
            (new, y) if valid is None else (select(valid, new, old), select(valid, y))
        )

    carry, outputs = step(cell, carry, (xs, resets, valid))
    return carry, jnp.moveaxis(outputs, 0, time_axis)


class Bidirectional(nnx.Bidirectional):
    """`nnx.Bidirectional` that runs two standard cells in one fused call.

    Takes the arguments of `nnx.Bidirectional`. Two `RNN` of this module over cells of
    one kind and size, neither constructed with `reverse=True`, run as one call of
    `ostinato.rnn`; everything else runs as in `nnx.Bidirectional`, each direction
    fused where it can be.
    """

    def __call__(
        self,
        inputs: Float[Array, "*B T I"],
        *,
        initial_carry: tuple[Any, Any] | None = None,
        rngs: Any = None,
        seq_lengths: Int[Array, "*B"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Run both directions; arguments and results as for `nnx.Bidirectional`."""
        options = {"reverse": reverse, "keep_order": keep_order}  # unused there, too
        both: tuple[Any, Any] = (self.forward_rnn, self.backward_rnn)
        given = (None, None) if initial_carry is None else tuple(initial_carry)
        if len(given) != 2:
            raise ValueError(
                "`initial_carry` must be a pair, the carry of the forward layer and "
                f"that of the backward layer, got {len(given)} of them"
            )
        networks = _both_networks(both, inputs, given, seq_lengths)
        if networks is None:
            return super().__call__(
                inputs,
                initial_carry=initial_carry,
                rngs=rngs,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                **options,
            )
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        rngs = self.rngs if rngs is None else rngs
        initial_carry = tuple(
            layer._initial_carry(inputs, time_major, rngs) if carry is None else carry
            for layer, carry in zip(both, given, strict=True)
        )
        for number, carry in enumerate(initial_carry):
            name = f"initial_carry[{number}]"
            check_carry(name, carry, networks[0].spec, inputs, time_major)
        spec = dataclasses.replace(networks[0].spec, bidirectional=True)
        layers: list[LayerWeights] = []
        for network in networks:
            layers += unpack_weights(network.weights, network.spec)
        states = zip(*map(from_carry, initial_carry), strict=True)
        final, outputs = run_fused(
            spec,
            pack_weights(layers, spec),
            inputs,
            [jnp.stack(pair) for pair in states],
            seq_lengths=seq_lengths,
            time_major=time_major,
        )
        merged = self.merge_fn(*jnp.split(outputs, 2, axis=-1))
        if not return_carry:
            return merged
        carries = tuple(to_carry(tuple(a[n] for a in final)) for n in range(2))
        return carries, merged


def _both_networks(
    layers: Any, inputs: Array, carries: Any, seq_lengths: Any
) -> list[Imported] | None:
    """Return the directions of one fused network; None if two layers are not that."""
    found: list[Imported] = []
    for layer, carry in zip(layers, carries, strict=True):
        if type(layer) is not RNN or layer.reverse:
            return None
        network = _network(layer.cell, inputs, carry)
        if isinstance(network, str):
            return None
        if seq_lengths is None and too_short_reason(network.spec, inputs):
            return None
        found.append(network)
    first, second = found
    same = first.spec == second.spec and first.weights.dtype == second.weights.dtype
    return found if same else None
