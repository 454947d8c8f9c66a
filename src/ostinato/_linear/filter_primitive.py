"""The primitive of recursive filters, and its rules.

`filter_p` takes coefficients `b [N, n + 1]` and `a [N, n]` of N channels, or of one
that all channels share, and signals `x [N, T]`:

    y_t = sum_{k >= 0} b_k x_{t-k} - sum_{k >= 1} a_k y_{t-k}

With `lengths [N]`, `x` and `y` are 0 past the end of a channel: what would grow there
without bound is in no derivative.

It is linear in `x`, and its transpose is itself, the other way round; it is linear in
`b`, too, and its derivative by `a` is another filter, of `y`.
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

from .. import _compat, _native, _padding
from .._rnn import sharding
from .._rnn.eager import always_jitted
from .._typing import Array
from .call import Recurrence
from .primitive import run as run_recurrence

filter_p = Primitive("ostinato_filter")
_MOST_ORDER = 8  # kMostOrder of native/cpu/linear/kernels.h


def run(b: Array, a: Array, x: Array, *lengths: Array, reverse: bool = False) -> Array:
    """Bind the primitive; without `lengths`, every channel has all steps."""
    operands = [b, a, x, *lengths]
    axes = lambda: (_free_axes(*operands), [x.shape])  # noqa: E731
    return sharding.bind(filter_p, operands, axes, reverse=reverse)[0]


def _free_axes(b: Array, a: Array, x: Array, *lengths: Array) -> sharding.FreeAxes:
    """Return where channels lie; coefficients that all channels share have none."""
    axes = [-1 if c.shape[0] != x.shape[0] else 0 for c in (b, a)]
    axes += [0] * (1 + len(lengths))
    return sharding.FreeAxes(axes, [0], (False,) * len(axes))


def delayed(x: Array, count: int, reverse: bool) -> Array:
    """Return `x [N, T]`, `count` steps later, with zeros before its first step."""
    pads = (0, count) if reverse else (count, 0)
    x = jnp.pad(x, ((0, 0), pads))
    steps = x.shape[1] - count
    return x[:, count:] if reverse else x[:, :steps]


def _masked(x: Array, lengths: Sequence[Array]) -> Array:
    return _padding.zero(x, lengths[0], 1) if lengths else x


def _by_xla(b: Array, a: Array, x: Array, *, reverse: bool) -> Array:
    order = a.shape[1]
    inputs = sum(
        (b[:, k, None] * delayed(x, k, reverse) for k in range(1, order + 1)),
        b[:, 0, None] * x,
    )
    # The companion matrix moves y_{t-1} ... y_{t-n} on by one step.
    moves = jnp.broadcast_to(jnp.eye(order - 1, order, dtype=x.dtype),
                             (a.shape[0], order - 1, order))  # fmt: skip
    companion = jnp.concatenate([-a[:, None], moves], 1)[:, None]
    inputs = jnp.pad(inputs[..., None], ((0, 0), (0, 0), (0, order - 1)))
    start = jnp.zeros((x.shape[0], order), x.dtype)
    call = Recurrence(reverse, blocks=True, backend="xla")
    return run_recurrence(call, companion, inputs, start)[0][..., 0]


def _native_call(b: Array, a: Array, x: Array, *, reverse: bool) -> Array:
    def call(b: Array, a: Array, x: Array) -> list[Array]:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return [jax.ffi.ffi_call("ostinato_filter", result)(b, a, x, reverse=reverse)]

    return sharding.partition(call, _free_axes(b, a, x))(b, a, x)[0]


def _lower(native: bool, ctx: Any, *args: Any, reverse: bool) -> Sequence[Any]:
    _, a, x, *_ = ctx.avals_in
    runs = (
        native
        and not _compat.is_for_export(ctx)
        and x.dtype in (np.float32, np.float64)
        and a.shape[1] <= _MOST_ORDER
        and _native.status().library is not None
    )
    kernel = _native_call if runs else _by_xla

    def function(b: Array, a: Array, x: Array, *lengths: Array) -> Array:
        return _masked(kernel(b, a, _masked(x, lengths), reverse=reverse), lengths)

    return mlir.lower_fun(function, multiple_results=False)(ctx, *args)


def _abstract_eval(b: Any, a: Any, x: Any, *lengths: Any, reverse: bool) -> Any:
    return sharding.shaped_array(x.shape, x.dtype, like=[b, a, x, *lengths])


def _jvp(primals: Any, tangents: Any, *, reverse: bool) -> tuple[Array, Array]:
    b, a, x, *lengths = primals
    db, da, dx, *_ = tangents

    def bind(b: Array, a: Array, x: Array) -> Array:
        return run(b, a, x, *lengths, reverse=reverse)

    y = bind(b, a, x)
    parts = []
    if type(dx) is not ad.Zero:
        parts.append(bind(b, a, dx))
    if type(db) is not ad.Zero:
        parts.append(bind(db, a, x))
    if type(da) is not ad.Zero:  # a_k y_{t-k} is on the other side of the equation
        parts.append(bind(jnp.pad(-da, ((0, 0), (1, 0))), a, y))
    return y, sum(parts[1:], parts[0])


def _transpose(
    cotangent: Any, b: Any, a: Any, x: Any, *lengths: Any, reverse: bool
) -> list[Any]:
    dy = ad.instantiate_zeros(cotangent)
    nothing = [None] * len(lengths)

    def back(b: Array) -> Array:
        return run(b, a, dy, *lengths, reverse=not reverse)

    if ad.is_undefined_primal(x):
        return [None, None, back(b), *nothing]
    bar = back(jnp.zeros((1, a.shape[1] + 1), dy.dtype).at[0, 0].set(1))
    x = _masked(x, lengths)
    terms = [bar * delayed(x, k, reverse) for k in range(a.shape[1] + 1)]
    shared = b.aval.shape[0] != x.shape[0]
    db = jnp.stack([jnp.sum(term, 1) for term in terms], 1)
    return [jnp.sum(db, 0, keepdims=True) if shared else db, None, None, *nothing]


def _batch(args: Any, dims: Any, *, reverse: bool) -> tuple[Array, int]:
    """Merge the mapped axis into the channels."""
    pairs = list(zip(args, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    rows = [x.shape[1 if d == 0 else 0] for x, d in pairs]
    channels = rows[2]
    merged = []
    for (x, d), count in zip(pairs, rows, strict=True):
        if d is None and count == 1 and len(merged) < 2:  # coefficients, shared
            merged.append(x)
            continue
        x = jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
        x = jnp.broadcast_to(x, (size, channels, *x.shape[2:]))
        merged.append(x.reshape(size * channels, *x.shape[2:]))
    y = run(*merged, reverse=reverse)
    return y.reshape(size, channels, y.shape[1]), 0


@ft.partial(jax.jit, static_argnames="reverse")
def _alone(*operands: Array, reverse: bool) -> Array:
    return filter_p.bind(*operands, reverse=reverse)


filter_p.def_impl(always_jitted(_alone))
filter_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[filter_p] = _jvp
ad.primitive_transposes[filter_p] = _transpose
batching.primitive_batchers[filter_p] = _batch
_compat.lower_with_devices(filter_p)
mlir.register_lowering(filter_p, ft.partial(_lower, False))
mlir.register_lowering(filter_p, ft.partial(_lower, True), "cpu")
