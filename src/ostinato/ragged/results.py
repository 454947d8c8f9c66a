"""The results of all examples as the caller gets them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import SymbolicScope, symbolic_shape

from .._typing import Array
from .core.context import Context
from .core.fill import fill_value
from .core.sizes import evaluate, is_derived, is_symbol, largest, rename, symbol_names
from .core.values import Shared, Value, ragged_axes
from .inputs import Inputs
from .types.array import RaggedArray
from .types.padded import PaddedRagged
from .types.segments import Segments, UsedCapacity, along


def wrap(ctx: Context, inputs: Inputs, value: Value, axis: Any) -> Any:
    """Return a dense array, a RaggedArray or a PaddedRagged, by the ragged axes.

    Args:
        ctx: the context of the call.
        inputs: the inputs of the call.
        value: one result.
        axis: the entry of `out_axes` for this result.
    """
    ragged = ragged_axes(value)
    if not ragged:
        return _dense(ctx, inputs, value, axis)
    if axis != 0 or isinstance(axis, bool):
        raise ValueError(
            "`out_axes` must be 0 for a result of different sizes, which comes as "
            f"concatenated tokens, got {axis!r}"
        )
    complete = ctx.complete()
    lengths = tuple(ctx.lengths(value.shape[a])[: inputs.batch] for a in ragged)
    names = [_name(inputs, value.shape[a]) for a in ragged]
    if len(ragged) > 1:
        data = ctx.to_padded(value).x
        if complete is not None:
            data = _keep(data, along(complete, 0, data.ndim), fill_value(data.dtype))
        for a in ragged:
            data = _keep(data, ctx.mask(data, a, value.shape[a]), 0)
            most = largest(value.shape[a], inputs.ranges)
            data = jax.lax.slice_in_dim(data, 0, most, axis=a + 1)
        dims = tuple(zip(ragged, names, strict=True))
        return PaddedRagged(data[: inputs.batch], lengths, dims)
    flat = ctx.to_flat(value)
    data, dim = flat.x, flat.dim
    # An empty example has no token in a result of the same lengths.
    nothing = list(inputs.dims) == names and inputs.dims[names[0]].min_length == 1
    if complete is not None and not nothing:
        tokens = jnp.take(complete, ctx.segments(dim).ids)
        data = _keep(data, along(tokens, flat.axis, data.ndim), fill_value(data.dtype))
    data = _keep(data, along(ctx.used(dim).valid, flat.axis, data.ndim), 0)
    longest = max(largest(dim, inputs.ranges), 1)
    kept = int(flat.axis), names[0], longest  # JAX has some axes as NumPy's integers
    return RaggedArray.tree_unflatten(kept, (data, lengths[0]))


def of_examples(result: Any, which: Array) -> Any:
    """Return a result that has values for some examples alone, and else NaN.

    Dtypes without NaN have the fill value of `jax.numpy.take`.

    Args:
        result: a dense array, a RaggedArray or a PaddedRagged.
        which: bool `[batch]`, the examples that keep their values.
    """
    if isinstance(result, PaddedRagged):
        return dataclasses.replace(result, data=of_examples(result.data, which))
    if not isinstance(result, RaggedArray):
        return _keep(result, along(which, 0, result.ndim), fill_value(result.dtype))
    used = UsedCapacity.of(result.lengths, result.capacity)
    segments = Segments.of(result.lengths, result.capacity, used)
    tokens = jnp.take(which, segments.drop_ids, mode="fill", fill_value=True)
    axis, data = result.axis, result.data
    kept = _keep(data, along(tokens, axis, data.ndim), fill_value(data.dtype))
    return result.with_data(kept)


def _dense(ctx: Context, inputs: Inputs, value: Value, axis: Any) -> Array:
    if axis is None:
        if not isinstance(value, Shared):
            raise ValueError(
                "`out_axes` is None for a result that differs from example to example"
            )
        return value.x
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"`out_axes` must hold integers and None, got {axis!r}")
    x = ctx.to_padded(value).x
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"`out_axes` has {axis} for a result of {x.ndim} axes")
    complete = ctx.complete()
    if complete is not None and not isinstance(value, Shared):
        x = _keep(x, along(complete, 0, x.ndim), fill_value(x.dtype))
    return jnp.moveaxis(x[: inputs.batch], 0, axis)


def _keep(x: Array, condition: Array, other: Any) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jnp.where(condition, x, jnp.asarray(other, x.dtype))


def _name(inputs: Inputs, dim: Any) -> str:
    """Return a size in the names of the caller."""
    for d in inputs.dims.values():
        if d.size == str(dim):
            return d.name
    # As JAX writes it, so that results of a mapped result have names of the same form.
    scope, known, written = SymbolicScope(), {}, {}
    taken = {part for d in inputs.own_dims for part in re.findall(r"\w+", d.name)}
    stand_ins = (s for s in map("dim{}".format, itertools.count()) if s not in taken)
    for d in inputs.own_dims:
        name = d.name
        made = is_derived(name) and all(map(is_symbol, symbol_names(name)))
        if not (is_symbol(name) or made):
            stand_in = next(stand_ins)
            written[stand_in], name = f"({name})", stand_in
        parts = symbolic_shape(", ".join(symbol_names(name)), scope=scope)
        size = evaluate(name, dict(zip(symbol_names(name), parts, strict=True)))
        known[d.symbol] = size + d.offset
    return rename(str(evaluate(dim, known)), written)
