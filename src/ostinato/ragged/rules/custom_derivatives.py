"""The rules of functions with derivatives of their own, which are kept.

The function is mapped under a custom derivative that maps the derivative given for one
example: `jax.jvp` and `jax.vjp` of the primitive, traced with symbolic sizes. This
module does not know how JAX stores such derivatives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._compat import is_determinant
from ..._typing import Array
from ..core.context import Context
from ..core.registry import Unsupported, register
from ..core.sizes import symbolic_axes
from ..core.stand_ins import differentiable_if
from ..core.values import Flat, Padded, Shared, Value, is_value, ragged_axes, with_array
from ..types.segments import along
from .linalg import determinant


class _Call:
    """A call of a function with its own derivatives, on an example or on the batch."""

    def __init__(self, ctx: Context, eqn: JaxprEqn):
        self.ctx, self.eqn = ctx, eqn
        self.avals = [_aval(atom.aval) for atom in eqn.invars]
        floats = [jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals]
        self.differentiable = [i for i, f in enumerate(floats) if f]

    def one(self, *arrays: Array) -> list[Array]:
        """Call the function on one example."""
        params = self.eqn.primitive.get_bind_params(self.eqn.params)
        return self.eqn.primitive.bind(*arrays, **params)

    def one_of(self, arrays: Sequence[Array]) -> Callable[..., list[Array]]:
        """Return the function of its differentiable arguments, others from `arrays`."""

        def function(*chosen: Array) -> list[Array]:
            full = list(arrays)
            for i, x in zip(self.differentiable, chosen, strict=True):
                full[i] = x
            return self.one(*full)

        return function

    def chosen(self, items: Sequence[Any]) -> list[Any]:
        """Return the items that belong to differentiable arguments."""
        return [items[i] for i in self.differentiable]

    @property
    def around(self) -> dict[str, Any]:
        """The arrays of the context, which `inside` takes."""
        known = self.ctx.symbols
        sizes = {"values": known.values, "present": known.present}
        return {
            "sizes": sizes,
            "changes": {"going": self.ctx.going, "reached": self.ctx.reached},
        }

    def inside(self, around: dict[str, Any]) -> Context:
        """Return a context for a function that gets `around`, too.

        Functions with custom derivatives must not close over arrays.
        """
        known = dataclasses.replace(self.ctx.symbols, **around["sizes"])
        return self.ctx.nested(symbols=known, **around["changes"])

    def run(self, around: Any, *values: Value) -> list[Value]:
        """Call the function on the batch."""
        return self.inside(around).evaluate(self.eqn.params["call_jaxpr"], values)


@register("custom_jvp_call", cheap=True)
def _custom_jvp(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    if is_determinant(eqn):
        return determinant(ctx, eqn, *values)
    call = _Call(ctx, eqn)
    run = jax.custom_jvp(call.run)

    @run.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        around, *values = primals
        inner = call.inside(around)

        def one(arrays: Any, tangents: Any) -> Any:
            return jax.jvp(call.one_of(arrays), call.chosen(arrays), tangents)

        jaxpr = jax.make_jaxpr(one)(call.avals, call.chosen(call.avals))
        results = inner.evaluate(jaxpr, [*values, *call.chosen(tangents[1:])])
        half = len(results) // 2
        likes = jax.eval_shape(call.run, around, *values)
        results = [
            _in_layout(inner, value, like)
            for value, like in zip(results, [*likes, *likes], strict=True)
        ]
        return results[:half], list(map(_tangent, results[half:], results[:half]))

    return run(call.around, *values)


def _in_layout(ctx: Context, value: Value, like: Value) -> Value:
    """Return `value` in the layout of `like`."""
    if isinstance(like, Flat):
        return ctx.to_flat(value)
    if isinstance(like, Padded):
        return ctx.to_padded(value)
    if not isinstance(value, Shared):
        raise Unsupported(
            "its derivative differs from example to example where the function does not"
        )
    return value


def _tangent(tangent: Value, primal: Value) -> Value:
    """Return a tangent of the dtype that JAX wants beside the primal value."""
    if jnp.issubdtype(primal.x.dtype, jnp.inexact):
        return tangent
    return with_array(primal, np.zeros(primal.x.shape, jax.dtypes.float0))


@register("custom_vjp_call", cheap=True)
def _custom_vjp(ctx: Context, eqn: JaxprEqn, *values: Value, **_: Any) -> list[Value]:
    call = _Call(ctx, eqn)
    layouts = [with_array(v, None) for v in values]
    if _depends_on_no_example(ctx, eqn, values):
        arrays = [v.x for v in values]
        if ctx.going is not None:
            any_goes = jnp.any(ctx.going)
            arrays = [differentiable_if(any_goes, x) for x in arrays]
        return [Shared(x, x.shape) for x in call.one(*arrays)]

    # Results are canonical: a shared one would get the cotangents of all examples.
    @jax.custom_vjp
    def run(around: Any, *values: Value) -> list[Value]:
        return list(map(call.inside(around).canonical, call.run(around, *values)))

    def forward(around: Any, *values: Value) -> Any:
        inner = call.inside(around)

        def one(*arrays: Any) -> Any:
            return jax.vjp(call.one_of(arrays), *call.chosen(arrays))

        jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(*call.avals)
        results = inner.evaluate(jaxpr, values)
        outputs = list(map(inner.canonical, results[: len(eqn.outvars)]))
        residuals = results[len(eqn.outvars) :]
        pull_back = jax.tree.unflatten(jax.tree.structure(shapes[1]), residuals)
        return outputs, (around, pull_back)

    def backward(saved: Any, cotangents: Any) -> Any:
        around, pull_back = saved
        inner = call.inside(around)
        residuals, tree = jax.tree.flatten(pull_back, is_leaf=is_value)

        def one(residuals: Any, cotangents: Any) -> Any:
            return jax.tree.unflatten(tree, residuals)(cotangents)

        avals = [jax.ShapeDtypeStruct(v.shape, v.x.dtype) for v in residuals]
        outs = [_aval(v.aval) for v in eqn.outvars]
        jaxpr = jax.make_jaxpr(one)(avals, outs)
        results = inner.evaluate(jaxpr, [*residuals, *cotangents])
        given = dict(zip(call.differentiable, results, strict=True))
        return (
            jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), around),
            *(
                _cotangent(inner, given[i], layout) if i in given else None
                for i, layout in enumerate(layouts)
            ),
        )

    run.defvjp(forward, backward)
    return run(call.around, *values)


def _depends_on_no_example(
    ctx: Context, eqn: JaxprEqn, values: Sequence[Value]
) -> bool:
    """Return whether nothing in a call depends on the example."""
    shapes = [*(v.shape for v in values), *ctx.out_shapes(eqn)]
    shared = all(isinstance(v, Shared) for v in values)
    return shared and not any(map(symbolic_axes, shapes))


def _aval(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _cotangent(ctx: Context, cotangent: Value, like: Value) -> Value:
    """Return the cotangent of an argument in its layout: a sum for a shared argument.

    It is zero in the padding, and for an example that is incomplete, or whose results
    are not used: a derivative that is not linear may make something of their cotangent,
    zero.
    """
    return with_array(like, _masked(ctx, cotangent, like))


def _masked(ctx: Context, cotangent: Value, like: Value) -> Array:
    used = ctx.used_examples()
    if isinstance(like, Flat):
        flat = ctx.to_flat(cotangent)
        valid = ctx.used(flat.dim).valid
        if used is not None:
            valid &= jnp.take(used, ctx.segments(flat.dim).ids, mode="clip")
        return jnp.where(along(valid, flat.axis, flat.x.ndim), flat.x, 0)
    x = ctx.to_padded(cotangent).x
    if used is not None:
        x = jnp.where(along(used, 0, x.ndim), x, 0)
    for axis in ragged_axes(cotangent):
        x = jnp.where(ctx.mask(x, axis, cotangent.shape[axis]), x, 0)
    return x if isinstance(like, Padded) else jnp.sum(x, 0)
