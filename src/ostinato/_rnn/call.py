"""What travels into the primitives: one static value and a few named tuples.

Arrays keep the order of their names here; None stands for an array that the call does
not have. `batch_axes` says where each one holds the batch, so that vmap and sharding
need to know nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from .._typing import Backend
from .spec import RNNSpec


class Operands(NamedTuple):
    """What the operator reads.

    Attributes:
        weights: `[num_params]`.
        x: `[B, T, I]`, or `[T, B, I]` if time-major, or `[R, I]`, see `Rows`.
        h_0: `[L*D, B, S]`, S = proj_size or hidden_size.
        c_0: `[L*D, B, H]` for an LSTM, else None.
        seq_lengths: int32 `[B]` in 0..T, or None.
        row_lengths: of rows, how many each sequence has in `x`: int32 `[B]`, else None.
        resets: bool, `x`'s shape without features, or None.
        keep: dropout, of every layer but the last: bool, `y`'s shape, True where kept.
        packed: uint8, `weights` once more as the cpu kernels read them, or None.
    """

    weights: Any
    x: Any
    h_0: Any
    c_0: Any = None
    seq_lengths: Any = None
    row_lengths: Any = None
    resets: Any = None
    keep: tuple = ()
    packed: Any = None


class Outputs(NamedTuple):
    """`y` in the layout of `x`, 0 past a row's end; `h_n`, `c_n` as `h_0`, `c_0`."""

    y: Any
    h_n: Any
    c_n: Any = None


class Saved(NamedTuple):
    """What the training form stores beside its outputs, time-major whatever `x` is.

    Of rows, it is stored as rows: `[R, ...]` for `[T, B, ...]`.

    Attributes:
        hidden: of every layer but the last, its output before dropout, `[T, B, D*S]`.
        gates: of every pseudo-layer, `[T, B, 4*H]`: LSTM `i f g o` and GRU
            `r z n u`, u the candidate's recurrent product (`reset_after=False`: only
            `r z n`, 3*H). Nothing for a plain RNN or with `recompute`.
        cells: of every pseudo-layer of an LSTM, `c_t`, `[T, B, H]`, in the
            accumulation dtype.
    """

    hidden: tuple = ()
    gates: tuple = ()
    cells: tuple = ()


class Residuals(NamedTuple):
    """What tangent and backward read beside the operands."""

    y: Any
    saved: Saved


class Differentiable(NamedTuple):
    """Tangents or gradients of the operands that have any; None = zero, or unasked."""

    weights: Any = None
    x: Any = None
    h_0: Any = None
    c_0: Any = None


def holds_steps(tree: Any) -> Any:
    """`tree`, of this module's tuples: for each array whether it holds every step."""
    if tree is None:
        return None
    if not hasattr(tree, "_fields"):
        return tuple(map(holds_steps, tree))
    names = {"x", "y", "resets", "keep", *Saved._fields}

    def flags(name: str, value: Any) -> Any:
        if isinstance(value, Saved):
            return holds_steps(value)
        return jax.tree.map(lambda _: name in names, value)

    return type(tree)(*map(flags, tree._fields, tree))


def accumulation_dtype(dtype: Any) -> np.dtype:
    """float32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A layout of `x`: one sequence after another, `[R, I]`, instead of padded ones.

    Rows are in piles of `R / piles` each. A pile holds `B / piles` sequences, as many
    rows of each as its `row_lengths` says; what stands after the last is ignored, and 0
    in results. Rows that do not fit are cut off, and so are steps past `max_length`.

    Attributes:
        max_length: T, the most steps of a sequence.
        piles: how many; more than one is what vmap over the data makes.
    """

    max_length: int
    piles: int = 1


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
        rows: the layout, if `x` is `[R, I]`; then `time_major` means nothing.
    """

    spec: RNNSpec
    time_major: bool = False
    save: bool = False
    recompute: bool = False
    precision: Any = None
    backend: Backend | None = None
    rows: Rows | None = None

    @property
    def time_axis(self) -> int:
        return 0 if self.time_major else 1

    @property
    def has_gates(self) -> bool:
        """Whether derivatives read gates; those of a plain RNN follow from h."""
        return self.spec.mode in ("lstm", "gru")

    @property
    def saves_gates(self) -> bool:
        return self.has_gates and not self.recompute

    @property
    def dropout_scale(self) -> float:
        """What a kept value is multiplied by; at p = 1 nothing is kept."""
        p = self.spec.dropout
        return 1 / (1 - p) if p < 1 else 0.0

    def sizes(self, operands: Operands) -> tuple[Any, Any]:
        """`(T, B)` of a call; either may be a symbolic dimension."""
        if self.rows is not None:
            return self.rows.max_length, operands.h_0.shape[1]
        shape = operands.x.shape
        return shape[self.time_axis], shape[1 - self.time_axis]

    def output_shapes(self, operands: Operands) -> tuple[Outputs, Saved | None]:
        """Shapes and dtypes of the results, `Saved` only if the call saves."""
        spec, dtype = self.spec, operands.x.dtype
        steps, batch = self.sizes(operands)
        entries = operands.x.shape[:-1]
        saved_entries = (steps, batch) if self.rows is None else entries
        width = spec.num_directions * spec.output_size
        pseudo_layers = spec.num_layers * spec.num_directions
        wide = accumulation_dtype(dtype)

        def struct(*shape: Any, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        lstm = spec.mode == "lstm"
        outputs = Outputs(
            y=struct(*entries, width),
            h_n=struct(pseudo_layers, batch, spec.output_size),
            c_n=struct(pseudo_layers, batch, spec.hidden_size) if lstm else None,
        )
        if not self.save:
            return outputs, None
        blocks = 3 if spec.mode == "gru" and not spec.reset_after else 4
        gates = struct(*saved_entries, blocks * spec.hidden_size)
        cells = struct(*saved_entries, spec.hidden_size, dtype=wide)
        saved = Saved(
            hidden=(struct(*saved_entries, width),) * (spec.num_layers - 1),
            gates=(gates,) * (pseudo_layers if self.saves_gates else 0),
            cells=(cells,) * (pseudo_layers if lstm else 0),
        )
        return outputs, saved

    def gradient_shapes(self, operands: Operands, wrt: Differentiable) -> Any:
        """Shapes and dtypes of the gradients that `wrt` (bools) asks for."""
        values = [getattr(operands, name) for name in wrt._fields]
        return Differentiable(
            *(
                jax.ShapeDtypeStruct(value.shape, value.dtype) if asked else None
                for value, asked in zip(values, wrt, strict=True)
            )
        )

    def batch_axes(self, tree: Any) -> Any:
        """`tree`, of this module's tuples, with each array's batch axis instead.

        Weights have none and get -1, packed or not: None would read as an absent array.
        Rows themselves take its place in arrays that hold rows.
        """
        if tree is None:
            return None
        if not hasattr(tree, "_fields"):
            return tuple(self.batch_axes(item) for item in tree)
        batch = 1 - self.time_axis if self.rows is None else 0
        special = {
            "weights": -1,
            "packed": -1,
            "x": batch,
            "y": batch,
            "resets": batch,
            "keep": batch,
            "seq_lengths": 0,
            "row_lengths": 0,
        }
        if self.rows is not None:
            special |= dict.fromkeys(Saved._fields, 0)

        def axes(name: str, value: Any) -> Any:
            if isinstance(value, Saved):
                return self.batch_axes(value)
            return jax.tree.map(lambda _: special.get(name, 1), value)

        return type(tree)(*map(axes, tree._fields, tree))
