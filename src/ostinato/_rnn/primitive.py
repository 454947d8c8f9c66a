"""The three primitives and every rule of theirs: shapes, lowering, vmap, gradients.

`rnn_p` runs the network. Its JVP rule binds `rnn_p` in the form that saves, and
`rnn_tangent_p`, which is linear in the tangents; transposing that binds `rnn_bwd_p`.
So `grad` sees two fused operators, and forward mode one fused and one XLA loop. What
is differentiated once more falls back to JAX's own rules on the XLA form.

Arrays travel as the leaves of the named tuples in `call.py`; the static parameters are
the `RNNCall`, the tree that puts the leaves together again, and `groups`: for every
leaf whether it has a leading group axis. Groups are runs with weights of their own,
which is what vmap over weights makes; a leaf without the axis is shared by all groups.
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
from . import cpu, sharding, xla_rows
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .lowering import (
    Groups,
    always_jitted,
    axes_of,
    register,
    results_of,
    sharded,
    ungrouped,
    xla_form,
)

_X = Operands._fields.index("x")  # its place among the leaves: what precedes is there
_NUM_DIFFERENTIABLE = len(Differentiable._fields)  # they come first among the operands


# ------------------------------------------------------------- binding, named tuples


def bind_trees(
    primitive: Primitive, trees: Any, flags: Any, **params: Any
) -> list[Array]:
    """Bind the leaves of `trees`; `flags`, alike in shape, says which are grouped."""
    leaves, tree = jax.tree.flatten(trees)
    groups = tuple(jax.tree.leaves(flags))
    leaves = sharding.make_varying(leaves)
    return primitive.bind(*leaves, tree=tree, groups=groups, **params)


def _all(flag: bool, trees: Any) -> Any:
    return jax.tree.map(lambda _: flag, trees)


def run(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """Bind `rnn_p`."""
    shapes = call.output_shapes(operands)
    out = _enter(rnn_p, call, (operands,), shapes)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def run_backward(
    call: RNNCall, operands: Operands, residuals: Residuals, bar: Outputs
) -> Differentiable:
    """Bind `rnn_bwd_p` for the gradients of everything that has one."""
    wrt = Differentiable(True, True, True, operands.c_0 is not None)
    shapes = call.gradient_shapes(operands, wrt)
    trees = (operands, residuals, bar)
    return _place(wrt, _enter(rnn_bwd_p, call, trees, (shapes,), wrt=wrt))


def _enter(
    primitive: Primitive, call: RNNCall, trees: Any, shapes: Any, **params: Any
) -> list[Array]:
    """Bind from outside, where arrays may be of explicit sharding."""
    leaves, tree = jax.tree.flatten(trees)
    flags = _all(False, trees)
    layout = sharded(call, trees, shapes, tuple(jax.tree.leaves(flags)))

    def bind(*leaves: Array) -> list[Array]:
        trees = jax.tree.unflatten(tree, leaves)
        return bind_trees(primitive, trees, flags, call=call, **params)

    results = [out.shape for out in jax.tree.leaves(shapes)]
    return sharding.automatic(bind, leaves, layout, results)


def _place(wrt: Differentiable, values: Any) -> Differentiable:
    """The values, one for each True in `wrt`, back under their names."""
    values = iter(values)
    return Differentiable(*(next(values) if asked else None for asked in wrt))


# ------------------------------------------------------------------------------ shapes


def _num_groups(args: Any, groups: Groups) -> Any:
    return next(a.shape[0] for a, g in zip(args, groups, strict=True) if g)


def _abstract_eval(shapes: Callable, *avals: Any, tree: Any, groups: Groups) -> list:
    """`shapes(*trees)` without groups, with the group axis put in front again."""
    trees = jax.tree.unflatten(tree, ungrouped(avals, groups))
    lead = (_num_groups(avals, groups),) if any(groups) else ()
    return [
        sharding.shaped_array((*lead, *out.shape), out.dtype, like=avals)
        for out in jax.tree.leaves(shapes(*trees))
    ]


def _rnn_abstract_eval(*avals: Any, call: RNNCall, tree: Any, groups: Groups) -> list:
    return _abstract_eval(call.output_shapes, *avals, tree=tree, groups=groups)


def _rnn_tangent_abstract_eval(
    *avals: Any, call: RNNCall, tree: Any, groups: Groups
) -> list:
    call = dataclasses.replace(call, save=False)

    def shapes(operands: Operands, *_: Any) -> Any:
        return call.output_shapes(operands)

    return _abstract_eval(shapes, *avals, tree=tree, groups=groups)


def _rnn_bwd_abstract_eval(
    *avals: Any, call: RNNCall, tree: Any, groups: Groups, wrt: Differentiable
) -> list:
    def shapes(operands: Operands, *_: Any) -> Any:
        return call.gradient_shapes(operands, wrt)

    return _abstract_eval(shapes, *avals, tree=tree, groups=groups)


# -------------------------------------------------------------------------------- vmap


def _batch(
    primitive: Primitive,
    args: Any,
    dims: Any,
    *,
    call: RNNCall,
    tree: Any,
    groups: Groups,
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """The new axis joins the batch; where weights differ along it, the groups."""
    bind = ft.partial(primitive.bind, tree=tree, **params)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    args = [
        a if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    mapped = [d is not None for d in dims]
    axes = axes_of(call, jax.tree.unflatten(tree, args))
    if not _joins_batch(primitive, mapped, axes, params):
        bind = ft.partial(bind, call=call)
        return _batch_groups(bind, args, mapped, size, groups)

    one = [
        jax.ShapeDtypeStruct(a.shape[m:], a.dtype)
        for a, m in zip(args, mapped, strict=True)
    ]
    results = results_of(call, tree, one, groups, **params)
    args = [
        _join_batch(a, m, size, axis + g) if axis >= 0 else a
        for a, m, axis, g in zip(args, mapped, axes, groups, strict=True)
    ]
    outs = bind(*args, call=_joined(call, size), groups=groups)
    out_axes = axes_of(call, results)
    outs = [
        out.reshape(*out.shape[: any(groups)], *shape[:axis], size, *shape[axis:])
        for out, shape, axis in zip(
            outs, [r.shape for r in jax.tree.leaves(results)], out_axes, strict=True
        )
    ]
    return outs, [axis + any(groups) for axis in out_axes]


def _joined(call: RNNCall, size: Any) -> RNNCall:
    """The call over all of `size` elements: of rows, each brings its own piles."""
    if call.rows is None:
        return call
    rows = dataclasses.replace(call.rows, piles=size * call.rows.piles)
    return dataclasses.replace(call, rows=rows)


def _joins_batch(
    primitive: Primitive, mapped: list[bool], axes: list[int], params: dict
) -> bool:
    """Whether weights stay whole, and x comes along so that nothing is repeated."""
    if any(m and axis < 0 for m, axis in zip(mapped, axes, strict=True)):
        return False
    x_mapped = mapped[_X]
    if primitive is rnn_bwd_p:
        return x_mapped and not params["wrt"].weights
    return x_mapped and primitive is rnn_p


def _join_batch(a: Array, mapped: bool, size: int, axis: int) -> Array:
    """Merge the mapped axis, in front, into the batch; repeat what is not mapped."""
    if mapped:
        a = jnp.moveaxis(a, 0, axis)
    else:
        a = jnp.broadcast_to(
            jnp.expand_dims(a, axis), (*a.shape[:axis], size, *a.shape[axis:])
        )
    batch = a.shape[axis + 1]
    return a.reshape(*a.shape[:axis], size * batch, *a.shape[axis + 2 :])


def _batch_groups(
    bind: Callable, args: list[Array], mapped: list[bool], size: int, groups: Groups
) -> tuple[list[Array], list[int]]:
    if not any(groups):
        outs = bind(*args, groups=tuple(mapped))
        return outs, [0] * len(outs)
    inner = next(a.shape[m] for a, m, g in zip(args, mapped, groups, strict=True) if g)
    merged = []
    for a, m, g in zip(args, mapped, groups, strict=True):
        if m or g:
            shape = a.shape[m + g :]
            if not m:
                a = a[None]
            if not g:
                a = a[:, None]
            a = jnp.broadcast_to(a, (size, inner, *shape))
            a = a.reshape(size * inner, *shape)
        merged.append(a)
    both = tuple(m or g for m, g in zip(mapped, groups, strict=True))
    outs = bind(*merged, groups=both)
    outs = [out.reshape(size, inner, *out.shape[1:]) for out in outs]
    return outs, [0] * len(outs)


# --------------------------------------------------------------------------- gradients


def _is_zero(t: Any) -> bool:
    return type(t) is ad.Zero


def _rnn_jvp(
    primals: Any, tangents: Any, *, call: RNNCall, tree: Any, groups: Groups
) -> tuple[list[Array], list[Any]]:
    if call.save:  # what is saved has tangents too
        return _jvp_of_form(
            xla_rows.forward, primals, tangents, call=call, tree=tree, groups=groups
        )
    saving = dataclasses.replace(call, save=True)
    out = rnn_p.bind(*primals, call=saving, tree=tree, groups=groups)
    (operands,) = jax.tree.unflatten(tree, primals)
    (shapes,) = jax.tree.unflatten(tree, ungrouped(primals, groups))
    structure = jax.tree.structure(saving.output_shapes(shapes))
    outputs, saved = jax.tree.unflatten(structure, out)
    assert saved is not None
    residuals = Residuals(outputs.y, saved)

    (given,) = jax.tree.unflatten(tree, tangents)
    (flags,) = jax.tree.unflatten(tree, groups)
    moves = [t is not None and not _is_zero(t) for t in given[:_NUM_DIFFERENTIABLE]]
    dot, dot_flags = (
        Differentiable(*(a if m else None for a, m in zip(of, moves, strict=False)))
        for of in (given, flags)
    )
    dout = bind_trees(
        rnn_tangent_p,
        (operands._replace(packed=None), residuals, dot),
        (flags._replace(packed=None), _all(any(groups), residuals), dot_flags),
        call=saving,
    )
    return jax.tree.leaves(outputs), dout


def _jvp_of_form(
    form: Callable, primals: Any, tangents: Any, **params: Any
) -> tuple[list[Array], list[Array]]:
    """JAX's own differentiation of the XLA form."""
    flat = xla_form(form, **params)
    moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]

    def of_moving(*values: Array) -> list[Array]:
        args = list(primals)
        for i, value in zip(moving, values, strict=True):
            args[i] = value
        return flat(*args)

    return jax.jvp(
        of_moving, [primals[i] for i in moving], [tangents[i] for i in moving]
    )


