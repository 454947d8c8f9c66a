"""`convolve` and `correlate` for ragged vectors, which JAX's own cannot trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import max_dim, min_dim
from jax.export import is_symbolic_dim

from ... import _checks
from ..._typing import Array, ArrayLike, Shaped

_MODES = ("full", "same", "valid")


def convolve(
    a: Shaped[ArrayLike, " n"],
    v: Shaped[ArrayLike, " m"],
    mode: str = "full",
    *,
    precision: Any = None,
) -> Shaped[Array, " size"]:
    """Convolve two vectors, as `jnp.convolve`, also where they are ragged.

    In `ragged.vmap` one of them, or both, may be ragged. If both are, it takes memory
    for the product of their sizes.

    Args:
        a: `[n]`, with an element.
        v: `[m]`, with an element.
        mode: `"full"` returns `n + m - 1` elements; `"same"` the `max(n, m)` in the
            middle; `"valid"` the `max(n, m) - min(n, m) + 1` where both overlap wholly.
        precision: the precision of the products, as in `jax.lax.dot`.

    Returns:
        A vector in the dtype that `jnp.convolve` returns.

    Raises:
        TypeError: `a` or `v` is no array.
        ValueError: `a` or `v` is no vector, or has no elements; there is no such mode.

    Holds under all transformations.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.RaggedArray.from_list([jnp.ones(3), jnp.ones(1)])
        >>> sums = ragged.vmap(lambda x: ragged.convolve(x, jnp.ones(2)))(batch)
        >>> [x.tolist() for x in sums]
        [[1.0, 2.0, 2.0, 1.0], [1.0, 1.0]]
    """
    a, v = _check(a, v, mode)
    if not (is_symbolic_dim(a.shape[0]) or is_symbolic_dim(v.shape[0])):
        return jnp.convolve(a, v, mode, precision=precision)
    return _convolve(a, v, mode, 0, precision)


def correlate(
    a: Shaped[ArrayLike, " n"],
    v: Shaped[ArrayLike, " m"],
    mode: str = "valid",
    *,
    precision: Any = None,
) -> Shaped[Array, " size"]:
    """Correlate two vectors, as `jnp.correlate`, also where they are ragged.

    The result is `convolve` of `a` and the reversed conjugate of `v`.

    Args:
        a: `[n]`, with an element.
        v: `[m]`, with an element.
        mode: see `convolve`.
        precision: see `convolve`.

    Returns:
        A vector in the dtype that `jnp.correlate` returns.

    Raises:
        TypeError: `a` or `v` is no array.
        ValueError: `a` or `v` is no vector, or has no elements; there is no such mode.

    Holds under all transformations.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.RaggedArray.from_list([jnp.arange(3.0), jnp.arange(2.0)])
        >>> steps = ragged.vmap(lambda x: ragged.correlate(x, jnp.array([-1.0, 1.0])))
        >>> [x.tolist() for x in steps(batch)]
        [[1.0, 1.0], [1.0]]
    """
    a, v = _check(a, v, mode)
    n, m = a.shape[0], v.shape[0]
    if not (is_symbolic_dim(n) or is_symbolic_dim(m)):
        return jnp.correlate(a, v, mode, precision=precision)
    # If there are two middles, and the second vector is longer, it takes the other one.
    later = min_dim(max_dim(m - n, 0), 1)
    return _convolve(a, jnp.flip(jnp.conj(v)), mode, later, precision)


def _check(a: Any, v: Any, mode: str) -> tuple[Array, Array]:
    a, v = _checks.check_array("a", a), _checks.check_array("v", v)
    _checks.check_choice("mode", mode, _MODES)
    for name, x in (("a", a), ("v", v)):
        if x.ndim != 1:
            raise ValueError(f"`{name}` must be a vector, got shape {list(x.shape)}")
        if x.shape[0] < 1:
            raise ValueError(f"`{name}` must have an element, got none")
    one = [jax.ShapeDtypeStruct((1,), x.dtype) for x in (a, v)]
    dtype = jax.eval_shape(jnp.convolve, *one).dtype
    return a.astype(dtype), v.astype(dtype)


def _convolve(a: Array, v: Array, mode: str, later: Any, precision: Any) -> Array:
    n, m = a.shape[0], v.shape[0]
    short, long = min_dim(n, m), max_dim(n, m)
    start, size = {
        "full": (0, n + m - 1),
        "same": ((short - 1 + later) // 2, long),
        "valid": (short - 1, long - short + 1),
    }[mode]
    first = jnp.arange(size, dtype=jnp.int32) + jnp.array(start, jnp.int32)
    if is_symbolic_dim(n) and is_symbolic_dim(m):
        index = first[:, None] - jnp.arange(m, dtype=jnp.int32)[None]
        inside = (index >= 0) & (index < jnp.array(n, jnp.int32))
        rows = jnp.where(inside, _at(a, index), jnp.zeros((), a.dtype))
        return jnp.dot(rows, v, precision=precision)
    x, kernel = (a, v) if is_symbolic_dim(n) else (v, a)
    width = kernel.shape[0] - 1
    full = lax.conv_general_dilated(
        x[None, None],
        jnp.flip(kernel)[None, None],
        (1,),
        [(width, width)],
        precision=precision,
    )
    full = jnp.squeeze(full, (0, 1))
    return full if mode == "full" else _at(full, first)


def _at(x: Array, index: Array) -> Array:
    return jnp.take(x, index, axis=0, mode="clip")
