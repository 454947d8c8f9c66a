"""Sharding of the primitives: batch and ensemble are split, the rest is replicated."""

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


class FreeAxes(NamedTuple):
    """The axes along which arrays may be split over devices.

    Attributes:
        operands: the batch axis of each operand, counted in the array of one member of
            the ensemble; -1 for weights.
        results: the batch axis of each result, counted in the same way.
        ensemble: for each operand, whether it has a leading ensemble axis; if any
            operand has one, every result has one.
    """

    operands: list[int]
    results: list[int]
    ensemble: tuple[bool, ...]


class _Axes(NamedTuple):
    ensemble: int | None
    batch: int | None


def _axes(batch: Sequence[int], ensemble: Sequence[bool]) -> list[_Axes]:
    return [
        _Axes(0 if e else None, axis + e if axis >= 0 else None)
        for axis, e in zip(batch, ensemble, strict=True)
    ]


def _operand_axes(free: FreeAxes) -> list[_Axes]:
    return _axes(free.operands, free.ensemble)


def _result_axes(free: FreeAxes) -> list[_Axes]:
    return _axes(free.results, [any(free.ensemble)] * len(free.results))


def partition(flat: Callable, free: FreeAxes) -> Callable:
    """Return `flat`, split over devices along batch and ensemble like its operands."""
    operands, results = _operand_axes(free), _result_axes(free)

    def split(mesh: Any, arguments: Any, outputs: Any) -> tuple:
        axes_of_mesh = _mesh_axes(mesh, arguments, operands)

        def local(*args: Array) -> list[Array]:
            # Within one device there is nothing to split, whatever mesh is set. JAX
            # 0.12 would ask the CPU for the shardings of a mesh with explicit axes.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return added_up(flat(*args))

        def added_up(outs: list[Array]) -> list[Array]:
            batch = axes_of_mesh.batch
            if batch is None:
                return outs
            # A weight gradient is the sum over all devices that hold part of the batch.
            return [
                jax.lax.psum(out, batch) if axes.batch is None else out
                for out, axes in zip(outs, results, strict=True)
            ]

        inward, outward = (
            _shardings(mesh, axes_of_mesh, [len(a.shape) for a in arrays], all_axes)
            for arrays, all_axes in ((arguments, operands), (outputs, results))
        )
        return mesh, local, outward, tuple(inward)

    def rule(mesh: Any, arguments: Any, outputs: Any) -> str:
        return _shardy_rule(arguments, outputs, operands, results)

    partitioned = custom_partitioning(flat)
    partitioned.def_partition(split, sharding_rule=rule)
    return partitioned


class _MeshAxes(NamedTuple):
    """The axes of a mesh that split ensemble and batch: None, a name, or names."""

    ensemble: Any
    batch: Any


def _mesh_axes(mesh: Any, arrays: Any, operands: list[_Axes]) -> _MeshAxes:
    """Return the axes of the mesh over which the operands are split."""
    batch = _mesh_axes_along(mesh, arrays, [axes.batch for axes in operands])
    ensemble = _mesh_axes_along(mesh, arrays, [axes.ensemble for axes in operands])
    if set(names_of(batch)) & set(names_of(ensemble)):
        ensemble = None  # an axis of the mesh can split only one of them
    return _MeshAxes(ensemble, batch)


def _shardings(
    mesh: Any, axes_of_mesh: _MeshAxes, ndims: list[int], all_axes: list[_Axes]
) -> list[NamedSharding]:
    """Return the shardings of arrays that are split along ensemble and batch."""
    specs = []
    for ndim, axes in zip(ndims, all_axes, strict=True):
        spec: list[Any] = [None] * ndim
        for axis, names in zip(axes, axes_of_mesh, strict=True):
            if axis is not None:
                spec[axis] = names
        specs.append(NamedSharding(mesh, PartitionSpec(*spec)))
    return specs


