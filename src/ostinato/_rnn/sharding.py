"""Sharding of the primitives: batch and groups are free, the rest is replicated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._typing import Array


class Layout(NamedTuple):
    """Where arrays hold the batch: axis without groups, -1 for weights.

    `groups` tells which operands have a leading group axis; if any, every result has.
    """

    operands: list[int]
    results: list[int]
    groups: tuple[bool, ...]


class _Axes(NamedTuple):
    group: int | None
    batch: int | None


def _places(axes: Sequence[int], grouped: Sequence[bool]) -> list[_Axes]:
    return [
        _Axes(0 if g else None, axis + g if axis >= 0 else None)
        for axis, g in zip(axes, grouped, strict=True)
    ]


def _operand_places(layout: Layout) -> list[_Axes]:
    return _places(layout.operands, layout.groups)


def _result_places(layout: Layout) -> list[_Axes]:
    return _places(layout.results, [any(layout.groups)] * len(layout.results))


def partition(flat: Callable, layout: Layout) -> Callable:
    """`flat`, split over devices along batch and groups where its operands are."""
    operands, results = _operand_places(layout), _result_places(layout)

    def split(mesh: Any, arguments: Any, outputs: Any) -> tuple:
        batch = _mesh_axes(mesh, arguments, [place.batch for place in operands])
        group = _mesh_axes(mesh, arguments, [place.group for place in operands])
        if set(_names(batch)) & set(_names(group)):
            group = None  # an axis of the mesh splits one of them

        def local(*args: Array) -> list[Array]:
            outs = flat(*args)
            if batch is None:
                return outs
            # A weight gradient gathers from every device that holds part of the batch.
            return [
                jax.lax.psum(out, batch) if place.batch is None else out
                for out, place in zip(outs, results, strict=True)
            ]

        def shardings(arrays: Any, places: list[_Axes]) -> list[NamedSharding]:
            specs = []
            for array, place in zip(arrays, places, strict=True):
                spec: list[Any] = [None] * len(array.shape)
                if place.batch is not None:
                    spec[place.batch] = batch
                if place.group is not None:
                    spec[place.group] = group
                specs.append(NamedSharding(mesh, PartitionSpec(*spec)))
            return specs

        inward = tuple(shardings(arguments, operands))
        return mesh, local, shardings(outputs, results), inward

    def rule(mesh: Any, arguments: Any, outputs: Any) -> str:
        return _shardy_rule(arguments, outputs, operands, results)

    partitioned = custom_partitioning(flat)
    partitioned.def_partition(split, sharding_rule=rule)
    return partitioned


def _mesh_axes(mesh: Any, arrays: Any, axes: list[int | None]) -> Any:
    """Mesh axes along which the first array with a split one of `axes` is split.

    None where their devices do not divide its size: XLA would pad the parts, and what
    stands there would count in the gradients of weights.
    """
    for array, axis in zip(arrays, axes, strict=True):
        spec = getattr(array.sharding, "spec", ())
        if axis is not None and axis < len(spec) and spec[axis] is not None:
            devices = math.prod(mesh.shape[name] for name in _names(spec[axis]))
            return spec[axis] if array.shape[axis] % devices == 0 else None
    return None


def _names(axes: Any) -> tuple[str, ...]:
    """The names of mesh axes, of which there are none, one or several."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _shardy_rule(
    arguments: Any, outputs: Any, operands: list[_Axes], results: list[_Axes]
) -> str:
    """`b` and `g` for batch and groups; every other axis a factor of its own."""
    fresh = (f"d{n}" for n in itertools.count())

    def side(arrays: Any, places: list[_Axes]) -> str:
        return ", ".join(
            " ".join(
                "b"
                if axis == place.batch
                else "g"
                if axis == place.group
                else next(fresh)
                for axis in range(len(array.shape))
            )
            for array, place in zip(arrays, places, strict=True)
        )

    return f"{side(arguments, operands)} -> {side(outputs, results)}"


# --------------------------------- explicit sharding: specs as part of an array's type


def automatic(run: Callable, leaves: list[Array], layout: Layout, shapes: Any) -> Any:
    """`run(*leaves)`, with mesh axes of explicit sharding handed to the partitioner.

    Results, shaped as `shapes`, come back with the batch split as an operand had it.
    """
    types = [jax.typeof(a) for a in leaves]
    meshes = [t.sharding.mesh for t in types]
    mesh = next((m for m in meshes if m.explicit_axes), None)
    if mesh is None:
        return run(*leaves)
    batch = _mesh_axes(mesh, types, [place.batch for place in _operand_places(layout)])
    specs = [
        PartitionSpec(
            *(batch if axis == place.batch else None for axis in range(len(shape)))
        )
        for shape, place in zip(shapes, _result_places(layout), strict=True)
    ]
    out = [NamedSharding(mesh, spec) for spec in specs]
    return jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=out)(
        *leaves
    )


# ------------------------------------- shard_map: axes that values vary over


def _varying(aval: Any) -> frozenset:
    """Mesh axes of an enclosing `shard_map` over which the value differs."""
    return frozenset(getattr(aval.manual_axis_type, "varying", ()))


def shaped_array(shape: tuple[Any, ...], dtype: Any, like: Any) -> ShapedArray:
    """The type of a result: on the mesh, and varying over the axes, of the operands."""
    meshed = next((aval for aval in like if not aval.sharding.mesh.empty), None)
    if meshed is None:
        return ShapedArray(shape, dtype)
    whole = meshed.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return meshed.update(shape=shape, dtype=dtype, sharding=whole)


def make_varying(leaves: list[Array]) -> list[Array]:
    """All values varying over the axes that any varies over, as `shard_map` wants."""
    varying = [_varying(jax.typeof(a)) for a in leaves]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(union - axes), to="varying") if union - axes else a
        for a, axes in zip(leaves, varying, strict=True)
    ]
