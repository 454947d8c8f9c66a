"""Products in step programs: with matrices, and between values of a sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from .builder import Builder
from .program import Place, Weight
from .registry import result_shape
from .values import Unsupported, Value, full_shape, merge_axes, row_major, transpose

_MOST_HEADS = 32
"""A product with a matrix for each head has so many heads at most."""


def dot_general(
    b: Builder, eqn: JaxprEqn, x: Value, y: Value, *, dimension_numbers: Any, **_: Any
) -> Value:
    """Return `lax.dot_general` of two values."""
    (over_x, over_y), (batch_x, batch_y) = dimension_numbers
    (x,), (y,) = b.of_one_axis([x]), b.of_one_axis([y])
    if x.summed or y.summed:
        raise Unsupported("it combines different sequences")
    if (0.0,) in (x.buffer.numbers, y.buffer.numbers):  # of what has no derivative
        shape = result_shape(eqn)
        return b.constant(0.0)._replace(shape=shape, strides=(0,) * len(shape))
    x = _in_order(x, batch_x, over_x, b.batch)
    y = _in_order(y, batch_y, over_y, b.batch)
    half = all(type_of(v).dtype == jnp.bfloat16 for v in eqn.invars)
    return _Product(b, x, y, len(batch_x), len(over_x), half).result()


def _in_order(
    value: Value, batch: Sequence[int], over: Sequence[int], sequences: int
) -> Value:
    """Return a value with its axes in order: batch, free, added up."""
    rank = len(full_shape(value, sequences))
    free = [i for i in range(rank) if i not in batch and i not in over]
    return transpose(value, [*batch, *free, *over], sequences)


class _Product:
    """A product of values whose axes are in order: batch, free, added up."""

    def __init__(
        self, b: Builder, x: Value, y: Value, batch: int, over: int, half: bool
    ) -> None:
        self.b, self.x, self.y, self.batch, self.over = b, x, y, batch, over
        self.half = half

    def result(self) -> Value:
        """Return `[*batch, *free of x, *free of y]`."""
        x, y = self.x, self.y
        kinds = [self._kind(v) for v in (x, y)]
        if "over" in kinds:
            return self._over_sequences(kinds)
        if kinds == ["free", "free"]:
            raise Unsupported("it combines different sequences")
        if "batch" in kinds:
            axis = x.axis if x.axis is not None else y.axis
            assert axis is not None
            x, y = (v if v.axis is not None else self._rows(v, axis) for v in (x, y))
            return self._same_sequence(x, y, self.batch - 1, axis)
        if kinds == ["none", "none"]:
            return self._same_sequence(x, y, self.batch, None)
        if kinds[1] == "free" and x.buffer.place is not Place.INVARIANT:
            free = len(x.shape) - self.batch - self.over
            assert y.axis is not None
            result = self._same_sequence(x, y._replace(axis=0), self.batch, 0)
            return result._replace(axis=free + y.axis)
        if kinds[1] == "free":  # as [*batch, *free of y, *free of x], then exchanged
            other = _Product(self.b, y, x, self.batch, self.over, self.half).result()
            return self._exchange(other, y, x)
        weight = self._weight()
        if weight is None:
            return self._one_free(x, y)
        return weight

    def _kind(self, value: Value) -> str:
        rank = len(value.shape) + (value.axis is not None)
        if value.axis is None:
            return "none"
        if value.axis < self.batch:
            return "batch"
        return "over" if value.axis >= rank - self.over else "free"

    def _rows(self, value: Value, axis: int) -> Value:
        """Return a value that has an axis of sequences without saying so."""
        if self.b.batch == 1 or value.strides[axis] == 0:
            shape = value.shape[:axis] + value.shape[axis + 1 :]
            strides = value.strides[:axis] + value.strides[axis + 1 :]
            return value._replace(shape=shape, strides=strides)
        return self.b.rows_of(value, axis)

    def _exchange(self, value: Value, first: Value, second: Value) -> Value:
        count = [
            len(v.shape) + (v.axis is not None) - self.batch - self.over
            for v in (first, second)
        ]
        n = self.batch
        one = range(n, n + count[0])
        two = range(n + count[0], n + sum(count))
        return transpose(value, [*range(n), *two, *one], self.b.batch)

    def _over_sequences(self, kinds: Sequence[str]) -> Value:
        """Return a sum over sequences, as the gradient of a matrix is one."""
        x, y, over = self.x, self.y, self.over - 1
        if kinds != ["over", "over"] or self.batch:
            raise Unsupported("it combines different sequences")
        free = [len(v.shape) - over for v in (x, y)]
        assert x.axis is not None and y.axis is not None
        if x.axis - free[0] != y.axis - free[1]:
            raise Unsupported("it combines different sequences")
        x, y = x._replace(axis=0), y._replace(axis=0)
        if math.prod(x.shape[: free[0]]) > 1 and math.prod(y.shape[: free[1]]) > 1:
            raise Unsupported("it has the gradient of a matrix in the loop")
        # What each sequence contributes.
        product = _Product(self.b, x, y, 0, over, self.half)
        result = product._same_sequence(x, y, 0, 0)
        return result._replace(axis=None, summed=True)

    def _weight(self) -> Value | None:
        """Return the product with a matrix that is the same at every step."""
        b, x, y = self.b, self.x, self.y
        columns = y.shape[self.batch : len(y.shape) - self.over]
        if y.buffer.place is not Place.INVARIANT or not columns or not self.over:
            return None
        if y.buffer.rows or 0 in y.shape:
            return None
        heads = [range(n) for n in y.shape[: self.batch]]
        if math.prod(y.shape[: self.batch]) > _MOST_HEADS:
            return None
        # Sequences first, and what is added up as one axis.
        assert x.axis is not None
        position = x.axis - self.batch
        x = self._merge_over(x._replace(axis=0))
        if x is None:
            return None
        parts = []
        for index in itertools.product(*heads):
            weight = self._matrix(index)
            if weight is None:
                return None
            at = sum(i * s for i, s in zip(index, x.strides, strict=False))
            part = x._replace(
                offset=x.offset + at,
                shape=x.shape[self.batch :],
                strides=x.strides[self.batch :],
            )
            rank = len(part.shape)
            parts.append(b.product(part, range(rank - 1), rank - 1, weight))
        if not self.batch:
            product = parts[0]
        else:
            sizes = y.shape[: self.batch]
            product = b.local((*sizes, *parts[0].shape), 0)
            for index, part in zip(itertools.product(*heads), parts, strict=True):
                at = sum(i * s for i, s in zip(index, product.strides, strict=False))
                b.write(
                    "copy",
                    product._replace(
                        offset=at,
                        shape=part.shape,
                        strides=product.strides[self.batch :],
                    ),
                    part,
                )
        free = product.shape[: len(product.shape) - 1]
        split = product._replace(
            shape=(*free, *columns),
            strides=(*product.strides[:-1], *row_major(columns)),
        )
        return split._replace(axis=self.batch + position)

    def _merge_over(self, x: Value) -> Value | None:
        kept = len(x.shape) - self.over
        merged = merge_axes(x.shape[kept:], [x.strides[kept:]])
        if len(merged.shape) > 1:
            return None
        size, stride = (
            (merged.shape, merged.strides[0]) if merged.shape else ((1,), (1,))
        )
        return x._replace(
            shape=(*x.shape[:kept], *size), strides=(*x.strides[:kept], *stride)
        )

    def _matrix(self, index: Sequence[int]) -> Weight | None:
        """Return the matrix of a head."""
        y = self.y
        offset = y.offset + sum(i * s for i, s in zip(index, y.strides, strict=False))
        end = len(y.shape) - self.over
        columns = merge_axes(y.shape[self.batch : end], [y.strides[self.batch : end]])
        depth = merge_axes(y.shape[end:], [y.strides[end:]])
        if len(columns.shape) > 1 or len(depth.shape) > 1:
            return None
        n, step_n = _only(columns)
        k, step_k = _only(depth)
        if step_n == 1 or n == 1 and step_k != 1:
            stride = step_k if k > 1 else n
            return Weight(y.buffer, offset, k, n, stride, False, self.half)
        if step_k == 1 or k == 1:
            return Weight(y.buffer, offset, k, n, step_n, True, self.half)
        return None

    def _one_free(self, x: Value, y: Value) -> Value:
        """Return a product of a value with one that all sequences share."""
        # As if the shared value were the same for every sequence: [*batch, rows, ...].
        position = x.axis
        assert position is not None
        result = self._same_sequence(x._replace(axis=0), y, self.batch, 0)
        return result._replace(axis=position)

    def _same_sequence(self, x: Value, y: Value, batch: int, axis: int | None) -> Value:
        """Return the product of values of one sequence.

        Args:
            x: without the axis of sequences in `shape`, like `y`.
            y: see there.
            batch: how many axes both have in the result.
            axis: where the result has sequences.
        """
        b = self.b
        free_x = x.shape[batch : len(x.shape) - self.over]
        free_y = y.shape[batch : len(y.shape) - self.over]
        sizes, over = x.shape[:batch], x.shape[len(x.shape) - self.over :]
        shape = (*sizes, *free_x, *free_y)
        rank = len(shape)

        def spread(v: Value, before: int, after: int) -> Value:
            own = len(v.shape) - batch - self.over
            s = v.strides
            strides = (
                *s[:batch], *(0,) * before, *s[batch : batch + own], *(0,) * after,
                *s[batch + own :],
            )  # fmt: skip
            return v._replace(
                shape=(*shape, *over), strides=strides, axis=None if axis is None else 0
            )

        wide_x = spread(x, 0, len(free_y))
        wide_y = spread(y, len(free_x), 0)
        if y.axis is None and axis is not None and not y.buffer.rows:
            wide_y = wide_y._replace(axis=None)
        if x.axis is None and axis is not None and not x.buffer.rows:
            wide_x = wide_x._replace(axis=None)
        if not self.over:
            result = _multiply(b, wide_x, wide_y, axis)
        else:
            result = _contract(b, wide_x, wide_y, rank, axis)
        return result._replace(axis=axis)


def _multiply(b: Builder, x: Value, y: Value, axis: int | None) -> Value:
    return b.compute("multiply", None if axis is None else 0, x, y)


def _contract(b: Builder, x: Value, y: Value, rank: int, axis: int | None) -> Value:
    return b.contract("sum_product", (x, y), rank, None if axis is None else 0)


def _only(merged: Any) -> tuple[int, int]:
    if not merged.shape:
        return 1, 0
    return merged.shape[0], merged.strides[0][0]
