"""Gradients with respect to a RaggedArray, whose lengths are integers."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .types.array import RaggedArray
from .types.sharded import ShardedRagged


def grad(
    function: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable:
    """Return the gradient of a function of RaggedArrays, as `jax.grad` does of arrays.

    `jax.grad` refuses arguments with integers, and the lengths of a RaggedArray are
    integers. Here the gradient is taken with respect to its `data`.

    Args:
        function: a function that returns a scalar, or `(scalar, aux)` with `has_aux`.
        argnums: which arguments to differentiate with respect to: RaggedArrays, arrays,
            or pytrees of these.
        has_aux: whether `function` returns a pair.

    Returns:
        A function of the same arguments, which returns the gradient, or `(gradient,
        aux)`. The gradient with respect to a RaggedArray is a RaggedArray of the same
        lengths, with zeros in the unused capacity.

    Raises:
        TypeError: as `jax.grad`.

    Holds under the transformations of `jax.grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.stack([jnp.arange(3.0), jnp.arange(2.0)])
        >>> def loss(batch):
        ...     return ragged.vmap(lambda x: jnp.sum(x**2))(batch).sum()
        >>> ragged.grad(loss)(batch)[0].tolist()
        [0.0, 2.0, 4.0]
    """
    both = value_and_grad(function, argnums, has_aux)

    @ft.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def value_and_grad(
    function: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable:
    """Return the value and the gradient of a function of RaggedArrays; see `grad`.

    Args:
        function: as in `grad`.
        argnums: as in `grad`.
        has_aux: as in `grad`.

    Returns:
        A function that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
        TypeError: as `jax.value_and_grad`.

    Holds under the transformations of `jax.value_and_grad`.
    """

    @ft.wraps(function)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        def of_data(*data: Any, **kwargs: Any) -> Any:
            return function(*map(_with_data, args, data), **kwargs)

        differentiate = jax.value_and_grad(of_data, argnums, has_aux)
        value, grads = differentiate(*map(_data, args), **kwargs)
        if not isinstance(argnums, Sequence):
            return value, _with_data(args[argnums], grads)
        given = (args[i] for i in argnums)
        return value, tuple(map(_with_data, given, grads))

    return value_and_gradient


def _data(tree: Any) -> Any:
    """Return the tree with the data of a RaggedArray in place of it."""
    return jax.tree.map(
        lambda x: x.data if _has_tokens(x) else x, tree, is_leaf=_has_tokens
    )


def _with_data(tree: Any, data: Any) -> Any:
    """Return `data` with the RaggedArrays of `tree` around it."""
    return jax.tree.map(
        lambda x, d: x.with_data(d) if _has_tokens(x) else d,
        tree,
        data,
        is_leaf=_has_tokens,
    )


def _has_tokens(x: Any) -> bool:
    return isinstance(x, (RaggedArray, ShardedRagged))
