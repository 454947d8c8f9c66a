"""Functions with derivatives of their own: the derivatives are kept.

The function is mapped under a custom derivative that maps the derivative given for one
example: `jax.jvp` and `jax.vjp` of the primitive, traced with symbolic sizes. Nothing
is known here of how JAX stores such rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._typing import Array
from ..core.context import Context
from ..core.registry import Refuse, register
from ..core.sizes import symbolic_axes
from ..core.values import Flat, Packing, Padded, Shared, Value, ragged_axes
from ..types.segments import along
from .linalg import determinant, is_determinant


class _Call:
    """One call of such a function, for one example and for the batch."""

    def __init__(
        self,
        ctx: Context,
        eqn: JaxprEqn,
        values: Sequence[Value],
        own_results: bool = False,
    ):
        self.ctx = ctx
        self.own_results = own_results
        self.eqn = eqn
        self.inputs = Packing.of(values)
        self.avals = [_like(atom.aval) for atom in eqn.invars]
        floats = [jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals]
        self.differentiable = [i for i, f in enumerate(floats) if f]
        self.outputs: Packing | None = None

    def one(self, *arrays: Array) -> list[Array]:
        """The function, of one example."""
        params = self.eqn.primitive.get_bind_params(self.eqn.params)
        return self.eqn.primitive.bind(*arrays, **params)

    def one_of(self, arrays: Sequence[Array]) -> Callable[..., list[Array]]:
        """The function of its differentiable arguments, the others from `arrays`."""

        def function(*chosen: Array) -> list[Array]:
            full = list(arrays)
            for i, x in zip(self.differentiable, chosen, strict=True):
                full[i] = x
            return self.one(*full)

        return function

    def chosen(self, items: Sequence[Any]) -> list[Any]:
        """Those of `items` that belong to differentiable arguments."""
        return [items[i] for i in self.differentiable]

    def run(self, symbols: dict[str, Array], *arrays: Array) -> list[Array]:
        """The function of the batch."""
        ctx = self.ctx.nested(symbols)
        body = self.eqn.params["call_jaxpr"]
        results = ctx.evaluate(body, self.inputs.unpack(arrays))
        return self.conform(ctx, results)

    def of_no_example(self) -> bool:
        """Whether nothing in it depends on the example."""
        shapes = [
            *(v.shape for v in self.inputs.values),
            *self.ctx.out_shapes(self.eqn),
        ]
        shared = all(isinstance(v, Shared) for v in self.inputs.values)
        return shared and not any(map(symbolic_axes, shapes))

    def conform(self, ctx: Context, results: Sequence[Value]) -> list[Array]:
        """The arrays of results, in the layouts of the first time.

        With `own_results` each example has its own, even if all are the same.
        """
        if self.own_results:
            results = [ctx.canonical(v) for v in results]
        if self.outputs is None:
            self.outputs = Packing.of(results)
        return [
            as_layout(ctx, v, like).x
            for v, like in zip(results, self.outputs.values, strict=True)
        ]

    def wrap(self, arrays: Sequence[Array]) -> list[Value]:
        """The results as values."""
        assert self.outputs is not None  # one of the functions has run
        return self.outputs.unpack(arrays)


def as_layout(ctx: Context, value: Value, like: Value) -> Value:
    """`value` in the layout of `like`."""
    if isinstance(like, Flat):
        return ctx.to_flat(value)
    if isinstance(like, Padded):
        return ctx.to_padded(value)
    if not isinstance(value, Shared):
        raise Refuse(
            "its derivative differs from example to example where the function does not"
        )
    return value


@register("custom_jvp_call")
def _custom_jvp(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    if is_determinant(eqn):
        return determinant(ctx, eqn, *values)
    call = _Call(ctx, eqn, values)
    run = jax.custom_jvp(call.run)

    @run.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        symbols, *arrays = primals
        inner = ctx.nested(symbols)

        def one(arrays: Any, tangents: Any) -> Any:
            return jax.jvp(call.one_of(arrays), call.chosen(arrays), tangents)

        jaxpr = jax.make_jaxpr(one)(call.avals, call.chosen(call.avals))
        packed = Packing(tuple(call.chosen(call.inputs.values)))
        tangents = packed.unpack(call.chosen(tangents[1:]))
        results = inner.evaluate(jaxpr, [*call.inputs.unpack(arrays), *tangents])
        half = len(results) // 2
        primals = call.conform(inner, results[:half])
        moves = call.conform(inner, results[half:])
        return primals, [_or_float0(m, p) for m, p in zip(moves, primals, strict=True)]

    return call.wrap(run(ctx.symbols.values, *(v.x for v in values)))


def _or_float0(tangent: Array, primal: Array) -> Any:
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return tangent
    return np.zeros(primal.shape, jax.dtypes.float0)


@register("custom_vjp_call")
def _custom_vjp(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    # A shared result would come with the cotangents of all examples in one.
    call = _Call(ctx, eqn, values, own_results=True)
    if call.of_no_example():
        return [Shared(x, x.shape) for x in call.one(*(v.x for v in values))]
    run = jax.custom_vjp(call.run)
    saved: list[tuple[Any, Packing]] = []  # the last pull-back, and its residuals

    def forward(symbols: dict[str, Array], *arrays: Array) -> Any:
        inner = ctx.nested(symbols)

        def one(*arrays: Any) -> Any:
            return jax.vjp(call.one_of(arrays), *call.chosen(arrays))

        jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(*call.avals)
        results = inner.evaluate(jaxpr, call.inputs.unpack(arrays))
        count = len(eqn.outvars)
        residuals = results[count:]
        saved.append((shapes[1], Packing.of(residuals)))
        outputs = call.conform(inner, results[:count])
        return outputs, (symbols, [v.x for v in residuals])

    def backward(residuals: Any, cotangents: Any) -> Any:
        symbols, arrays = residuals
        inner = ctx.nested(symbols)
        pull_back, packing = saved[-1]
        avals, tree = jax.tree.flatten(pull_back)

        def one(residuals: Any, cotangents: Any) -> Any:
            return jax.tree.unflatten(tree, residuals)(cotangents)

        outs = [_like(v.aval) for v in eqn.outvars]
        jaxpr = jax.make_jaxpr(one)(avals, outs)
        results = inner.evaluate(
            jaxpr, [*packing.unpack(arrays), *call.wrap(cotangents)]
        )
        given = iter(results)
        return (
            {k: np.zeros(v.shape, jax.dtypes.float0) for k, v in symbols.items()},
            *(
                _gather(inner, next(given), like) if i in call.differentiable else None
                for i, like in enumerate(call.inputs.values)
            ),
        )

    run.defvjp(forward, backward)
    return call.wrap(run(ctx.symbols.values, *(v.x for v in values)))


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _gather(ctx: Context, cotangent: Value, like: Value) -> Array:
    """The cotangent of an argument: a sum for a shared one.

    It is zero in the padding, and for an example that is too short.
    """
    complete = ctx.complete()
    if isinstance(like, Flat):
        flat = ctx.to_flat(cotangent)
        valid = ctx.tail(flat.dim).valid
        if complete is not None:
            valid &= jnp.take(complete, ctx.segments(flat.dim).ids, mode="clip")
        return jnp.where(along(valid, flat.axis, flat.x.ndim), flat.x, 0)
    x = ctx.to_padded(cotangent).x
    if complete is not None:
        x = jnp.where(along(complete, 0, x.ndim), x, 0)
    for axis in ragged_axes(cotangent):
        x = jnp.where(ctx.mask(x, axis, cotangent.shape[axis]), x, 0)
    return x if isinstance(like, Padded) else jnp.sum(x, 0)
