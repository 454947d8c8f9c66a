"""Rules of the fused recurrent operator, and of loops over step functions.

The operator runs on concatenated tokens. One call runs the sequences of all examples
where they lie: packed storage (`_rnn.call.Packed`) needs no padded copy, neither of the
input nor of the values that are saved for the gradient. Examples with weights of their
own, or with gradients of weights of their own, cannot share a call: they are padded,
and lengths mask the padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._rnn import primitive
from ..._rnn.call import Packed, RNNCall, holds_steps
from ..._rnn.lowering import Ensemble, axes_of, results_of
from ..._step import primitive as loops
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import register
from ..core.sizes import is_symbolic
from ..core.values import Flat, Padded, Shared, Value


@register(primitive.rnn_p, primitive.rnn_tangent_p, primitive.rnn_bwd_p)
def _rnn(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    one = _OneExample(ctx, eqn)
    if one.shares_weights(values):
        if is_symbolic(one.length) and not is_symbolic(one.batch):
            return one.packed(values)
        if is_symbolic(one.batch) and not is_symbolic(one.length):
            return one.on_flat_batch(values)
    return one.padded(values)


@register(*loops.IMPLEMENTATIONS)
def _loop(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    """Run the loop over a step function in primitives of JAX, which have rules."""
    return ctx.evaluate(loops.implementation(eqn), values)


class _Axes(NamedTuple):
    """The axes of the batch and of the steps in an array, None for an axis it lacks."""

    batch: Any
    steps: Any


class _OneExample:
    """The operator's call on one example: `length` steps of `batch` sequences.

    This batch is not the batch of examples: an example may be `[batch, length, I]`.
    """

    def __init__(self, ctx: Context, eqn: JaxprEqn):
        self.ctx, self.primitive = ctx, eqn.primitive
        self.params = dict(eqn.params)
        self.call: RNNCall = self.params.pop("call")
        self.tree: Any = self.params.pop("tree")
        self.ensemble: Ensemble = self.params.pop("ensemble")
        self.shapes = ctx.out_shapes(eqn)

        avals: list[Any] = [atom.aval for atom in eqn.invars]
        operands = jax.tree.unflatten(self.tree, avals)
        results = results_of(self.call, self.tree, avals, self.ensemble, **self.params)
        self.axes = self._axes(operands, self.ensemble)
        members = [any(self.ensemble)] * len(self.shapes)
        self.result_axes = self._axes(results, members)
        x = next(i for i, axes in enumerate(self.axes) if axes.steps is not None)
        self.batch = avals[x].shape[self.axes[x].batch]
        self.length = avals[x].shape[self.axes[x].steps]
        # The first result that holds steps is y, or the gradient of x; only the
        # operator sees the others.
        self.shown = next(
            (i for i, axes in enumerate(self.result_axes) if axes.steps is not None),
            None,
        )

    def _axes(self, trees: Any, ensemble: Sequence[bool]) -> list[_Axes]:
        steps = jax.tree.leaves(holds_steps(trees))
        batches = axes_of(self.call, trees)
        return [
            _Axes(b + e if b >= 0 else None, 1 - b + e if s else None)
            for b, s, e in zip(batches, steps, ensemble, strict=True)
        ]

    def shares_weights(self, values: Sequence[Value]) -> bool:
        """Return whether no example has weights, or their gradients, of its own."""
        return all(
            isinstance(v, Shared) or axes.batch is not None
            for v, axes in zip(values, self.axes, strict=True)
        ) and all(axes.batch is not None for axes in self.result_axes)

    def _bind(
        self, leaves: Sequence[Array], call: RNNCall | None = None, **lengths: Array
    ) -> list[Array]:
        """Run the primitive, with some lengths among the operands replaced."""
        operands, *rest = jax.tree.unflatten(self.tree, leaves)
        flags, *rest_flags = jax.tree.unflatten(self.tree, self.ensemble)
        per_member = {name: bool(getattr(flags, name)) for name in lengths}
        return primitive.bind_trees(
            self.primitive,
            (operands._replace(**lengths), *rest),
            (flags._replace(**per_member), *rest_flags),
            call=self.call if call is None else call,
            **self.params,
        )

    # ------------------------------------------------------- one call for all examples

    def packed(self, values: Sequence[Value]) -> list[Value]:
        """Run examples of different lengths, each sequence of one in a buffer."""
        packed = Packed(self.ctx.max(self.length), buffers=self.batch)
        call = dataclasses.replace(self.call, time_major=False, packed=packed)
        leaves = map(self._to_tokens, values, self.axes)
        lengths = jnp.tile(self.ctx.lengths(self.length), self.batch)
        outs = self._bind(list(leaves), call, segment_lengths=lengths)
        results = list(map(self._from_tokens, outs, self.shapes, self.result_axes))
        if self.shown is not None:  # zero in the unused capacity, which should be valid
            y = results[self.shown]
            assert isinstance(y, Flat)
            filled = self.ctx.fill_unused(y.x, y.dim, y.axis)
            results[self.shown] = dataclasses.replace(y, x=filled)
        return results

    def _to_tokens(self, value: Value, axes: _Axes) -> Array:
        """Return `[..., batch * capacity, ...]`, or `[..., batch * examples, ...]`."""
        if axes.batch is None:
            return value.x
        if axes.steps is not None:
            first = min(axes)
            x = jnp.moveaxis(self.ctx.to_flat(value).x, axes.batch, first)
        else:
            first = axes.batch
            x = jnp.moveaxis(self.ctx.to_padded(value).x, 0, first + 1)
        merged = x.shape[first] * x.shape[first + 1]
        return x.reshape(*x.shape[:first], merged, *x.shape[first + 2 :])

    def _from_tokens(self, x: Array, shape: tuple[Any, ...], axes: _Axes) -> Value:
        """Return a value from packed storage; the inverse of `_to_tokens`."""
        first = axes.batch if axes.steps is None else min(axes)
        each = x.shape[first] // self.batch
        x = x.reshape(*x.shape[:first], self.batch, each, *x.shape[first + 1 :])
        if axes.steps is None:
            return Padded(jnp.moveaxis(x, first + 1, 0), shape)
        return Flat(jnp.moveaxis(x, first, axes.batch), shape, axes.steps)

    def on_flat_batch(self, values: Sequence[Value]) -> list[Value]:
        """Run examples of different batch sizes: all their sequences are one batch."""
        leaves = [
            v.x if axes.batch is None else self.ctx.to_flat(v).x
            for v, axes in zip(values, self.axes, strict=True)
        ]
        outs, batches = self._bind(leaves), [axes.batch for axes in self.result_axes]
        return list(map(Flat, outs, self.shapes, batches))

    # ------------------------------------------------------------ example for example

    def padded(self, values: Sequence[Value]) -> list[Value]:
        """Run under `jax.vmap`, whose rule of the operator handles the weights."""
        sized = is_symbolic(self.length) or is_symbolic(self.batch)
        run = self._run_padded if sized else lambda _, *leaves: self._bind(leaves)
        return self.ctx.batched(run, values, self.shapes, sized=sized)

    def _run_padded(self, sizes: Sizes, *leaves: Array) -> list[Array]:
        given = jax.tree.unflatten(self.tree, leaves)[0].seq_lengths
        if given is None:
            most = self.ctx.max(self.length)
            given = jnp.full(self.ctx.max(self.batch), most, jnp.int32)
        lengths = jnp.minimum(given, sizes(self.length))
        lengths = jnp.where(
            sizes.mask(lengths, lengths.ndim - 1, self.batch), lengths, 0
        )
        outs = self._bind(leaves, seq_lengths=lengths)
        if self.shown is not None:
            axes = self.result_axes[self.shown]
            for axis, dim in zip(axes, (self.batch, self.length), strict=True):
                outs[self.shown] = sizes.repeat_last(outs[self.shown], axis, dim)
        return outs
