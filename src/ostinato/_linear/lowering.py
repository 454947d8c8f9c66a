"""The lowering of linear recurrences: kernels or XLA, and split over devices.

Operands and results have kinds, one letter each: `a` factors, `s` the values of all
steps, `i` the states of one step, `l` lengths and `r` resets.
"""

from __future__ import annotations

import functools as ft
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat, _config
from .._rnn.backends import BackendError
from .._rnn.cuda import unasked_reason
from .._rnn.sharding import FreeAxes, names_of
from .._typing import Array
from . import cpu, cuda, xla
from .call import Recurrence

_KINDS = {
    "ostinato_linear": ("asi", "si"),
    "ostinato_linear_tangent": ("asiasi", "si"),
    "ostinato_linear_bwd": ("asisi", "asi"),
}
# With fewer, the passes of an associative scan cost more than they save. On a CPU they
# always do, measured for 1 to 512 numbers in a step and 100 to 10000 steps: they read
# and write everything many times.
_FEW_STEPS = 32


def kinds(primitive: Primitive, call: Recurrence) -> tuple[str, str]:
    """Return the kinds of the operands and of the results."""
    inward, outward = _KINDS[primitive.name]
    return inward + "l" * call.has_lengths + "r" * call.has_resets, outward


def batch_axis(kind: str, call: Recurrence) -> int:
    """Return the axis of the batch in an array of a kind."""
    return 0 if kind in "il" else call.batch_axis


def free_axes(primitive: Primitive, call: Recurrence, args: Sequence[Any]) -> FreeAxes:
    """Return the batch axes, along which arrays may be split over devices."""
    inward, outward = kinds(primitive, call)
    axes = [
        -1
        if kind == "a" and call.shares(x, call.batch_axis)
        else batch_axis(kind, call)
        for kind, x in zip(inward, args, strict=True)
    ]
    results = [batch_axis(kind, call) for kind in outward]
    return FreeAxes(axes, results, (False,) * len(axes))


# ---------------------------------------------------------------------------- lowering


KERNELS = {"cuda": cuda, "cpu": cpu}
"""The modules of the backends that have kernels, by the platform that they run on."""


def reason_against(
    backend: str, call: Recurrence, b: Any, platform: str, trial: Callable
) -> str | None:
    """Return why the kernels of a backend do not run a call; None if they do.

    Args:
        backend: of `KERNELS`.
        call: what is static.
        b: the inputs, or anything of their shape and dtype.
        platform: what the call is compiled for.
        trial: says why a kernel of the GPU does not work: `cuda.failure`, which tries
            it, or `cuda.known_failure`.
    """
    kernels = KERNELS[backend]
    reason = kernels.unsupported_reason(call, b)
    if reason is None and platform != backend:
        reason = f"it runs on the {backend}, and the computation is compiled for "
        reason += platform
    if reason is None and backend not in (call.backend, _config.read().backend):
        reason = unasked_reason() if kernels is cuda else cpu.needless_reason(call, b)
    if reason is None and kernels is cuda:
        reason = trial(call, b)
    return reason


def check_backend(call: Recurrence, b: Any) -> None:
    """Raise unless the backend that a call names has a kernel for it.

    Args:
        call: what is static.
        b: the inputs, or anything of their shape and dtype.

    Raises:
        ostinato.BackendError: the backend that the call names cannot run it.
    """
    if call.backend in KERNELS:
        reason = KERNELS[call.backend].unsupported_reason(call, b)
        if reason is not None:
            raise cannot(call.backend, reason)


def cannot(backend: str, reason: str) -> BackendError:
    """Return the error that says why the backend that a call names cannot run it."""
    return BackendError(
        f"backend {backend!r} cannot run this: {reason}; use backend=None or 'xla'"
    )


def _kernels_for(
    call: Recurrence, b: Any, platforms: str, for_export: bool
) -> ModuleType | None:
    """Return the module whose kernels run a call; None where XLA does.

    Args:
        call: what is static.
        b: the inputs.
        platforms: what the call is compiled for.
        for_export: whether `jax.export` writes it.

    Raises:
        ostinato.BackendError: the backend that the call names cannot run it.
    """
    named = call.backend
    if named == "xla" or named is None and platforms not in KERNELS:
        return None
    backend = platforms if named is None else named
    reason = reason_against(backend, call, b, platforms, cuda.failure)
    if named is not None and reason is not None:
        raise cannot(named, reason)
    # What jax.export makes must run anywhere, unless the call names a backend.
    if reason is not None or for_export and named is None:
        return None
    return KERNELS[backend]


