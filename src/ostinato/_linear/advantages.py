"""The primitive of generalised advantage estimates.

`gae_p` is what `composed` computes from `linear_recurrence`, and its derivatives are
those of `composed`. On CPUs the native library runs it in one pass over the arrays:
XLA's loops before and after a recurrence would take most of the time.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat, _native
from .._padding import is_last_step, is_step
from .._rnn import sharding
from .._rnn.eager import always_jitted
from .._typing import Array
from .api import linear_recurrence

gae_p = Primitive("ostinato_gae")
gae_p.multiple_results = True
_ARRAYS = 5  # rewards, values, bootstrap, discounts, lambdas; then the masks


def run(time_major: bool, arrays: Sequence[Array], masks: Sequence[Any]) -> list[Array]:
    """Bind the primitive, and return advantages and returns.

    Args:
        time_major: whether arrays are `[T, B]`, else `[B, T]`.
        arrays: rewards, values, bootstrap `[B]`, discounts and lambdas; the last two
            may be scalars.
        masks: terminations, truncations, and lengths `[B]`; None for absent ones.
    """
    present = tuple(mask is not None for mask in masks)
    operands = [*arrays, *(mask for mask in masks if mask is not None)]
    return _bind(operands, time_major, present)


def _bind(operands: list[Array], time_major: bool, present: tuple) -> list[Array]:
    """Bind under automatic sharding, while the arrays may have explicit sharding."""
    params = dict(time_major=time_major, present=present)
    shapes = [operands[0].shape] * 2
    axes = lambda: (_free_axes(operands, time_major), shapes)  # noqa: E731
    return sharding.bind(gae_p, operands, axes, **params)


def _free_axes(operands: Sequence[Array], time_major: bool) -> sharding.FreeAxes:
    """Return where sequences lie; numbers that all of them share have no axes."""
    axis = 1 if time_major else 0
    axes = [axis if x.ndim == 2 else 0 if x.ndim else -1 for x in operands]
    return sharding.FreeAxes(axes, [axis, axis], (False,) * len(axes))


def composed(*operands: Array, time_major: bool, present: tuple) -> list[Array]:
    """Return what `run` returns, by a linear recurrence."""
    rewards, values, bootstrap, discounts, lambdas = operands[:_ARRAYS]
    masks = iter(operands[_ARRAYS:])
    ends, cuts, lengths = (next(masks) if there else None for there in present)
    axis, shape = 0 if time_major else 1, rewards.shape
    zero = jnp.zeros((), rewards.dtype)
    inside = last = None
    if lengths is not None:
        last, inside = (f(lengths, shape[axis], axis) for f in (is_last_step, is_step))
        # Else a NaN there would meet a cotangent of 0.
        rewards, values = (jnp.where(inside, x, zero) for x in (rewards, values))
        discounts, lambdas = (
            jnp.where(inside, x, zero) if x.ndim else x for x in (discounts, lambdas)
        )
    steps = shape[axis]
    end = jnp.expand_dims(bootstrap, axis)
    after = values
    if steps:
        rest = jax.lax.slice_in_dim(values, 1, steps, axis=axis)
        after = jnp.concatenate([rest, end], axis)
    if last is not None:
        after = jnp.where(last, jnp.broadcast_to(end, shape), after)
    factors = jnp.broadcast_to(discounts, shape)
    carried, gone = factors * lambdas, ends if cuts is None else cuts
    if ends is not None and cuts is not None:
        gone = ends | cuts
    if gone is not None:
        factors, after = (jnp.where(gone, zero, x) for x in (factors, after))
    deltas = rewards + factors * after - values
    if cuts is not None:
        deltas = jnp.where(cuts, zero, deltas)
    found, _ = linear_recurrence(
        carried,
        deltas,
        reverse=True,
        seq_lengths=lengths,
        resets=gone,  # which not even a NaN passes
        time_major=time_major,
    )
    returns = found + values
    return [found, returns if inside is None else jnp.where(inside, returns, zero)]


def _native_call(*operands: Array, time_major: bool, present: tuple) -> Sequence[Array]:
    """Call the native library, on every device for its sequences."""

    def call(*operands: Array) -> Sequence[Array]:
        result = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
        masks = np.array(present, np.int64)
        run = jax.ffi.ffi_call("ostinato_gae", [result, result])
        return run(*operands, time_major=time_major, masks=masks)

    return sharding.partition(call, _free_axes(operands, time_major))(*operands)


def _lower(native: bool, ctx: Any, *args: Any, **params: Any) -> Sequence[Any]:
    runs = (
        native
        and not _compat.is_for_export(ctx)
        and ctx.avals_in[0].dtype in (np.float32, np.float64)
        and _native.status().library is not None
    )
    function = ft.partial(_native_call if runs else composed, **params)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


def _abstract_eval(*avals: Any, time_major: bool, present: tuple) -> list:
    rewards = avals[0]
    shaped = sharding.shaped_array(rewards.shape, rewards.dtype, like=avals)
    return [shaped, shaped]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list, list]:
    masks = primals[_ARRAYS:]
    dots = [ad.instantiate_zeros(t) for t in tangents[:_ARRAYS]]
    dots = sharding.make_varying(dots)
    run = lambda *arrays: composed(*arrays, *masks, **params)  # noqa: E731
    return jax.jvp(run, tuple(primals[:_ARRAYS]), tuple(dots))


def _batch(
    args: Any, dims: Any, *, time_major: bool, present: tuple
) -> tuple[list[Array], list[int]]:
    """Merge the mapped axis into the batch."""
    pairs = list(zip(args, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    shape = tuple(n for i, n in enumerate(args[0].shape) if i != dims[0])
    axis = 1 if time_major else 0
    merged = []
    for x, d in pairs:
        ndim = x.ndim - (d is not None)
        if ndim == 0 and d is None:
            merged.append(x)
            continue
        if ndim == 0:  # a number for each call
            one = [1, 1, 1]
            one[axis] = size
            x, d, ndim = (
                jnp.broadcast_to(x.reshape(one), _with(shape, axis, size)),
                axis,
                2,
            )
        at = axis if ndim == 2 else 0
        x = jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at)
        inner = shape if ndim == 2 else shape[axis : axis + 1]
        x = jnp.broadcast_to(x, _with(inner, at, size))
        merged.append(x.reshape(*inner[:at], size * inner[at], *inner[at + 1 :]))
    outs = _bind(merged, time_major, present)
    return [x.reshape(_with(shape, axis, size)) for x in outs], [axis, axis]


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


@ft.partial(jax.jit, static_argnames=("time_major", "present"))
def _alone(*operands: Array, time_major: bool, present: tuple) -> list[Array]:
    return gae_p.bind(*operands, time_major=time_major, present=present)


gae_p.def_impl(always_jitted(_alone))
gae_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[gae_p] = _jvp
batching.primitive_batchers[gae_p] = _batch
_compat.lower_with_devices(gae_p)
mlir.register_lowering(gae_p, ft.partial(_lower, False))
mlir.register_lowering(gae_p, ft.partial(_lower, True), "cpu")
