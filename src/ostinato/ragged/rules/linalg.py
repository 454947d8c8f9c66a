"""The rules of matrices of different sizes, which are extended by the identity.

The identity below and right of a matrix changes neither its factors nor its solutions.
"""

from __future__ import annotations

import functools as ft
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._compat import is_of_determinants_derivative
from ..._typing import Array
from ..core.context import Context, Sizes
from ..core.registry import Unsupported, register
from ..core.sizes import is_symbolic, symbolic_axes
from ..core.values import Padded, Value, is_dense, ragged_axes, with_array
from .fixed_axes import over_leading


def _extended(own: Sizes, a: Array, dim: Any) -> Array:
    """Return `a`, `[..., n, n]`, with the identity in its padding."""
    if not is_symbolic(dim):
        return a
    row, column = own.mask(a, a.ndim - 2, dim), own.mask(a, a.ndim - 1, dim)
    return jnp.where(row & column, a, jnp.eye(a.shape[-1], dtype=a.dtype))


@register("cholesky", "lu")
def _factor(ctx: Context, eqn: JaxprEqn, a: Value, **params: Any) -> Sequence[Value]:
    """Factor extended matrices: their factors are those of the matrices, extended."""
    *_, rows, dim = a.shape
    if not symbolic_axes((rows, dim)):
        return over_leading(ctx, eqn, [a], [2], params)
    if rows != dim:
        raise Unsupported("a matrix whose size depends on the example must be square")
    bigger = ctx.is_positive(dim - 1)  # True, or an array
    if bigger is not True and is_of_determinants_derivative(eqn):
        raise Unsupported(
            "JAX's derivative of `jnp.linalg.det`, taken inside of the mapped "
            "function, is another one for matrices of size 1; say `min_length=2` if "
            "there are none, else differentiate `sign * jnp.exp(logdet)` of "
            "`jnp.linalg.slogdet`"
        )

    def factor(own: Sizes, a: Array) -> list[Array]:
        results = eqn.primitive.bind(_extended(own, a, dim), **params)
        return results if eqn.primitive.multiple_results else [results]

    return ctx.batched(factor, [a], ctx.out_shapes(eqn))


def determinant(ctx: Context, eqn: JaxprEqn, a: Value) -> list[Value]:
    """Return the determinants of extended matrices.

    JAX's derivative of it has a case `n == 1`, which is False for every symbol.
    """
    dim = a.shape[-1]

    def det(own: Sizes, a: Array) -> list[Array]:
        return [jnp.linalg.det(_extended(own, a, dim))]

    return ctx.batched(det, [a], ctx.out_shapes(eqn), sized=is_symbolic(dim))


@register("triangular_solve")
def _triangular_solve(
    ctx: Context, eqn: JaxprEqn, a: Value, b: Value, **params: Any
) -> Sequence[Value]:
    dim = a.shape[-1]
    if not symbolic_axes((*a.shape[-2:], *b.shape[-2:])):
        return over_leading(ctx, eqn, [a, b], [2, 2], params)

    def solve(own: Sizes, a: Array, right: Array) -> list[Array]:
        right = own.cleared(right, b.shape)  # 0 times infinity is NaN
        return [eqn.primitive.bind(_extended(own, a, dim), right, **params)]

    return ctx.batched(solve, [a, b], ctx.out_shapes(eqn))


@register("custom_linear_solve")
def _linear_solve(
    ctx: Context, eqn: JaxprEqn, *values: Value, const_lengths: Any, jaxprs: Any
) -> list[Value]:
    """Bind one solver of the whole batch, so that its own gradient is kept."""
    ends = itertools.accumulate(const_lengths, initial=0)
    consts = [values[start:stop] for start, stop in itertools.pairwise([*ends])]
    b = list(values[sum(const_lengths) :])

    def evaluate(inner: Context, which: int, b: Sequence[Value]) -> list[Value]:
        return inner.evaluate(jaxprs[which], [*consts[which], *b])

    def stays_shared(which: int) -> bool:
        results = jax.eval_shape(lambda b: evaluate(ctx.nested(), which, b), b)
        return all(map(is_dense, results[: len(b)]))

    there = [which for which, jaxpr in enumerate(jaxprs) if jaxpr is not None]
    if not all(map(is_dense, b)) or not all(map(stays_shared, there)):
        b = [ctx.to_padded(v) for v in b]

    def zeroed(inner: Context, arrays: Sequence[Array]) -> list[Array]:
        """Return arrays with zeros in the padding.

        The solver and the transposed solver then fit each other.
        """

        def zero(own: Sizes, *arrays: Array) -> list[Array]:
            return [own.cleared(x, v.shape) for x, v in zip(arrays, b, strict=True)]

        if not any(map(ragged_axes, b)):
            return list(arrays)
        values = list(map(with_array, b, arrays))
        return [v.x for v in inner.batched(zero, values, [v.shape for v in b])]

    def run(which: int, arrays: Sequence[Array]) -> tuple[list[Array], list[Value]]:
        """Return the result of a function, and what it returns beside it."""
        inner = ctx.nested()
        results = evaluate(inner, which, list(map(with_array, b, arrays)))
        solved = results[: len(b)]
        if isinstance(b[0], Padded):
            solved = list(map(inner.to_padded, solved))
        return zeroed(inner, [v.x for v in solved]), results[len(b) :]

    matvec, _, solve, transpose_solve = (ft.partial(run, which) for which in range(4))
    arrays, others = lax.custom_linear_solve(
        lambda x: matvec(x)[0],
        zeroed(ctx, [v.x for v in b]),
        lambda _, b: solve(b),
        None if jaxprs.transpose_solve is None else lambda _, b: transpose_solve(b),
        has_aux=True,
    )
    return [_repeated(ctx, v) for v in map(with_array, b, arrays)] + others


def _repeated(ctx: Context, value: Value) -> Value:
    """Return `value` with its last valid elements repeated in the padding."""
    if not ragged_axes(value):
        return value

    def repeat(own: Sizes, x: Array) -> list[Array]:
        for axis in ragged_axes(value):
            x = own.repeat_last(x, axis, value.shape[axis])
        return [x]

    (result,) = ctx.batched(repeat, [value], [value.shape])
    return result