def _rnn_tangent_transpose(
    cotangents: Any, *args: Any, call: RNNCall, tree: Any, groups: Groups
) -> list[Any]:
    operands, residuals, dot = jax.tree.unflatten(tree, args)
    flags, residual_flags, dot_flags = jax.tree.unflatten(tree, groups)
    wrt = Differentiable(*(t is not None and ad.is_undefined_primal(t) for t in dot))
    bar = Outputs(*map(ad.instantiate_zeros, cotangents))
    grads = bind_trees(
        rnn_bwd_p,
        (operands, residuals, bar),
        (flags, residual_flags, _all(any(groups), bar)),
        call=call,
        wrt=wrt,
    )
    if any(groups):
        # A tangent that all groups share gathers its cotangent from all of them.
        shared = [not f for f, w in zip(dot_flags, wrt, strict=True) if w]
        grads = [
            jnp.sum(g, axis=0) if s else g for g, s in zip(grads, shared, strict=True)
        ]
    placed = _place(wrt, grads)
    tangents = [g for t, g in zip(dot, placed, strict=True) if t is not None]
    return [None] * (len(args) - len(tangents)) + tangents


# ----------------------------------------------------------------------- registration


def _primitive(name: str, abstract_eval: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    static = ("call", "tree", "groups", "wrt")

    @ft.partial(jax.jit, static_argnames=static)
    def apply(*args: Array, **params: Any) -> list[Array]:
        return primitive.bind(*args, **params)

    primitive.def_impl(always_jitted(apply))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = ft.partial(_batch, primitive)
    return primitive


rnn_p = _primitive("ostinato_rnn", _rnn_abstract_eval)
register(rnn_p, xla_rows.forward, _rnn_abstract_eval, native=cpu.forward)
ad.primitive_jvps[rnn_p] = _rnn_jvp

rnn_tangent_p = _primitive("ostinato_rnn_tangent", _rnn_tangent_abstract_eval)
register(rnn_tangent_p, xla_rows.tangent, _rnn_tangent_abstract_eval)
ad.primitive_jvps[rnn_tangent_p] = ft.partial(_jvp_of_form, xla_rows.tangent)
ad.primitive_transposes[rnn_tangent_p] = _rnn_tangent_transpose

rnn_bwd_p = _primitive("ostinato_rnn_bwd", _rnn_bwd_abstract_eval)
register(rnn_bwd_p, xla_rows.backward, _rnn_bwd_abstract_eval, native=cpu.backward)
ad.primitive_jvps[rnn_bwd_p] = ft.partial(_jvp_of_form, xla_rows.backward)
