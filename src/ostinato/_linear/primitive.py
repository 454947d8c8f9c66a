"""The three primitives of linear recurrences and their rules.

`linear_p` runs a recurrence. It is linear in `(b, h_0)`, and its transpose is itself,
the other way round, with the factor after the step. With a tangent of `a`, its JVP rule
binds `linear_tangent_p`, which is linear in all tangents; the transpose of that binds
`linear_bwd_p`, which computes the gradients of `a`, `b` and `h_0` in one pass over
`h`. The last two are made of `linear_p` and arithmetic, and so are their derivatives.

Gradients are JAX's: the transpose of a product with `a` is a product with `a`, not with
its conjugate.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._rnn import sharding
from .._rnn.accumulation import accumulation_dtype, widen
from .._rnn.eager import always_jitted
from .._typing import Array
from . import call as calls
from . import lowering
from .call import Recurrence

linear_p = Primitive("ostinato_linear")
linear_tangent_p = Primitive("ostinato_linear_tangent")
linear_bwd_p = Primitive("ostinato_linear_bwd")


def run(call: Recurrence, a: Array, b: Array, h_0: Array, *masks: Array) -> list[Array]:
    """Bind `linear_p`, and return `h` and the last state."""
    return _bind_automatic(linear_p, call, a, b, h_0, *masks)


def _bind_automatic(
    primitive: Primitive, call: Recurrence, *operands: Array
) -> list[Array]:
    """Bind under automatic sharding, while the arrays may have explicit sharding."""

    def axes() -> Any:
        shapes = [result.shape for result in _results(primitive, call, operands)]
        return lowering.free_axes(primitive, call, operands), shapes

    return sharding.bind(primitive, operands, axes, call=call)


def _bind(primitive: Primitive, call: Recurrence, *operands: Any) -> list[Array]:
    return primitive.bind(*sharding.make_varying(list(operands)), call=call)


# ------------------------------------------------------------------------------ shapes


def _results(
    primitive: Primitive, call: Recurrence, operands: Any
) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the results."""
    a, h, h_0 = operands[:3]  # `b` instead of `h` for `linear_p`, in the same shape
    results = [(h.shape, h.dtype), (h_0.shape, h_0.dtype)]
    if primitive is linear_bwd_p:
        results.insert(0, (call.factor_shape(a, h), a.dtype))
    return [jax.ShapeDtypeStruct(*result) for result in results]


def _abstract_eval(primitive: Primitive, *avals: Any, call: Recurrence) -> list:
    return [
        sharding.shaped_array(result.shape, result.dtype, like=avals)
        for result in _results(primitive, call, avals)
    ]


# ------------------------------------------------------------ tangents, in terms of p


def tangent(
    call: Recurrence,
    a: Array,
    h: Array,
    h_0: Array,
    da: Array,
    db: Array,
    dh_0: Array,
    *masks: Array,
) -> list[Array]:
    """Return the tangents of `h` and of the last state."""
    lengths, resets = call.masks(masks)
    keeps = calls.active(call, h, lengths, resets)
    # Before and after the product: else NaN in one of its sides would reach the result
    # or the gradient of the other side, as NaN times 0.
    before = calls.select(keeps, calls.previous_states(call, h, h_0, lengths))
    dtype = accumulation_dtype(h.dtype)
    change = calls.multiply(call, da.astype(dtype), before.astype(dtype))
    moved = db.astype(dtype) + calls.select(keeps, change)
    return _bind(linear_p, call, a, moved.astype(h.dtype), dh_0, *masks)


def backward(
    call: Recurrence,
    a: Array,
    h: Array,
    h_0: Array,
    dh: Array,
    dh_n: Array,
    *masks: Any,
) -> list[Array]:
    """Return the gradients of `a`, by sequence, of `b` and of `h_0`."""
    lengths, resets = call.masks(masks)
    back = _transposed_factors(call, a)
    db, dh_0 = _bind(linear_p, call.transposed(), back, dh, dh_n, *masks)
    before = calls.previous_states(call, h, h_0, lengths)
    keeps = calls.active(call, h, lengths, resets)
    dtype = accumulation_dtype(h.dtype)
    before = calls.select(keeps, before).astype(dtype)
    bar = calls.select(keeps, db).astype(dtype)
    if call.blocks:
        da = jnp.expand_dims(bar, -1) * jnp.expand_dims(before, -2)
    else:
        da = bar * before
        if call.shares_units(a, h):
            da = jnp.sum(da, -1, keepdims=True)
    if call.shares(a, call.time_axis):
        da = jnp.sum(da, call.time_axis, keepdims=True)
    return [da.astype(a.dtype), db, dh_0]