def _mesh_axes_along(mesh: Any, arrays: Any, axes: list[int | None]) -> Any:
    """Return the mesh axes of the first array that is split along its axis in `axes`.

    Return None if no array is, or if the number of devices does not divide the
    size of that axis: XLA would pad the parts, and the padding would count in the
    gradients of weights.
    """
    for array, axis in zip(arrays, axes, strict=True):
        spec = getattr(array.sharding, "spec", ())
        if axis is not None and axis < len(spec) and spec[axis] is not None:
            devices = math.prod(mesh.shape[name] for name in names_of(spec[axis]))
            return spec[axis] if array.shape[axis] % devices == 0 else None
    return None


def names_of(axes: Any) -> tuple[str, ...]:
    """Return as a tuple the names in `axes`: None, one name or a tuple of names."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _shardy_rule(
    arguments: Any, outputs: Any, operands: list[_Axes], results: list[_Axes]
) -> str:
    """Return the Shardy rule: `b` is the batch, `e` the ensemble, `d0 ...` the rest."""
    fresh = (f"d{n}" for n in itertools.count())

    def side(arrays: Any, all_axes: list[_Axes]) -> str:
        return ", ".join(
            " ".join(
                "b"
                if axis == axes.batch
                else "e"
                if axis == axes.ensemble
                else next(fresh)
                for axis in range(len(array.shape))
            )
            for array, axes in zip(arrays, all_axes, strict=True)
        )

    return f"{side(arguments, operands)} -> {side(outputs, results)}"


# --------------------------------- explicit sharding: specs as part of an array's type


def bind(
    primitive: Any,
    leaves: Sequence[Array],
    axes: Callable[[], tuple[FreeAxes, Any]],
    **params: Any,
) -> list[Array]:
    """Bind a primitive, with the mesh axes of explicit sharding made automatic.

    Batch and ensemble of the results are split as those of the operands.

    Args:
        primitive: one with several results, or with one.
        leaves: its operands.
        axes: returns where they may be split, and the shapes of the results.
        params: of the primitive.
    """

    def run(*leaves: Array) -> list[Array]:
        results = primitive.bind(*make_varying(list(leaves)), **params)
        return results if primitive.multiple_results else [results]

    types = [jax.typeof(a) for a in leaves]
    meshes = [t.sharding.mesh for t in types]
    mesh = next((m for m in meshes if m.explicit_axes), None)
    if mesh is None or not any(any(t.sharding.spec) for t in types):
        return run(*leaves)  # nothing is split
    free, shapes = axes()
    axes_of_mesh = _mesh_axes(mesh, types, _operand_axes(free))
    ndims = [len(shape) for shape in shapes]
    out = _shardings(mesh, axes_of_mesh, ndims, _result_axes(free))
    automatic: Any = jax.sharding.auto_axes(
        run, axes=mesh.explicit_axes, out_sharding=out
    )
    return automatic(*leaves)


# ------------------------------------- shard_map: axes that values vary over


def varying(aval: Any) -> frozenset:
    """Return the mesh axes of an enclosing `shard_map` over which the value differs."""
    return frozenset(getattr(aval.manual_axis_type, "varying", ()))


def unvarying(aval: Any) -> Any:
    """Return a type without these axes."""
    return aval.update(manual_axis_type=type(aval.manual_axis_type)())


def shaped_array(shape: tuple[Any, ...], dtype: Any, like: Any) -> ShapedArray:
    """Return the type of a result, on the mesh and varying over the axes of `like`."""
    meshed = next((aval for aval in like if not aval.sharding.mesh.empty), None)
    if meshed is None:
        return ShapedArray(shape, dtype)
    whole = meshed.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return meshed.update(shape=shape, dtype=dtype, sharding=whole)


def make_varying(leaves: list[Array]) -> list[Array]:
    """Make all values vary over the union of their varying axes, for `shard_map`."""
    union = frozenset().union(*(varying(jax.typeof(a)) for a in leaves))
    return [vary_over(union, a) for a in leaves]


def vary_over(axes: frozenset, a: Array) -> Array:
    """Make a value vary over further axes of an enclosing `shard_map`."""
    further = tuple(axes - varying(jax.typeof(a)))
    return jax.lax.pcast(a, further, to="varying") if further else a
