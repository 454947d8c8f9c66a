"""The arguments and results of the primitives: one static value, some named tuples.

Arrays keep the order of their names here; None stands for an array that the call does
not have. `batch_axes` says which axis of each array is the batch, so that vmap and
sharding need to know nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._typing import Backend
from .accumulation import accumulation_dtype
from .spec import RNNSpec, cell_class, state_shapes


class Operands(NamedTuple):
    """The arguments of the operator.

    Attributes:
        weights: `[num_params]`.
        x: `[B, T, I]`, or `[T, B, I]` if time-major, or `[tokens, I]`, see `Packed`.
        states: the initial states, in the order of the table of modes: `[L*D, B, S]`,
            S = proj_size or hidden_size, then `[L*D, B, H]`.
        seq_lengths: int32 `[B]` in 0..T, or None.
        segment_lengths: for packed sequences, the number of tokens of each sequence in
            `x`, int32 `[B]`; otherwise None.
        resets: bool, in the shape of `x` without features, or None.
        dropout_masks: one for every layer except the last: bool, in the shape of `y`,
            True where an output is kept.
        prepared: uint8, a copy of `weights` in the order that a backend reads, or None.
    """

    weights: Any
    x: Any
    states: tuple
    seq_lengths: Any = None
    segment_lengths: Any = None
    resets: Any = None
    dropout_masks: tuple = ()
    prepared: Any = None


class Outputs(NamedTuple):
    """The results of the operator.

    Attributes:
        y: in the layout of `x`, 0 past the end of a sequence.
        states: the final states, in the shapes of `Operands.states`.
    """

    y: Any
    states: tuple


class Saved(NamedTuple):
    """The arrays that the training implementation stores beside its outputs.

    They are time-major whatever the layout of `x`. For packed sequences they are
    packed: `[tokens, ...]` takes the place of `[T, B, ...]`.

    Attributes:
        hidden: the output before dropout of every layer except the last,
            `[T, B, D*S]`.
        gates: for every pseudo-layer, the blocks that its cell saves in a step,
            `[T, B, blocks*H]`. Empty with `recompute`, or if the cell saves no block.
        states: for every pseudo-layer, all states except the output, `[T, B, H]` each,
            in the accumulation dtype.
    """

    hidden: tuple = ()
    gates: tuple = ()
    states: tuple = ()


class Residuals(NamedTuple):
    """The arrays that tangent and backward read beside the operands."""

    y: Any
    saved: Saved


class Differentiable(NamedTuple):
    """Tangents or gradients of the operands; None if zero, or if not asked for."""

    weights: Any = None
    x: Any = None
    states: tuple = ()

    def map(self, function: Callable, *others: Differentiable) -> Differentiable:
        """Apply `function` to each item together with the same item of all `others`."""
        trees = [(*item[:2], *item.states) for item in (self, *others)]
        weights, x, *states = (function(*items) for items in zip(*trees, strict=True))
        return Differentiable(weights, x, tuple(states))

    def items(self) -> tuple:
        """Return all items in one flat tuple."""
        return (self.weights, self.x, *self.states)


_HOLD_STEPS = {"x", "y", "resets", "dropout_masks"}


def holds_steps(tree: Any) -> Any:
    """Return `tree`, of this module's tuples, with a bool for each array.

    The bool is True if the array holds every step.
    """
    if isinstance(tree, Saved):
        return jax.tree.map(lambda _: True, tree)
    if not hasattr(tree, "_fields"):
        return None if tree is None else tuple(map(holds_steps, tree))

    def flags(name: str, value: Any) -> Any:
        if isinstance(value, Saved):
            return holds_steps(value)
        return jax.tree.map(lambda _: name in _HOLD_STEPS, value)

    return type(tree)(*map(flags, tree._fields, tree))


@dataclasses.dataclass(frozen=True)
class Packed:
    """A layout of `x`: sequences concatenated without padding, `[tokens, I]`.

    The tokens are split into buffers of equal capacity. A buffer holds `B / buffers`
    sequences, and `segment_lengths` says how many tokens each of them has. The unused
    capacity after the last sequence is ignored in arguments and 0 in results. Tokens
    that do not fit are cut off, and so are steps past `max_length`.

    Attributes:
        max_length: T, the largest number of steps of a sequence.
        buffers: the number of buffers; vmap over the data makes more than one.
    """

    max_length: int
    buffers: int = 1


@dataclasses.dataclass(frozen=True)
class RNNCall:
    """The static part of one call.

    Attributes:
        spec: the network.
        time_major: whether `x` and `y` are `[T, B, ...]`.
        save: also return `Saved`.
        recompute: keep no gates in `Saved`.
        precision: of float32 and float64 products, as in `jax.lax.dot_general`.
        backend: the requested backend, or None.
        packed: the layout, if `x` is `[tokens, I]`; then `time_major` has no effect.
    """

    spec: RNNSpec
    time_major: bool = False
    save: bool = False
    recompute: bool = False
    precision: Any = None
    backend: Backend | None = None
    packed: Packed | None = None

    @property
    def time_axis(self) -> int:
        return 0 if self.time_major else 1

    @property
    def saves_gates(self) -> bool:
        """True if `Saved` holds gates."""
        return bool(cell_class(self.spec).saved) and not self.recompute

    @property
    def dropout_scale(self) -> float:
        """The factor of a value that dropout keeps; at p = 1 it keeps nothing."""
        p = self.spec.dropout
        return 1 / (1 - p) if p < 1 else 0.0

    def sizes(self, operands: Operands) -> tuple[Any, Any]:
        """Return `(T, B)`; each may be a symbolic dimension."""
        if self.packed is not None:
            return self.packed.max_length, operands.states[0].shape[1]
        shape = operands.x.shape
        return shape[self.time_axis], shape[1 - self.time_axis]

    def output_shapes(self, operands: Operands) -> tuple[Outputs, Saved | None]:
        """Return shapes and dtypes of the results; `Saved` only if the call saves."""
        spec, dtype = self.spec, operands.x.dtype
        steps, batch = self.sizes(operands)
        entries = operands.x.shape[:-1]
        saved_entries = (steps, batch) if self.packed is None else entries
        width = spec.num_directions * spec.output_size
        pseudo_layers = spec.num_layers * spec.num_directions

        def struct(*shape: Any, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        first, *others = state_shapes(spec, batch)
        outputs = Outputs(
            y=struct(*entries, width),
            states=tuple(struct(*shape) for shape in (first, *others)),
        )
        if not self.save:
            return outputs, None
        blocks = len(cell_class(spec).saved)
        gates = struct(*saved_entries, blocks * spec.hidden_size)
        wide = accumulation_dtype(dtype)
        states = tuple(struct(*saved_entries, s[-1], dtype=wide) for s in others)
        saved = Saved(
            hidden=(struct(*saved_entries, width),) * (spec.num_layers - 1),
            gates=(gates,) * (pseudo_layers if self.saves_gates else 0),
            states=(states,) * pseudo_layers,
        )
        return outputs, saved

    def gradient_shapes(
        self, operands: Operands, wrt: Differentiable
    ) -> Differentiable:
        """Return shapes and dtypes of the gradients for which `wrt` holds True."""
        values = Differentiable(*operands[: len(wrt)])
        return values.map(
            lambda a, asked: jax.ShapeDtypeStruct(a.shape, a.dtype) if asked else None,
            wrt,
        )

    def batch_axes(self, tree: Any) -> Any:
        """Return `tree`, of this module's tuples, with batch axes in place of arrays.

        Weights, prepared or not, have no batch axis and get -1, because None would mean
        an absent array. In packed arrays the axis of the tokens counts as batch axis.
        """
        if tree is None:
            return None
        packed = self.packed is not None
        if isinstance(tree, Saved):
            return jax.tree.map(lambda _: 0 if packed else 1, tree)
        if not hasattr(tree, "_fields"):
            return tuple(self.batch_axes(item) for item in tree)
        special = dict.fromkeys(_HOLD_STEPS, 0 if packed else 1 - self.time_axis)
        special |= dict.fromkeys(("weights", "prepared"), -1)
        special |= dict.fromkeys(("seq_lengths", "segment_lengths"), 0)

        def axes(name: str, value: Any) -> Any:
            if isinstance(value, Saved):
                return self.batch_axes(value)
            return jax.tree.map(lambda _: special.get(name, 1), value)

        return type(tree)(*map(axes, tree._fields, tree))
