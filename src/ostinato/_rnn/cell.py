"""The base class of the cells of all modes: their weights and the products with them.

A cell runs one step at a time inside a loop over time. Products with the input and
weight gradients do not wait for the loop, and run for all steps at once. Arrays are
`[B, ...]` in the first case and `[T, B, ...]` in the second; many methods serve both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from .._typing import Array
from .accumulation import accumulation_dtype, wide_product

if TYPE_CHECKING:  # both import the table of modes, which imports this file
    from .call import RNNCall
    from .spec import RNNSpec


class LayerWeights(NamedTuple):
    """Weights of one direction of one layer; None for those that the spec leaves out.

    Shapes, with G gates, H units, K heads, P = proj_size and S = P or H: `w_ih [G*H,
    I]` in layer 0 and `[G*H, D*S]` above it, `w_hh [G*H, S/K]`, `b_ih [G*H]`, `b_hh
    [G*H]`, `w_hr [P, H/K]`. A row of `w_hh` and `w_hr` has the columns of its own head.
    """

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    w_hr: Any


States = tuple[Any, ...]
"""The states of one direction of one layer, in the order of the table of modes."""


class StepPrimal(NamedTuple):
    """The values of the forward pass that derivatives read, of one step or of all.

    Attributes:
        gates: the blocks that the step saved, joined; None if it saves no block.
        before: the states before the step.
        after: the states after the step.
    """

    gates: Any
    before: States
    after: States


@dataclasses.dataclass(frozen=True)
class ModeCell:
    """Weights of one direction of one layer, and the products with them.

    The first state is the output `h`, in the dtype of the weights; all others are in
    the accumulation dtype. The subclass of a mode names the blocks of size H that a
    step saves (`saved`), and defines `step` and, for the derivatives:

    - `tangent_terms`: a tuple of the terms that are known for all steps before the
      loop;
    - `step_tangent`: the tangents of the states after a step, from its terms;
    - `step_backward`: `(cotangents, dstates)`, of which the first cotangent is that of
      the input product, and `dstates` are those of the states before the step;
    - `recurrent_parts`: pairs of a cotangent and the factor that `w_hh` multiplied;
      their outer products, stacked, are the gradient of `w_hh`.
    """

    call: RNNCall
    weights: LayerWeights

    saved: ClassVar[tuple[str, ...]] = ()

    @property
    def spec(self) -> RNNSpec:
        return self.call.spec

    @property
    def dtype(self) -> Any:
        return self.weights.w_hh.dtype

    @property
    def wide(self) -> Any:
        return accumulation_dtype(self.dtype)

    @property
    def precision(self) -> Any:
        # Products of 16-bit factors are exact in float32, so that there is nothing to
        # choose, and XLA on CPU cannot multiply them in any other way.
        return self.call.precision if self.dtype == self.wide else None

    def widen(self, tree: Any) -> Any:
        """Convert a tree of arrays to the accumulation dtype; None stays None."""
        return _as_type(tree, self.wide)

    def narrow(self, tree: Any) -> Any:
        """Convert a tree of arrays to the dtype of the weights; None stays None."""
        return _as_type(tree, self.dtype)

    # ---------------------------------------------------------------- products

    def dot(self, a: Array, w: Array, w_axis: int = 1) -> Array:
        """Contract the last axis of `a` with `w_axis` of `w`; sum in the wide dtype."""
        contract = (a.ndim - 1, w_axis)
        return wide_product(self.narrow(a), w, contract, precision=self.precision)

    def outer(self, a: Array, b: Array) -> Array:
        """Sum outer products over all steps: `[T, B, m], [T, B, n] -> [m, n]`."""
        sizes = a.shape[-1], b.shape[-1]
        if (1 in sizes or max(sizes) < 4) and _is_long(a):
            # XLA adds up these in one chain, as in `total`.
            a, b = self.widen(self.narrow((a, b)))
            every = a[..., :, None] * b[..., None, :]
            return self.total(every.reshape(*a.shape[:2], -1)).reshape(sizes)
        # Matrix libraries copy one operand to transpose it; let it be the smaller one.
        # Not in 16 bits: XLA on CPU merges the .T into a product that it cannot run.
        swap = a.shape[-1] > b.shape[-1] and self.dtype == self.wide
        first, second = (b, a) if swap else (a, b)
        product = wide_product(
            self.narrow(first),
            self.narrow(second),
            _STEPS_AND_SEQUENCES,
            precision=self.precision,
        )
        return product.T if swap else product

    # A matrix of these three products has blocks of `size` rows, in each of which the
    # rows of the first head stand before those of the second. Its columns are those of
    # one head.

    def heads_dot(self, a: Array, w: Array, size: int) -> Array:
        """Multiply the part of each head on the last axis of `a` with its rows."""
        heads = self.spec.num_heads
        if heads == 1:
            return self.dot(a, w)
        product = wide_product(
            _split_last(self.narrow(a), heads),
            w.reshape(w.shape[0] // size, heads, size // heads, w.shape[1]),
            (a.ndim, 3),
            batch=(a.ndim - 1, 1),
            precision=self.precision,
        )
        return jnp.moveaxis(product, 0, -2).reshape(*a.shape[:-1], w.shape[0])

    def heads_dot_transposed(self, a: Array, w: Array, size: int) -> Array:
        """Multiply the part of each head of `a` with the columns of its rows."""
        heads, axis = self.spec.num_heads, a.ndim - 1
        if heads == 1:
            return self.dot(a, w, 0)
        blocks = w.shape[0] // size
        product = wide_product(
            _split_last(self.narrow(a), blocks, heads),
            w.reshape(blocks, heads, size // heads, w.shape[1]),
            ((axis, axis + 2), (0, 2)),
            batch=(axis + 1, 1),
            precision=self.precision,
        )
        return jnp.moveaxis(product, 0, -2).reshape(*a.shape[:-1], heads * w.shape[1])

    def heads_outer(self, a: Array, b: Array, size: int) -> Array:
        """Sum outer products over all steps, each head's own ones alone."""
        heads = self.spec.num_heads
        if heads == 1:
            return self.outer(a, b)
        first = _split_last(self.narrow(a), a.shape[-1] // size, heads)
        second = _split_last(self.narrow(b), heads)
        if 1 in (first.shape[-1], second.shape[-1]) and _is_long(a):  # as in `outer`
            every = self.widen(first) * self.widen(second)[:, :, None]
            return self.total(every).reshape(a.shape[-1], b.shape[-1] // heads)
        product = wide_product(
            first,
            second,
            _STEPS_AND_SEQUENCES,
            batch=(3, 2),
            precision=self.precision,
        )
        return jnp.moveaxis(product, 0, 1).reshape(a.shape[-1], b.shape[-1] // heads)

    def total(self, a: Array) -> Array:
        """Sum over all steps and sequences: `[T, B, n] -> [n]`."""
        a = self.widen(a)
        if not _is_long(a):
            ones = jnp.ones((*a.shape[:2], 1), self.wide)
            highest = lax.Precision.HIGHEST
            return wide_product(ones, a, _STEPS_AND_SEQUENCES, precision=highest)[0]
        return self._first_axis_total(self._first_axis_total(a))

    def _first_axis_total(self, a: Array) -> Array:
        """Sum wide values over the first axis, in two parts if it is long.

        Sums are products with ones, since XLA's sum on CPU depends on the number of
        threads. Each is a single chain of additions, which would lose digits.
        """
        count = a.shape[0]
        if not is_symbolic_dim(count) and count > _LONG:
            side = math.isqrt(count - 1) + 1
            rest = ((0, side**2 - count), *[(0, 0)] * (a.ndim - 1))
            a = jnp.pad(a, rest).reshape(side, side, *a.shape[1:])
            a = self._product_with_ones(a)
        return self._product_with_ones(a)

    def _product_with_ones(self, a: Array) -> Array:
        ones = jnp.ones(a.shape[0], self.wide)
        return wide_product(ones, a, (0, 0), precision=lax.Precision.HIGHEST)

    def recurrent_product(self, h: Array, w: Array, b: Array | None = None) -> Array:
        """Return `w @ h + b` of rows of `w_hh` and `b_hh`, or of their tangents."""
        return self.add_bias(self.heads_dot(h, w, self.spec.hidden_size), b)

    def recurrent_gradient(self, dg: Array, w: Array) -> Array:
        """Return the cotangent of the state that `w`, rows of `w_hh`, multiplied."""
        return self.heads_dot_transposed(dg, w, self.spec.hidden_size)

    def add_bias(self, a: Array, b: Array | None) -> Array:
        if b is None:
            return a
        return a + self.widen(b).reshape((1,) * (a.ndim - 1) + (-1,))

    def blocks(self, a: Array | None, start: int, stop: int, axis: int = -1) -> Any:
        """Return gate blocks `start .. stop - 1` along `axis`; None stays None."""
        if a is None:
            return None
        hidden = self.spec.hidden_size
        return lax.slice_in_dim(a, start * hidden, stop * hidden, axis=axis)

    # -------------------------------------------------------- shared by all modes

    def input_product(self, x: Array) -> Array:
        """Return `gx = w_ih @ x`, without the bias, for all steps at once."""
        if self.weights.w_ih is None:  # input_mode "skip": x itself goes to every gate
            return jnp.concatenate((self.widen(x),) * self.spec.num_gates, axis=-1)
        return self.dot(x, self.weights.w_ih)

    def input_gradient(self, dgx: Array) -> Array:
        if self.weights.w_ih is not None:
            return self.dot(dgx, self.weights.w_ih, 0)
        first, *rest = jnp.split(self.widen(dgx), self.spec.num_gates, axis=-1)
        return sum(rest, first)

    def input_tangent(
        self, x: Array, dx: Array | None, dweights: LayerWeights | None
    ) -> Array:
        """Return the tangent of the input product with its bias."""
        rows = self.spec.num_gates * self.spec.hidden_size
        dgx = jnp.zeros((*x.shape[:2], rows), self.wide)
        if dx is not None:
            dgx = self.input_product(dx)
        if dweights is not None:
            if dweights.w_ih is not None:
                dgx = dgx + self.dot(x, dweights.w_ih)
            dgx = self.add_bias(dgx, dweights.b_ih)
        return dgx

    def recurrent_tangent(
        self, at: StepPrimal, dweights: LayerWeights | None, like: Array
    ) -> Array:
        """Return the tangent of the recurrent product by its weights, for all steps."""
        if dweights is None:
            return jnp.zeros_like(like)
        return self.recurrent_product(at.before[0], dweights.w_hh, dweights.b_hh)

    def weight_gradients(
        self, x: Array, at: StepPrimal, cotangents: tuple
    ) -> LayerWeights:
        """Return the gradients of all weights over all steps, in the wide dtype."""
        w, dgx = self.weights, cotangents[0]
        parts = self.recurrent_parts(at, cotangents)
        has_b_hh = w.b_hh is not None
        return LayerWeights(
            w_ih=None if w.w_ih is None else self.outer(dgx, x),
            w_hh=jnp.concatenate(
                [self.heads_outer(d, a, self.spec.hidden_size) for d, a in parts]
            ),
            b_ih=None if w.b_ih is None else self.total(dgx),
            b_hh=jnp.concatenate([self.total(d) for d, _ in parts])
            if has_b_hh
            else None,
            w_hr=None,
        )

    # ----------------------------------------------------------- defined by each mode

    def step(self, states: States, gx: Array) -> tuple[States, Any]:
        """Return the states after one step, and the blocks that it saves, joined.

        Given the states before every step, the same lines recompute the saved blocks
        of all steps in one product. The bias of the input is added here, because after
        the product over all steps it would take one more pass over memory.
        """
        raise NotImplementedError

    def tangent_terms(
        self, x: Array, dx: Array | None, at: StepPrimal, dweights: LayerWeights | None
    ) -> tuple:
        dgx = self.input_tangent(x, dx, dweights)
        return (dgx + self.recurrent_tangent(at, dweights, dgx),)

    def step_tangent(self, at: StepPrimal, terms: tuple, dstates: States) -> States:
        raise NotImplementedError

    def step_backward(self, at: StepPrimal, dstates: States) -> tuple[tuple, States]:
        raise NotImplementedError

    def recurrent_parts(self, at: StepPrimal, cotangents: tuple) -> list[tuple]:
        return [(cotangents[0], at.before[0])]


def _split_last(a: Array, *sizes: int) -> Array:
    """Split the last axis into axes of `sizes`, and one more of what is left."""
    return a.reshape(*a.shape[:-1], *sizes, a.shape[-1] // math.prod(sizes))


def _as_type(tree: Any, dtype: Any) -> Any:
    """Convert an array or a tuple of arrays to `dtype`; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple(_as_type(a, dtype) for a in tree)
    return tree.astype(dtype)


_STEPS_AND_SEQUENCES = ((0, 1), (0, 1))
_LONG = 4096  # steps or sequences, of which a single chain of additions loses digits


def _is_long(a: Array) -> bool:
    """Return whether `[T, B, ...]` has, or may have, more than `_LONG` tokens."""
    steps, sequences = a.shape[:2]
    known = not (is_symbolic_dim(steps) or is_symbolic_dim(sequences))
    return not known or steps * sequences > _LONG
