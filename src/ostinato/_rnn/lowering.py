"""The lowering of the primitives to the implementations of the backends, with sharding.

`backends.choose` names the backend. Its implementation is a function from the
primitive's named tuples to its results. The lowering takes that function, applies it to
leaves in place of named tuples, and splits it over devices.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _compat
from .._typing import Array
from . import xla
from .backends import BACKENDS, Place, choose
from .call import Differentiable, RNNCall
from .sharding import FreeAxes, partition

Ensemble = tuple[bool, ...]
"""A flag for every leaf of a primitive: True if it leads with the ensemble axis."""


# -------------------------------------------- leaves with and without the ensemble axis


def member_shapes(avals: Any, ensemble: Ensemble) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of one member, without the ensemble axis."""
    return [
        jax.ShapeDtypeStruct(a.shape[1:] if e else a.shape, a.dtype)
        for a, e in zip(avals, ensemble, strict=True)
    ]


def axes_of(call: RNNCall, trees: Any) -> list[int]:
    """Return the batch axis of every leaf, -1 for weights."""
    return jax.tree.leaves(call.batch_axes(trees))


def results_of(
    call: RNNCall,
    tree: Any,
    args: Any,
    ensemble: Ensemble,
    wrt: Differentiable | None = None,
) -> Any:
    """Return shapes and dtypes of one member's results, in their named tuples."""
    operands, *rest = jax.tree.unflatten(tree, member_shapes(args, ensemble))
    if wrt is not None:
        return (call.gradient_shapes(operands, wrt),)
    if rest:
        call = dataclasses.replace(call, save=False)
    return call.output_shapes(operands)


def free_axes(
    call: RNNCall, operands: Any, results: Any, ensemble: Ensemble
) -> FreeAxes:
    """Return the axes along which the arrays of two trees may be split over devices."""
    inward, outward = axes_of(call, operands), axes_of(call, results)
    if call.packed is not None:  # a device could not tell where its sequences begin
        inward, outward = [-1] * len(inward), [-1] * len(outward)
    return FreeAxes(inward, outward, ensemble)


# --------------------------------------------------------------------- implementations


def by_vmap(
    implementation: Callable,
    call: RNNCall,
    tree: Any,
    ensemble: Ensemble,
    **params: Any,
) -> Callable:
    """Return `implementation(call, *trees)` as a function from leaves to leaves.

    The members of an ensemble run under `jax.vmap`.
    """

    def flat(*leaves: Array) -> list[Array]:
        trees = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(implementation(call, *trees, **params))

    if not any(ensemble):
        return flat
    return jax.vmap(flat, in_axes=tuple(0 if e else None for e in ensemble))


def _by_ensemble_axis(
    implementation: Callable,
    abstract_eval: Callable,
    call: RNNCall,
    tree: Any,
    ensemble: Ensemble,
    **params: Any,
) -> Callable:
    """Return the same for an implementation that handles the ensemble axis itself."""

    def flat(*leaves: Array) -> list[Array]:
        avals = map(jax.typeof, leaves)
        shapes = abstract_eval(
            *avals, call=call, tree=tree, ensemble=ensemble, **params
        )
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes]
        trees = jax.tree.unflatten(tree, leaves)
        return implementation(call, results, ensemble, *trees, **params)

    return flat


# ---------------------------------------------------------------------------- lowering


def register(primitive: Primitive, name: str, abstract_eval: Callable) -> None:
    """Register all backends' implementations of the pass `name` for `primitive`."""
    rules = {}
    for backend in BACKENDS:
        implementation = backend.implementations.get(name)
        if implementation is not None:
            flat_of = ft.partial(by_vmap, implementation)
            if backend.runs_ensembles:
                flat_of = ft.partial(_by_ensemble_axis, implementation, abstract_eval)
            rules[backend.name] = _rule(flat_of)
    _compat.lower_with_devices(primitive)
    if rules.keys() == {xla.BACKEND.name}:  # whichever backend the call names
        mlir.register_lowering(primitive, rules[xla.BACKEND.name])
        return

    def lower(
        platform: str | None, ctx: Any, *args: Any, call: RNNCall, **params: Any
    ) -> Any:
        platforms = _compat.platforms_of(ctx) if platform is None else platform
        place = Place(
            platforms,
            f"the computation is compiled for {platforms}",
            _compat.is_for_export(ctx),
        )
        dtype = ctx.avals_in[0].dtype
        shapes = member_shapes(ctx.avals_in, params["ensemble"])
        operands, *_ = jax.tree.unflatten(params["tree"], shapes)
        given = call, operands
        backend, _ = choose(call.spec, dtype, place, call.backend, given)
        return rules[backend.name](ctx, *args, call=call, **params)

    mlir.register_lowering(primitive, ft.partial(lower, None))
    for platform in {b.platform for b in BACKENDS if b.name in rules} - {None}:
        mlir.register_lowering(primitive, ft.partial(lower, platform), platform)


def _rule(flat_of: Callable) -> Callable:
    """Return the lowering rule of `flat_of(**params)`, partitioned over devices.

    What `jax.export` writes has no rule for partitions: XLA splits it as it can.
    """

    def run(
        *args: Array,
        call: RNNCall,
        tree: Any,
        ensemble: Ensemble,
        splits: bool,
        **params: Any,
    ) -> list[Array]:
        flat = flat_of(call=call, tree=tree, ensemble=ensemble, **params)
        if not splits:
            return flat(*args)
        results = results_of(call, tree, args, ensemble, **params)
        axes = free_axes(call, jax.tree.unflatten(tree, args), results, ensemble)
        return partition(flat, axes)(*args)

    rule = mlir.lower_fun(run, multiple_results=True)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        splits = not _compat.is_for_export(ctx)
        return rule(ctx, *args, splits=splits, **params)

    return lower
