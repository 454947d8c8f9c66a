"""What travels into the primitives: one static value and a few named tuples.

Arrays keep the order of their names here; None stands for an array that the call does
not have. `batch_axes` says where each one holds the batch, so that vmap and sharding
need to know nothing else.
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
    """What the operator reads.

    Attributes:
        weights: `[num_params]`.
        x: `[B, T, I]`, or `[T, B, I]` if time-major, or `[tokens, I]`, see `Packed`.
        states: the initial ones, in the order of the table of modes: `[L*D, B, S]`,
            S = proj_size or hidden_size, then `[L*D, B, H]`.
        seq_lengths: int32 `[B]` in 0..T, or None.
        segment_lengths: of packed sequences, how many tokens each has in `x`, int32
            `[B]`; else None.
        resets: bool, `x`'s shape without features, or None.
        dropout_masks: of every layer but the last: bool, `y`'s shape, True where an
            output is kept.
        prepared: uint8, `weights` once more as a backend reads them, or None.
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
    """`y` in the layout of `x`, 0 past a sequence's end; final states as `states`."""

    y: Any
    states: tuple


class Saved(NamedTuple):
    """What the training implementation stores beside its outputs.

    It is time-major whatever `x` is. Of packed sequences it is packed, `[tokens, ...]`
    for `[T, B, ...]`.

    Attributes:
        hidden: of every layer but the last, its output before dropout, `[T, B, D*S]`.
        gates: of every pseudo-layer, the blocks that its cell saves of a step,
            `[T, B, blocks*H]`. Nothing with `recompute`, or where that is no block.
        states: of every pseudo-layer, all states but the output, `[T, B, H]` each, in
            the accumulation dtype.
    """

    hidden: tuple = ()
    gates: tuple = ()
    states: tuple = ()


class Residuals(NamedTuple):
    """What tangent and backward read beside the operands."""

    y: Any
    saved: Saved


class Differentiable(NamedTuple):
    """Tangents or gradients of the operands that have any; None = zero, or unasked."""

    weights: Any = None
    x: Any = None
    states: tuple = ()

    def map(self, function: Callable, *others: Differentiable) -> Differentiable:
        """Apply `function` to every item, whatever it is, and to those of `others`."""
        trees = [(*item[:2], *item.states) for item in (self, *others)]
        weights, x, *states = (function(*items) for items in zip(*trees, strict=True))
        return Differentiable(weights, x, tuple(states))

    def items(self) -> tuple:
        """Return all items in a row."""
        return (self.weights, self.x, *self.states)


_HOLD_STEPS = {"x", "y", "resets", "dropout_masks"}


def holds_steps(tree: Any) -> Any:
    """Return, for each array of this module's tuples, whether it holds every step."""
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
    """A layout of `x`: sequences one after another, `[tokens, I]`, without padding.

    The tokens are split into buffers of equal capacity. A buffer holds `B / buffers`
    sequences, as many tokens of each as its `segment_lengths` says; what stands after
    the last one is ignored, and 0 in results. Tokens that do not fit are cut off, and
    so are steps past `max_length`.

    Attributes:
        max_length: T, the most steps of a sequence.
        buffers: how many; more than one is what vmap over the data makes.
    """

    max_length: int
    buffers: int = 1


@dataclasses.dataclass(frozen=True)
class RNNCall:
    """The static side of one call.

    Attributes:
        spec: the network.
        time_major: whether `x` and `y` are `[T, B, ...]`.
        save: also return `Saved`.
        recompute: keep no gates in `Saved`.
        precision: of wider than 16-bit products, as `jax.lax.dot_general` takes it.
        backend: the one that was asked for, or None.
        packed: the layout, if `x` is `[tokens, I]`; then `time_major` means nothing.
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
        """Whether `Saved` holds gates."""
        return bool(cell_class(self.spec).saved) and not self.recompute

    @property
    def dropout_scale(self) -> float:
        """What a kept value is multiplied by; at p = 1 nothing is kept."""
        p = self.spec.dropout
        return 1 / (1 - p) if p < 1 else 0.0

    def sizes(self, operands: Operands) -> tuple[Any, Any]:
        """Return `(T, B)` of a call; either may be a symbolic dimension."""
        if self.packed is not None:
            return self.packed.max_length, operands.states[0].shape[1]
        shape = operands.x.shape
        return shape[self.time_axis], shape[1 - self.time_axis]

    def output_shapes(self, operands: Operands) -> tuple[Outputs, Saved | None]:
        """Return shapes and dtypes of the results, `Saved` only if the call saves."""
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
        """Return shapes and dtypes of the gradients that `wrt` (bools) asks for."""
        values = Differentiable(*operands[: len(wrt)])
        return values.map(
            lambda a, asked: jax.ShapeDtypeStruct(a.shape, a.dtype) if asked else None,
            wrt,
        )

    def batch_axes(self, tree: Any) -> Any:
        """Return `tree`, of this module's tuples, with each array's batch axis instead.

        Weights have none and get -1, prepared or not: None would read as an absent
        array. Tokens take its place in arrays that hold packed sequences.
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