def _transposed_factors(call: Recurrence, a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2) if call.blocks else a


def _like_factors(call: Recurrence, a: Any, da: Array) -> Array:
    """Return the gradient of factors by sequence in the shape of `a`."""
    if da.shape == a.shape:
        return da
    return jnp.sum(widen(da), call.batch_axis, keepdims=True).astype(da.dtype)


# ------------------------------------------------------------------------- derivatives


def _linear_jvp(primals: Any, tangents: Any, *, call: Recurrence) -> tuple[list, list]:
    a, b, h_0, *masks = primals
    da, db, dh_0 = tangents[:3]
    out = _bind(linear_p, call, *primals)
    if type(da) is not ad.Zero and call.after:
        return out, _tangents_of(_factor_before, primals, tangents, call=call)[1]
    db, dh_0 = ad.instantiate_zeros(db), ad.instantiate_zeros(dh_0)
    if type(da) is ad.Zero:
        return out, _bind(linear_p, call, a, db, dh_0, *masks)
    h = out[0]
    return out, _bind(linear_tangent_p, call, a, h, h_0, da, db, dh_0, *masks)


def _factor_before(
    call: Recurrence, a: Array, b: Array, h_0: Array, *masks: Array
) -> list[Array]:
    """Return the results of `linear_p` with the factor after, by one with it before."""
    lengths, resets = call.masks(masks)
    axis = call.time_axis
    last = b.shape[axis] - 1
    if last < 0:
        return [b, h_0]
    shape = list(a.shape)
    shape[axis] = b.shape[axis]
    if lengths is not None:
        shape[call.batch_axis] = b.shape[call.batch_axis]
    factors = jnp.broadcast_to(a, shape)
    one = jnp.eye(a.shape[-1], dtype=a.dtype) if call.blocks else jnp.ones((), a.dtype)
    one = jnp.broadcast_to(one, shape)
    inside = calls.valid(call, factors, lengths)
    if inside is not None:
        factors = jnp.where(jnp.broadcast_to(inside, shape), factors, one)
        b = calls.select(calls.valid(call, b, lengths), b)

    def move(x: Array, first: Array) -> tuple[Array, Array]:
        """Return what acts before each step, and what acts after all of them."""
        at = lambda *t: jax.lax.slice_in_dim(x, *t, axis=axis)  # noqa: E731
        if call.reverse:
            moved, end = [at(1, last + 1), first], at(0, 1)
        else:
            moved, end = [first, at(0, last)], at(last, last + 1)
        return jnp.concatenate(moved, axis), jnp.squeeze(end, axis)

    factors, end = move(factors, jax.lax.slice_in_dim(one, 0, 1, axis=axis))
    masks, kept = (), None
    if resets is not None:
        inside = calls.valid(call, resets, lengths)
        resets = resets if inside is None else resets & inside
        none = jnp.zeros_like(jax.lax.slice_in_dim(resets, 0, 1, axis=axis))
        resets, at_end = move(resets, none)
        masks, kept = (resets,), ~jnp.expand_dims(at_end, range(1, h_0.ndim))
    before = dataclasses.replace(call, after=False, has_lengths=False)
    h, h_n = _bind(linear_p, before, factors, b, h_0, *masks)
    # As in `tangent`, before and after the product.
    h_n = calls.select(kept, calls.multiply(call, end, calls.select(kept, h_n)))
    return [calls.select(calls.valid(call, h, lengths), h), h_n]


def _linear_transpose(cotangents: Any, *operands: Any, call: Recurrence) -> list[Any]:
    a, b, h_0, *masks = operands
    assert not ad.is_undefined_primal(a)
    dh, dh_n = map(ad.instantiate_zeros, cotangents)
    back = _transposed_factors(call, a)
    db, dh_0 = _bind(linear_p, call.transposed(), back, dh, dh_n, *masks)
    return [
        None,
        db if ad.is_undefined_primal(b) else None,
        dh_0 if ad.is_undefined_primal(h_0) else None,
        *(None for _ in masks),
    ]