def register(primitive: Primitive, composed: Callable | None) -> None:
    """Register the lowering of a primitive.

    Args:
        primitive: one of the three.
        composed: the function `(call, *operands)` of other primitives that computes the
            same; None for the one that they are made of.
    """

    def lower(
        platform: str | None, ctx: Any, *args: Any, call: Recurrence
    ) -> Sequence[Any]:
        platforms = _compat.platforms_of(ctx) if platform is None else platform
        for_export, b = _compat.is_for_export(ctx), ctx.avals_in[1]
        kernels = _kernels_for(call, b, platforms, for_export)

        def split(function: Callable) -> Callable:
            # What jax.export writes has no rule for it: XLA splits it as it can.
            return function if for_export else _partitioned(primitive, call, function)

        runs = None
        if kernels is not None and primitive.name == "ostinato_linear":
            runs = kernels.forward
        elif kernels is cpu and primitive.name == "ostinato_linear_bwd":
            runs = None if call.blocks else cpu.backward
        if runs is not None:
            function = split(ft.partial(runs, call))
        elif composed is not None:
            function = ft.partial(composed, call)
        else:
            parallel = _is_parallel(call, b, platforms)
            function = split(ft.partial(xla.forward, call, parallel))
        return mlir.lower_fun(function, multiple_results=True)(ctx, *args)

    _compat.lower_with_devices(primitive)
    mlir.register_lowering(primitive, ft.partial(lower, None))
    for platform in KERNELS:
        mlir.register_lowering(primitive, ft.partial(lower, platform), platform)


def _is_parallel(call: Recurrence, b: Any, platforms: str) -> bool:
    """Return whether XLA's associative scan is faster than its loop."""
    steps = b.shape[call.time_axis]
    return platforms != "cpu" and isinstance(steps, int) and steps > _FEW_STEPS


# ----------------------------------------------------------------------------- devices


def _partitioned(
    primitive: Primitive, call: Recurrence, function: Callable
) -> Callable:
    """Return `function`, split over devices along the batch and the units."""
    inward, outward = kinds(primitive, call)

    def names(args: Sequence[Any], outs: Sequence[Any]) -> tuple[list, list]:
        b = args[1]
        return (
            [_names(call, kind, x, b) for kind, x in zip(inward, args, strict=True)],
            [_names(call, kind, x, b) for kind, x in zip(outward, outs, strict=True)],
        )

    def split(mesh: Any, args: Any, outs: Any) -> tuple:
        into, out_of = names(args, outs)
        axes = _mesh_axes(mesh, args, into)
        units = axes.get(f"f{len(args[1].shape) - 3}")
        # Units on several devices that share a factor have parts of its gradient.
        shares = "a" in outward and call.shares_units(args[0], args[1])

        def local(*arrays: Array) -> Sequence[Array]:
            results = function(*arrays)
            if units is None or not shares:
                return results
            return [jax.lax.psum(results[0], units), *results[1:]]

        def shardings(all_names: Any) -> list[NamedSharding]:
            return [
                NamedSharding(mesh, PartitionSpec(*(axes.get(n) for n in each)))
                for each in all_names
            ]

        return mesh, local, shardings(out_of), tuple(shardings(into))

    def rule(mesh: Any, args: Any, outs: Any) -> str:
        fresh = (f"d{n}" for n in itertools.count())
        sides = (
            ", ".join(" ".join(n or next(fresh) for n in each) for each in side)
            for side in names(args, outs)
        )
        return " -> ".join(sides)

    partitioned = custom_partitioning(function)
    partitioned.def_partition(split, sharding_rule=rule)
    return partitioned


def _names(call: Recurrence, kind: str, x: Any, b: Any) -> list[str | None]:
    """Return a name for every axis that may be split, None for the others.

    The batch is `b`, and the axes of units are `f0`, `f1` and so on.
    """
    units: list[str | None] = [f"f{n}" for n in range(len(b.shape) - 2)]
    if call.blocks:
        units[-1] = None
    if kind == "l":
        return ["b"]
    if kind == "i":
        return ["b", *units]
    each: list[str | None] = [None, None]
    each[call.batch_axis] = "b"
    if kind == "r":
        return each
    if kind == "a":
        if call.shares(x, call.batch_axis):
            each[call.batch_axis] = None
        if call.blocks:
            units.append(None)
        elif call.shares_units(x, b):
            units[-1] = None
    return each + units


def _mesh_axes(
    mesh: Any, arrays: Sequence[Any], names: Iterable[Sequence[str | None]]
) -> dict[str | None, Any]:
    """Return the axes of the mesh for each name, from the first array split along it.

    None where the number of devices does not divide the size.
    """
    found: dict[str | None, Any] = {None: None}
    used: set[str] = set()
    for array, each in zip(arrays, names, strict=True):
        spec = tuple(getattr(array.sharding, "spec", ()))
        for name, axes, length in zip(each, spec, array.shape, strict=False):
            if name is None or axes is None or name in found:
                continue
            several = names_of(axes)
            devices = math.prod(mesh.shape[axis] for axis in several)
            if length % devices == 0 and used.isdisjoint(several):
                found[name] = axes
                used.update(several)
    return found
