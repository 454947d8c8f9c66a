"""`associative_scan` for ragged axes, which JAX's own cannot trace."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching

from ... import _checks
from ..._typing import Array
from .constant import constant

_of_numbers = lax.associative_scan  # `ragged.vmap` may put ours in its place
associative_scan_p = Primitive("ragged_associative_scan")
associative_scan_p.multiple_results = True


def associative_scan(
    function: Callable[[Any, Any], Any],
    elems: Any,
    reverse: bool = False,
    axis: int = 0,
) -> Any:
    """Scan as `jax.lax.associative_scan`, also over a ragged axis in `ragged.vmap`.

    In a function that `ragged.vmap` maps, `jax.lax.associative_scan` is this one,
    unless it was imported by its own name.

    Args:
        function: an associative function `function(a, b)` of slices of `elems` along
            `axis`. A slice of the result must follow from that slice of `a` and of `b`
            alone.
        elems: an array, or a pytree of arrays that have `axis` in common.
        reverse: whether the scan starts at the end.
        axis: the axis to scan over.

    Returns:
        A pytree as `elems`: each slice combines all slices up to it.

    Raises:
        TypeError: `function` is not callable, or changes structure or dtypes.
        ValueError: `elems` is empty, has no such axis, or leaves differ in it.

    Holds under every transformation. In `ragged.vmap`, what runs step by step, as
    `jax.lax.scan` does: elements with a second axis of different sizes, a `function`
    that closes over an array with one, and derivatives inside of the mapped function.

    References:
        Blelloch, Prefix Sums and Their Applications (1990).

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.RaggedArray.from_list([jnp.arange(1, 4), jnp.arange(1, 3)])
        >>> ragged.vmap(lambda x: ragged.associative_scan(jnp.multiply, x))(batch)
        RaggedArray(int32[5], n=[3, 2], axis=0, max_length=4)
    """
    if not callable(function):
        raise TypeError(
            f"`function` must be callable, got {_checks.describe(function)}"
        )
    reverse = _checks.check_bool("reverse", reverse)
    axis = _checks.check_integer("axis", axis)
    leaves, tree = jax.tree.flatten(elems)
    leaves = list(map(jnp.asarray, leaves))
    if not leaves:
        raise ValueError("`elems` must hold at least one array, got none")
    for leaf in leaves:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"`axis` must be one of each array in `elems`, got {axis} for the "
                f"shape {leaf.shape}"
            )
    if len({leaf.shape[axis] for leaf in leaves}) > 1:
        sizes = [leaf.shape[axis] for leaf in leaves]
        raise ValueError(f"`elems` must agree in the size of `axis`, got {sizes}")
    if not is_symbolic_dim(leaves[0].shape[axis]):
        return _of_numbers(function, elems, reverse=reverse, axis=axis)

    def join(*tokens: Array) -> list[Array]:
        """Return one token of the result from one token of each operand."""
        axes = [axis % leaf.ndim for leaf in leaves]
        slices = map(jnp.expand_dims, tokens, axes * 2)
        a, b = (tree.unflatten(half) for half in _halves(list(slices)))
        result, got = jax.tree.flatten(function(a, b))
        if got != tree:
            raise TypeError(
                f"`function` must return the structure of `elems`, {tree}, got {got}"
            )
        for x, leaf in zip(result, leaves, strict=True):
            if x.dtype != leaf.dtype:
                raise TypeError(
                    f"`function` must keep the dtype {leaf.dtype}, got {x.dtype}"
                )
        return list(map(jnp.squeeze, result, axes))

    first = [jnp.moveaxis(leaf, axis, 0) for leaf in leaves]
    tokens = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in first]
    jaxpr, consts = _without_consts(jax.make_jaxpr(join)(*tokens, *tokens))
    results = _run(
        *consts, *first, jaxpr=jaxpr, num_consts=len(consts), reverse=reverse
    )
    return tree.unflatten([jnp.moveaxis(y, 0, axis) for y in results])


def _halves(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


def _without_consts(closed: Any) -> tuple[Any, list[Any]]:
    """Return a closed jaxpr that takes its constants as first arguments, and these."""
    consts = list(closed.consts)

    def run(*given: Any) -> list[Any]:
        own, rest = given[: len(consts)], given[len(consts) :]
        return jax.core.eval_jaxpr(closed.jaxpr, own, *rest)

    return jax.make_jaxpr(run)(*consts, *closed.in_avals), consts


# -------------------------------------------------------------------------- primitive


@associative_scan_p.def_abstract_eval
def _abstract_eval(*avals: Any, num_consts: int, **_: Any) -> Any:
    return avals[num_consts:]


def _run(*operands: Array, num_consts: int, **params: Any) -> list[Array]:
    """Bind the primitive, or go step by step where it has another ragged axis."""
    tokens = [jnp.shape(x)[1:] for x in operands[num_consts:]]
    shapes = [*map(jnp.shape, operands[:num_consts]), *tokens]
    ragged = any(is_symbolic_dim(n) for shape in shapes for n in shape)
    run = _step_by_step if ragged else associative_scan_p.bind
    return run(*operands, num_consts=num_consts, **params)


def _step_by_step(
    *operands: Array, jaxpr: Any, num_consts: int, reverse: bool
) -> list[Array]:
    """Return the same by `lax.scan`, which has derivatives."""
    consts, elems = operands[:num_consts], list(operands[num_consts:])

    def step(carry: Any, tokens: list[Array]) -> Any:
        begun, before = carry
        # At the first token the function gets it twice, and the result is thrown away.
        # All are constants there: 0 times an infinite derivative is NaN.
        closed = [jnp.where(begun, c, constant(c)) for c in consts]
        a = [
            jnp.where(begun, c, constant(x))
            for c, x in zip(before, tokens, strict=True)
        ]
        b = [jnp.where(begun, x, constant(x)) for x in tokens]
        joined = jaxpr_as_fun(jaxpr)(*closed, *a, *b)
        tokens = [jnp.where(begun, y, x) for y, x in zip(joined, tokens, strict=True)]
        return (jnp.array(True), tokens), tokens

    start = [jnp.zeros(x.shape[1:], x.dtype) for x in elems]
    begin = (jnp.array(False), start)
    return lax.scan(step, begin, elems, reverse=reverse)[1]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = map(ad.instantiate_zeros, tangents)
    run = ft.partial(_step_by_step, **params)
    return jax.jvp(run, tuple(primals), tuple(tangents))


def _batch(
    operands: Any, dims: Any, *, jaxpr: Any, num_consts: int, reverse: bool
) -> Any:
    sizes = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    (size,) = sizes
    elems = [
        jnp.broadcast_to(x[:, None], (x.shape[0], size, *x.shape[1:]))
        if d is None
        else jnp.moveaxis(x, d, 1)
        for x, d in zip(operands[num_consts:], dims[num_consts:], strict=True)
    ]
    axes = (*dims[:num_consts], *[0] * (2 * len(elems)))
    tokens = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in elems]
    consts = operands[:num_consts]
    mapped = jax.vmap(jaxpr_as_fun(jaxpr), axes)
    joined = jax.make_jaxpr(mapped)(*consts, *tokens, *tokens)
    results = _run(
        *consts, *elems, jaxpr=joined, num_consts=num_consts, reverse=reverse
    )
    return results, [1] * len(results)


ad.primitive_jvps[associative_scan_p] = _jvp
batching.primitive_batchers[associative_scan_p] = _batch
