"""From primitives to backends: which form a platform compiles, split over devices.

A form is a function from the primitive's named tuples to its results. The XLA form runs
everywhere; where a computation is compiled for the cpu and the cpu backend runs the
call, its native form takes the place of it.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _compat
from .._typing import Array
from . import cpu
from .call import Differentiable, RNNCall
from .sharding import Layout, partition
from .spec import RNNSpec

Groups = tuple[bool, ...]


class BackendError(RuntimeError):
    """The backend that was asked for cannot run the call; the message says why."""


def refusal(backend: str, reason: str) -> BackendError:
    """The error to raise where a backend asked for by name cannot run."""
    return BackendError(
        f"backend {backend!r} cannot run this: {reason}; use backend=None or 'xla'"
    )


def xla_refusal(spec: RNNSpec) -> str | None:
    """Return why the XLA form cannot keep what `spec` promises; None if it can."""
    if spec.batch_invariant:
        return "XLA sums products in an order that depends on the size of the batch"
    return None


def refusal_of_all(spec: RNNSpec, reasons: Mapping[str, str | None]) -> BackendError:
    """Return the error to raise where no backend can run `spec`."""
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return BackendError(f"no backend can run {spec}: {listed}")


# ----------------------------------------------------- leaves with and without groups


def ungrouped(avals: Any, groups: Groups) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes without the group axis."""
    return [
        jax.ShapeDtypeStruct(a.shape[1:] if g else a.shape, a.dtype)
        for a, g in zip(avals, groups, strict=True)
    ]


def axes_of(call: RNNCall, trees: Any) -> list[int]:
    """Batch axis of every leaf."""
    return jax.tree.leaves(call.batch_axes(trees))


def results_of(
    call: RNNCall,
    tree: Any,
    args: Any,
    groups: Groups,
    wrt: Differentiable | None = None,
) -> Any:
    """Shapes and dtypes of the results without groups, under their names."""
    operands, *rest = jax.tree.unflatten(tree, ungrouped(args, groups))
    if wrt is not None:
        return (call.gradient_shapes(operands, wrt),)
    if rest:
        call = dataclasses.replace(call, save=False)
    return call.output_shapes(operands)


def sharded(call: RNNCall, operands: Any, results: Any, groups: Groups) -> Layout:
    """How arrays may be split over devices; both trees with their named tuples."""
    inward, outward = axes_of(call, operands), axes_of(call, results)
    if call.rows is not None:  # no device could tell where its rows begin
        inward, outward = [-1] * len(inward), [-1] * len(outward)
    return Layout(inward, outward, groups)


# ------------------------------------------------------------------------------- forms


def xla_form(
    form: Callable, call: RNNCall, tree: Any, groups: Groups, **params: Any
) -> Callable:
    """`form(call, *trees)` as a function from leaves to a list of leaves."""

    def flat(*leaves: Array) -> list[Array]:
        return jax.tree.leaves(form(call, *jax.tree.unflatten(tree, leaves), **params))

    if not any(groups):
        return flat
    return jax.vmap(flat, in_axes=tuple(0 if g else None for g in groups))


def _native_form(
    form: Callable,
    abstract_eval: Callable,
    call: RNNCall,
    tree: Any,
    groups: Groups,
    **params: Any,
) -> Callable:
    """The same for a native form, which is told of the groups and runs them itself."""

    def flat(*leaves: Array) -> list[Array]:
        avals = map(jax.typeof, leaves)
        shapes = abstract_eval(*avals, call=call, tree=tree, groups=groups, **params)
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes]
        trees = jax.tree.unflatten(tree, leaves)
        return form(call, results, groups, *trees, **params)

    return flat


# ---------------------------------------------------------------------------- lowering


def register(
    primitive: Primitive,
    form: Callable,
    abstract_eval: Callable,
    native: Callable | None = None,
) -> None:
    """Give `primitive` its lowerings: the XLA form, and on the cpu the native one."""
    everywhere = _rule(ft.partial(xla_form, form))
    _compat.lower_with_devices(primitive)
    if native is None:
        mlir.register_lowering(primitive, everywhere)
        return
    natively = _rule(ft.partial(_native_form, native, abstract_eval))

    def instead(ctx: Any, reason: str, *args: Any, call: RNNCall, **params: Any) -> Any:
        """Lower to the XLA form, which takes the place of the native one."""
        if call.backend == "cpu":
            raise refusal("cpu", reason)
        xla_reason = xla_refusal(call.spec)
        if xla_reason is not None:
            raise refusal_of_all(call.spec, {"cpu": reason, "xla": xla_reason})
        return everywhere(ctx, *args, call=call, **params)

    def elsewhere(ctx: Any, *args: Any, **params: Any) -> Any:
        platforms = ", ".join(ctx.module_context.platforms)
        reason = f"the computation is compiled for {platforms}"
        return instead(ctx, reason, *args, **params)

    def on_cpu(ctx: Any, *args: Any, call: RNNCall, **params: Any) -> Any:
        reason = _why_not_native(ctx, call)
        if reason is None:
            return natively(ctx, *args, call=call, **params)
        return instead(ctx, reason, *args, call=call, **params)

    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")


def _why_not_native(ctx: Any, call: RNNCall) -> str | None:
    if call.backend not in (None, "cpu"):
        return f"backend {call.backend!r} was asked for"
    if ctx.module_context.lowering_parameters.for_export:
        return "what jax.export makes must run without the native library"
    return cpu.supports(call.spec, ctx.avals_in[0].dtype)


def _rule(flat_of: Callable) -> Callable:
    """The lowering of `flat_of(**params)`, partitioned over devices."""

    def run(
        *args: Array, call: RNNCall, tree: Any, groups: Groups, **params: Any
    ) -> list[Array]:
        flat = flat_of(call=call, tree=tree, groups=groups, **params)
        results = results_of(call, tree, args, groups, **params)
        layout = sharded(call, jax.tree.unflatten(tree, args), results, groups)
        return partition(flat, layout)(*args)

    return mlir.lower_fun(run, multiple_results=True)


def always_jitted(function: Callable) -> Callable:
    """`function`, jitted, also under `jax.disable_jit`, as JAX's own primitives are."""

    def run(*args: Array, **params: Any) -> Any:
        with jax.disable_jit(False):
            return function(*args, **params)

    return run
