"""The arguments of a mapped function: their leaves, mapped axes and sizes."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import SymbolicScope, symbolic_shape
from jax.tree_util import keystr

from .._rnn.sharding import make_varying
from .._typing import Array
from .core.context import Context
from .core.sizes import Range, constraint_for_jax, is_symbolic, smallest
from .core.symbols import Options, Symbols
from .core.values import Flat, Padded, Shared, Value
from .dims import Dim, check_sizes, dims_of, nonnegative_products
from .types.array import RaggedArray
from .types.padded import PaddedRagged
from .types.segments import positions


def is_ragged(x: Any) -> bool:
    """Return whether `x` is a leaf that `ragged.vmap` maps by its tokens."""
    if isinstance(x, PaddedRagged):
        raise NotImplementedError(
            f"ragged.vmap cannot map a PaddedRagged, got {x}; compute it inside of the "
            "mapped function, or map its `data` with a mask"
        )
    return isinstance(x, RaggedArray)


@ft.lru_cache(maxsize=256)
def _scope(constraints: tuple[str, ...]) -> SymbolicScope:
    """Return the same scope for the same constraints.

    JAX keeps the trace of each function of its own for each scope, and so would keep
    more with every call outside of `jit`.
    """
    return SymbolicScope(constraints)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The leaves of all arguments.

    Attributes:
        leaves: arrays and RaggedArrays.
        axes: for each leaf the mapped axis, None where all examples share it.
        dims: the sizes that differ, by name.
        batch: the number of examples.
    """

    leaves: list[Any]
    axes: list[int | None]
    dims: dict[str, Dim]
    batch: int

    @classmethod
    def of(
        cls,
        leaves: list[Any],
        axes: list[Any],
        paths: list[Any],
        min_length: int | Mapping[str, int],
    ) -> Inputs:
        """Return the inputs; check the number of examples and the mapped axes.

        Args:
            leaves: RaggedArrays, and arrays that are mapped or shared.
            axes: for each leaf its entry of `in_axes`.
            paths: for each leaf its path in `(args, kwargs)`, for errors.
            min_length: an int, or one for each dim.
        """
        pairs = list(zip(leaves, axes, strict=True))
        leaves = [x if is_ragged(x) else _array(x, a) for x, a in pairs]
        leaves, tree = jax.tree.flatten(leaves)  # all differ in shard_map if one does
        leaves = jax.tree.unflatten(tree, make_varying(leaves))
        axes = [_check_axis(x, a) for x, a in zip(leaves, axes, strict=True)]
        batch = _batch(leaves, axes, paths)
        dims = dims_of([x for x in leaves if is_ragged(x)], min_length)
        return cls(leaves, axes, dims, batch)

    def checked(self, constraints: Sequence[str]) -> Inputs:
        """Return these inputs; check the lengths, also against the constraints."""
        ragged = [x for x in self.leaves if is_ragged(x)]
        own = {d.name: d.lengths for d in self.own_dims}
        own = check_sizes(own, ragged, self.dims, constraints)
        dims = {
            name: dataclasses.replace(d, lengths=own.get(name, d.lengths))
            for name, d in self.dims.items()
        }
        return dataclasses.replace(self, dims=dims)

    @property
    def own_dims(self) -> list[Dim]:
        """The sizes that have a symbol of their own."""
        return [d for d in self.dims.values() if d.symbol]

    def or_one_empty_example(self) -> Inputs:
        """Return these inputs; a batch without examples gets an empty one."""
        if self.batch:
            return self
        leaves = [
            x if a is None or is_ragged(x) else _zeros(x, a)
            for x, a in zip(self.leaves, self.axes, strict=True)
        ]
        # All vary over the axes of a `shard_map` as the arguments do.
        arrays, tree = jax.tree.flatten((leaves, jnp.zeros(1, jnp.int32)))
        leaves, empty = jax.tree.unflatten(tree, make_varying(arrays))
        dims = {k: dataclasses.replace(d, lengths=empty) for k, d in self.dims.items()}
        return Inputs(leaves, self.axes, dims, 1)

    def scope(self, constraints: Sequence[str], bounded: bool) -> SymbolicScope:
        """Return the scope of a trace: the properties of sizes that it may rely on.

        Args:
            constraints: the constraints of the caller.
            bounded: whether sizes are known to be at most `max_length`.
        """
        given = [f"{d.symbol} >= {d.min_length}" for d in self.own_dims]
        given = [
            c for c, d in zip(given, self.own_dims, strict=True) if d.min_length > 1
        ]
        given += [f"{size} >= {least}" for size, least in self._least_derived.items()]
        if bounded:
            given += [f"{d.symbol} <= {d.high}" for d in self.own_dims]
        sizes = self._in_trace(SymbolicScope()) if constraints else {}
        asked = [constraint_for_jax(c, sizes) for c in constraints]
        return _scope((*asked, *given, *nonnegative_products(self.own_dims)))

    @property
    def ranges(self) -> dict[str, Range]:
        """For each symbol the least and the largest value."""
        return {
            d.symbol: Range(d.offset, d.max_length + d.offset) for d in self.own_dims
        }

    @property
    def _least(self) -> dict[str, int]:
        return {d.symbol: d.min_length + d.offset for d in self.own_dims}

    @property
    def _least_derived(self) -> dict[str, int]:
        """The least values of sizes made of others, where they say more than those."""
        least = self._least
        ranges = {
            name: r._replace(low=min(least[name], r.high))
            for name, r in self.ranges.items()
        }
        derived = [d for d in self.dims.values() if not d.symbol]
        return {
            d.size: d.min_length
            for d in derived
            if d.min_length > smallest(d.size, ranges)
        }

    def context(
        self, options: Options, min_padded: dict[str, int], going: Array | None
    ) -> Context:
        """Return the context of these sizes.

        Args:
            options: the options of the call.
            min_padded: see `Symbols`.
            going: see `Context`.
        """
        dims = self.own_dims
        ranges = {
            name: r._replace(high=max(r.high, min_padded.get(name, 1)))
            for name, r in self.ranges.items()
        }
        symbols = Symbols(
            values={
                d.symbol: d.lengths + d.offset if d.offset else d.lengths for d in dims
            },
            ranges=ranges,
            totals={d.symbol: d.capacity + d.offset * self.batch for d in dims},
            capacities={d.size: d.capacity for d in self.dims.values()},
            least=self._least,
            least_derived=self._least_derived,
            min_padded=min_padded,
        )
        return Context(self.batch, symbols, options, going=going)

    def _in_trace(self, scope: SymbolicScope) -> dict[str, Any]:
        """Return by name the size as it stands in the shapes of a trace."""
        return {
            name: symbolic_shape(d.size, scope=scope)[0]
            for name, d in self.dims.items()
        }

    def avals(self, scope: SymbolicScope) -> list[jax.ShapeDtypeStruct]:
        """Return the types of one example's arguments."""
        sizes = self._in_trace(scope)
        return [
            _aval(x, axis, sizes)
            for x, axis in zip(self.leaves, self.axes, strict=True)
        ]

    def values(self, ctx: Context, avals: Sequence[Any]) -> list[Value]:
        """Return the leaves as values of all examples, in the layout that they have.

        Args:
            ctx: the context of these sizes.
            avals: the types of one example's arguments.
        """
        return [
            _value(ctx, x, axis, aval.shape)
            for x, axis, aval in zip(self.leaves, self.axes, avals, strict=True)
        ]