def _tangents_of(
    function: Callable, primals: Any, tangents: Any, *, call: Recurrence
) -> tuple[list, list]:
    """Return the results of `function(call, *primals)` and their tangents."""
    has_tangent = [type(t) is not ad.Zero for t in tangents]

    def run(*varying: Array) -> list[Array]:
        given = iter(varying)
        both = zip(primals, has_tangent, strict=True)
        return function(call, *(next(given) if has else x for x, has in both))

    triples = zip(primals, tangents, has_tangent, strict=True)
    points, directions = zip(*((x, t) for x, t, has in triples if has), strict=True)
    return jax.jvp(run, points, directions)


def _tangent_transpose(cotangents: Any, *operands: Any, call: Recurrence) -> list[Any]:
    a, h, h_0, *tangents = operands[:6]
    masks = operands[6:]
    dh, dh_n = map(ad.instantiate_zeros, cotangents)
    asked = [ad.is_undefined_primal(t) for t in tangents]
    if asked[0]:
        gradients = _bind(linear_bwd_p, call, a, h, h_0, dh, dh_n, *masks)
        gradients[0] = _like_factors(call, tangents[0].aval, gradients[0])
    else:
        back = _transposed_factors(call, a)
        gradients = _bind(linear_p, call.transposed(), back, dh, dh_n, *masks)
        gradients = [None, *gradients]
    found = [g if ask else None for g, ask in zip(gradients, asked, strict=True)]
    return [None, None, None, *found, *(None for _ in masks)]


def _bwd_transpose(cotangents: Any, *operands: Any, call: Recurrence) -> list[Any]:
    a, h, h_0, *bars = operands[:5]
    masks = operands[5:]
    da, db, dh_0 = map(ad.instantiate_zeros, cotangents)
    found = _bind(linear_tangent_p, call, a, h, h_0, da, db, dh_0, *masks)
    found = [
        g if ad.is_undefined_primal(x) else None
        for g, x in zip(found, bars, strict=True)
    ]
    return [None, None, None, *found, *(None for _ in masks)]


# -------------------------------------------------------------------------------- vmap


def _batch(
    primitive: Primitive, args: Any, dims: Any, *, call: Recurrence
) -> tuple[list[Array], list[int]]:
    """Merge the mapped axis into the batch."""
    inward, outward = lowering.kinds(primitive, call)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    one = [
        x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :])
        for x, d in zip(args, dims, strict=True)
    ]
    batch = one[1][call.batch_axis]
    merged = []
    for x, d, kind, shape in zip(args, dims, inward, one, strict=True):
        axis = lowering.batch_axis(kind, call)
        if d is None and kind == "a" and call.shares(x, call.batch_axis):
            merged.append(x)
            continue
        x = jnp.expand_dims(x, axis) if d is None else jnp.moveaxis(x, d, axis)
        rest = shape[axis + 1 :]
        x = jnp.broadcast_to(x, (*shape[:axis], size, batch, *rest))
        merged.append(x.reshape(*shape[:axis], size * batch, *rest))
    axes = [lowering.batch_axis(kind, call) for kind in outward]
    outs = [
        x.reshape(*x.shape[:axis], size, batch, *x.shape[axis + 1 :])
        for x, axis in zip(_bind_automatic(primitive, call, *merged), axes, strict=True)
    ]
    return outs, axes


# ------------------------------------------------------------------------ registration


def _register(
    primitive: Primitive,
    implementation: Callable | None,
    jvp: Callable,
    transpose: Callable,
) -> None:
    @ft.partial(jax.jit, static_argnames="call")
    def alone(*operands: Array, call: Recurrence) -> Sequence[Array]:
        return primitive.bind(*operands, call=call)

    primitive.multiple_results = True
    primitive.def_impl(always_jitted(alone))
    primitive.def_abstract_eval(ft.partial(_abstract_eval, primitive))
    batching.primitive_batchers[primitive] = ft.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    lowering.register(primitive, implementation)


_register(linear_p, None, _linear_jvp, _linear_transpose)
_register(
    linear_tangent_p,
    tangent,
    ft.partial(_tangents_of, tangent),
    _tangent_transpose,
)
_register(
    linear_bwd_p,
    backward,
    ft.partial(_tangents_of, backward),
    _bwd_transpose,
)
