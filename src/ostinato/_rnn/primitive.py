"""The three primitives and all their rules: shapes, lowering, vmap and gradients.

`rnn_p` runs the network. Its JVP rule binds `rnn_p` with `save=True`, and
`rnn_tangent_p`, which is linear in the tangents; the transpose of that binds
`rnn_bwd_p`. So `grad` runs two fused operators, and forward mode one fused operator and
one XLA loop. Second derivatives are those of the XLA implementation by JAX's own rules.

The arguments of a primitive are the leaves of the named tuples in call.py. Its static
parameters are the `RNNCall`, the tree structure of the named tuples, and `ensemble`,
which tells for every leaf whether it has a leading ensemble axis. The members of an
ensemble have weights of their own; vmap over weights makes ensembles. All members share
a leaf that does not have the axis.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._typing import Array
from . import sharding, xla_packed
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .eager import always_jitted
from .lowering import (
    Ensemble,
    axes_of,
    by_vmap,
    free_axes,
    member_shapes,
    register,
    results_of,
)

_X = Operands._fields.index("x")  # also its index among the leaves


# ------------------------------------------------------------- binding, named tuples


def bind_trees(
    primitive: Primitive, trees: Any, flags: Any, **params: Any
) -> list[Array]:
    """Bind the leaves of `trees`; `flags` tells which ones have the ensemble axis."""
    leaves, tree = jax.tree.flatten(trees)
    ensemble = tuple(jax.tree.leaves(flags))
    leaves = sharding.make_varying(leaves)
    return primitive.bind(*leaves, tree=tree, ensemble=ensemble, **params)


def _same_flag(flag: bool, trees: Any) -> Any:
    return jax.tree.map(lambda _: flag, trees)


def run(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """Bind `rnn_p` and return its results in their named tuples."""
    shapes = call.output_shapes(operands)
    out = _bind_of_one(rnn_p, (operands,), call=call)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def run_backward(
    call: RNNCall, operands: Operands, residuals: Residuals, bar: Outputs
) -> Differentiable:
    """Bind `rnn_bwd_p` and return the gradients of all differentiable operands."""
    wrt = Differentiable(True, True, (True,) * len(operands.states))
    trees = (operands, residuals, bar)
    grads = _bind_of_one(rnn_bwd_p, trees, call=call, wrt=wrt)
    return _to_differentiable(wrt, grads)


def _bind_of_one(primitive: Primitive, trees: Any, **params: Any) -> list[Array]:
    """Bind the leaves of `trees`, which belong to one network, not an ensemble."""
    leaves, tree = jax.tree.flatten(trees)
    ensemble = (False,) * len(leaves)
    return _bind_automatic(primitive, *leaves, tree=tree, ensemble=ensemble, **params)


def _bind_automatic(
    primitive: Primitive,
    *leaves: Array,
    call: RNNCall,
    tree: Any,
    ensemble: Ensemble,
    **params: Any,
) -> list[Array]:
    """Bind under automatic sharding, while the arrays may have explicit sharding."""

    def axes() -> Any:
        operands = jax.tree.unflatten(tree, member_shapes(leaves, ensemble))
        results = results_of(call, tree, leaves, ensemble, **params)
        lead = _lead(leaves, ensemble)
        shapes = [(*lead, *out.shape) for out in jax.tree.leaves(results)]
        return free_axes(call, operands, results, ensemble), shapes

    static = dict(call=call, tree=tree, ensemble=ensemble)
    return sharding.bind(primitive, leaves, axes, **static, **params)


def _to_differentiable(wrt: Differentiable, values: Any) -> Differentiable:
    """Return the values, one for each True in `wrt`, under the names of the fields."""
    values = iter(values)
    return wrt.map(lambda asked: next(values) if asked else None)


# ------------------------------------------------------------------------------ shapes


def _lead(args: Any, ensemble: Ensemble) -> tuple[Any, ...]:
    """Return the axis in front of those of one member: how many members there are."""
    members = [a.shape[0] for a, e in zip(args, ensemble, strict=True) if e]
    return tuple(members[:1])


def _abstract_eval(
    shapes: Callable, *avals: Any, tree: Any, ensemble: Ensemble
) -> list:
    """Return `shapes(*trees)` of one member with the ensemble axis added in front."""
    trees = jax.tree.unflatten(tree, member_shapes(avals, ensemble))
    lead = _lead(avals, ensemble)
    return [
        sharding.shaped_array((*lead, *out.shape), out.dtype, like=avals)
        for out in jax.tree.leaves(shapes(*trees))
    ]


def _rnn_abstract_eval(
    *avals: Any, call: RNNCall, tree: Any, ensemble: Ensemble
) -> list:
    return _abstract_eval(call.output_shapes, *avals, tree=tree, ensemble=ensemble)


def _rnn_tangent_abstract_eval(
    *avals: Any, call: RNNCall, tree: Any, ensemble: Ensemble
) -> list:
    call = dataclasses.replace(call, save=False)

    def shapes(operands: Operands, *_: Any) -> Any:
        return call.output_shapes(operands)

    return _abstract_eval(shapes, *avals, tree=tree, ensemble=ensemble)


def _rnn_bwd_abstract_eval(
    *avals: Any, call: RNNCall, tree: Any, ensemble: Ensemble, wrt: Differentiable
) -> list:
    def shapes(operands: Operands, *_: Any) -> Any:
        return call.gradient_shapes(operands, wrt)

    return _abstract_eval(shapes, *avals, tree=tree, ensemble=ensemble)


# -------------------------------------------------------------------------------- vmap


def _batch(
    primitive: Primitive,
    args: Any,
    dims: Any,
    *,
    call: RNNCall,
    tree: Any,
    ensemble: Ensemble,
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Merge the mapped axis into the batch, or into the ensemble if weights differ."""
    bind = ft.partial(_bind_automatic, primitive, tree=tree, **params)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    args = [
        a if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    mapped = [d is not None for d in dims]
    axes = axes_of(call, jax.tree.unflatten(tree, args))
    if not _joins_batch(primitive, mapped, axes, params):
        bind = ft.partial(bind, call=call)
        return _batch_ensemble(bind, args, mapped, size, ensemble)

    one = [
        jax.ShapeDtypeStruct(a.shape[m:], a.dtype)
        for a, m in zip(args, mapped, strict=True)
    ]
    results = results_of(call, tree, one, ensemble, **params)
    args = [
        _join_batch(a, m, size, axis + e) if axis >= 0 else a
        for a, m, axis, e in zip(args, mapped, axes, ensemble, strict=True)
    ]
    outs = bind(*args, call=_joined_call(call, size), ensemble=ensemble)
    out_axes = axes_of(call, results)
    outs = [
        out.reshape(*out.shape[: any(ensemble)], *shape[:axis], size, *shape[axis:])
        for out, shape, axis in zip(
            outs, [r.shape for r in jax.tree.leaves(results)], out_axes, strict=True
        )
    ]
    return outs, [axis + any(ensemble) for axis in out_axes]


def _joined_call(call: RNNCall, size: Any) -> RNNCall:
    """Return the call over all `size` elements, each of which brings its buffers."""
    if call.packed is None:
        return call
    packed = dataclasses.replace(call.packed, buffers=size * call.packed.buffers)
    return dataclasses.replace(call, packed=packed)


def _joins_batch(
    primitive: Primitive, mapped: list[bool], axes: list[int], params: dict
) -> bool:
    """Return whether x is mapped and weights are not, so that nothing is repeated."""
    if any(m and axis < 0 for m, axis in zip(mapped, axes, strict=True)):
        return False
    x_mapped = mapped[_X]
    if primitive is rnn_bwd_p:
        return x_mapped and not params["wrt"].weights
    return x_mapped and primitive is rnn_p


def _join_batch(a: Array, mapped: bool, size: int, axis: int) -> Array:
    """Merge the leading mapped axis into the batch; repeat arrays without that axis."""
    if mapped:
        a = jnp.moveaxis(a, 0, axis)
    else:
        a = jnp.broadcast_to(
            jnp.expand_dims(a, axis), (*a.shape[:axis], size, *a.shape[axis:])
        )
    batch = a.shape[axis + 1]
    return a.reshape(*a.shape[:axis], size * batch, *a.shape[axis + 2 :])


def _batch_ensemble(
    bind: Callable, args: list[Array], mapped: list[bool], size: int, ensemble: Ensemble
) -> tuple[list[Array], list[int]]:
    if not any(ensemble):
        outs = bind(*args, ensemble=tuple(mapped))
        return outs, [0] * len(outs)
    flags = list(zip(args, mapped, ensemble, strict=True))
    inner = next(a.shape[m] for a, m, e in flags if e)
    merged = []
    for a, m, e in flags:
        if m or e:
            shape = a.shape[m + e :]
            if not m:
                a = a[None]
            if not e:
                a = a[:, None]
            a = jnp.broadcast_to(a, (size, inner, *shape))
            a = a.reshape(size * inner, *shape)
        merged.append(a)
    both = tuple(m or e for m, e in zip(mapped, ensemble, strict=True))
    outs = bind(*merged, ensemble=both)
    outs = [out.reshape(size, inner, *out.shape[1:]) for out in outs]
    return outs, [0] * len(outs)


# --------------------------------------------------------------------------- gradients


def _is_zero(t: Any) -> bool:
    return type(t) is ad.Zero


def _rnn_jvp(
    primals: Any, tangents: Any, *, call: RNNCall, tree: Any, ensemble: Ensemble
) -> tuple[list[Array], list[Any]]:
    if call.save:  # the saved arrays need tangents too
        return _jvp_of_xla(
            xla_packed.forward,
            primals,
            tangents,
            call=call,
            tree=tree,
            ensemble=ensemble,
        )
    saving = dataclasses.replace(call, save=True)
    out = rnn_p.bind(*primals, call=saving, tree=tree, ensemble=ensemble)
    (operands,) = jax.tree.unflatten(tree, primals)
    (shapes,) = jax.tree.unflatten(tree, member_shapes(primals, ensemble))
    structure = jax.tree.structure(saving.output_shapes(shapes))
    outputs, saved = jax.tree.unflatten(structure, out)
    assert saved is not None
    residuals = Residuals(outputs.y, saved)

    (given,) = jax.tree.unflatten(tree, tangents)
    (flags,) = jax.tree.unflatten(tree, ensemble)
    nonzero = _differentiable(given).map(lambda t: not _is_zero(t))
    dot, dot_flags = (
        _differentiable(of).map(lambda a, keep: a if keep else None, nonzero)
        for of in (given, flags)
    )
    dout = bind_trees(
        rnn_tangent_p,
        (operands._replace(prepared=None), residuals, dot),
        (
            flags._replace(prepared=None),
            _same_flag(any(ensemble), residuals),
            dot_flags,
        ),
        call=saving,
    )
    return jax.tree.leaves(outputs), dout


def _differentiable(operands: Operands) -> Differentiable:
    return Differentiable(operands.weights, operands.x, operands.states)


def _jvp_of_xla(
    implementation: Callable, primals: Any, tangents: Any, **params: Any
) -> tuple[list[Array], list[Array]]:
    """Differentiate an XLA implementation by JAX's own rules."""
    flat = by_vmap(implementation, **params)
    nonzero = [i for i, t in enumerate(tangents) if not _is_zero(t)]

    def of_nonzero(*values: Array) -> list[Array]:
        args = list(primals)
        for i, value in zip(nonzero, values, strict=True):
            args[i] = value
        return flat(*args)

    return jax.jvp(
        of_nonzero, [primals[i] for i in nonzero], [tangents[i] for i in nonzero]
    )


def _rnn_tangent_transpose(
    cotangents: Any, *args: Any, call: RNNCall, tree: Any, ensemble: Ensemble
) -> list[Any]:
    operands, residuals, dot = jax.tree.unflatten(tree, args)
    flags, residual_flags, dot_flags = jax.tree.unflatten(tree, ensemble)
    wrt = dot.map(lambda t: t is not None and ad.is_undefined_primal(t))
    dy, *dstates = map(ad.instantiate_zeros, cotangents)
    bar = Outputs(dy, tuple(dstates))
    grads = bind_trees(
        rnn_bwd_p,
        (operands, residuals, bar),
        (flags, residual_flags, _same_flag(any(ensemble), bar)),
        call=call,
        wrt=wrt,
    )
    if any(ensemble):
        # The cotangent of a tangent that all members share is the sum over members.
        asked = zip(dot_flags.items(), wrt.items(), strict=True)
        shared = [not flag for flag, w in asked if w]
        grads = [
            jnp.sum(g, axis=0) if s else g for g, s in zip(grads, shared, strict=True)
        ]
    placed = _to_differentiable(wrt, grads)
    given = zip(dot.items(), placed.items(), strict=True)
    tangents = [g for t, g in given if t is not None]
    return [None] * (len(args) - len(tangents)) + tangents


# ----------------------------------------------------------------------- registration


def _primitive(name: str, abstract_eval: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    static = ("call", "tree", "ensemble", "wrt")

    @ft.partial(jax.jit, static_argnames=static)
    def apply(*args: Array, **params: Any) -> list[Array]:
        return primitive.bind(*args, **params)

    primitive.def_impl(always_jitted(apply))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = ft.partial(_batch, primitive)
    return primitive


rnn_p = _primitive("ostinato_rnn", _rnn_abstract_eval)
register(rnn_p, "forward", _rnn_abstract_eval)
ad.primitive_jvps[rnn_p] = _rnn_jvp

rnn_tangent_p = _primitive("ostinato_rnn_tangent", _rnn_tangent_abstract_eval)
register(rnn_tangent_p, "tangent", _rnn_tangent_abstract_eval)
ad.primitive_jvps[rnn_tangent_p] = ft.partial(_jvp_of_xla, xla_packed.tangent)
ad.primitive_transposes[rnn_tangent_p] = _rnn_tangent_transpose

rnn_bwd_p = _primitive("ostinato_rnn_bwd", _rnn_bwd_abstract_eval)
register(rnn_bwd_p, "backward", _rnn_bwd_abstract_eval)
ad.primitive_jvps[rnn_bwd_p] = ft.partial(_jvp_of_xla, xla_packed.backward)