def _array(x: Any, axis: Any) -> Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        error.add_note(
            f"`in_axes` has {axis} for it; None shares what is no array among all "
            "examples."
        )
        raise


def _aval(x: Any, axis: int | None, sizes: dict[str, Any]) -> jax.ShapeDtypeStruct:
    if is_ragged(x):
        shape = (*x.data.shape[: x.axis], sizes[x.dim], *x.data.shape[x.axis + 1 :])
        x = x.data
    elif axis is None:
        shape = x.shape
    else:
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak)


def _value(ctx: Context, x: Any, axis: int | None, shape: tuple[Any, ...]) -> Value:
    if is_ragged(x):
        _check_whole(x)
        dim = shape[x.axis]
        tokens = _with_capacity(x.data, x.axis, ctx.capacity(dim))
        flat = Flat(ctx.fill_unused(tokens, dim, x.axis), shape, x.axis)
        return flat if is_symbolic(dim) else ctx.to_padded(flat)
    if axis is None:
        return Shared(x, shape)
    return Padded(jnp.moveaxis(x, axis, 0), shape)


def _with_capacity(data: Array, axis: int, capacity: int) -> Array:
    """Return `data` with another capacity.

    It may be larger: with the constraint `m == n + 1` it is what follows from that of
    the array of size n.
    """
    if data.shape[axis] == 0:
        data = _zeros(data, axis)
    if data.shape[axis] < capacity:
        return jnp.take(data, positions(capacity), axis, mode="clip")
    return lax.slice_in_dim(data, 0, capacity, axis=axis)


def _check_axis(x: Any, axis: Any) -> int | None:
    if is_ragged(x):
        if axis != 0 or isinstance(axis, bool):
            raise ValueError(
                "`in_axes` must be 0 for a RaggedArray, which is mapped by its "
                f"examples, got {axis!r}; hand a shared array over as a plain one"
            )
        return 0
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"`in_axes` must hold integers and None, got {axis!r}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"`in_axes` has {axis} for an array {x.dtype}{list(x.shape)}, which has "
            f"{x.ndim} axes; None shares it"
        )
    return axis % x.ndim


def _batch(leaves: list[Any], axes: list[int | None], paths: list[Any]) -> int:
    sizes: dict[Any, Any] = {}  # the first leaf of each size
    for x, a, path in zip(leaves, axes, paths, strict=True):
        if a is not None:
            sizes.setdefault(x.lengths.shape[0] if is_ragged(x) else x.shape[a], path)
    for size in sizes:
        if is_symbolic(size):
            raise NotImplementedError(
                f"ragged.vmap must know the number of examples, got the symbol {size}; "
                "export a program of the largest number, and fill up smaller batches "
                "with empty examples, under `min_length=0`"
            )
    if len(sizes) > 1:
        raise ValueError(
            "mapped arguments must have equally many examples, got "
            + " and ".join(f"{n} in `{_name(sizes[n])}`" for n in sorted(sizes))
            + "; `in_axes` takes None for an argument that all examples share, such as "
            "parameters: in_axes=(None, 0)"
        )
    return next(iter(sizes))


def _name(path: Any) -> str:
    """Return the name of a leaf of `(args, kwargs)`, such as `args[1]['x']`."""
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def _check_whole(x: Any) -> None:
    """Check that no explicit axis of a mesh splits the tokens of a RaggedArray."""
    spec = getattr(jax.typeof(x.data).sharding, "spec", ())
    if len(spec) > x.axis and spec[x.axis] is not None:
        raise ValueError(
            "the tokens of a RaggedArray must be whole on every device, got them split "
            f"over the axis {spec[x.axis]!r} of the mesh; ragged.shard splits a batch "
            "by its examples, and jax.reshard makes tokens whole"
        )


def _zeros(x: Array, axis: int) -> Array:
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, x.dtype)
    like = jax.eval_shape(jax.random.key_data, x)
    words = jnp.zeros((*shape, *like.shape[x.ndim :]), like.dtype)
    return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(x)))
