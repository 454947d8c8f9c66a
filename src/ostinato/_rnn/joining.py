"""The primitives that gather matrices into the flat vector, and split it again.

Other libraries store a matrix by column, `[I, G*H]`, and order gates in their own way;
`Rows` describes such a matrix as the operator has it, and copies nothing. `join` makes
the flat vector in one pass over all matrices. On a CPU the native library does that,
since XLA's loops there need several nanoseconds for each element of a transposed
matrix. Both primitives are linear, and each is the transpose of the other one.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat, _native
from .._typing import Array
from . import sharding
from .eager import always_jitted


class Block(NamedTuple):
    """Rows `start` to `stop` of a matrix, by the number of its array."""

    array: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A matrix whose rows are the columns of other matrices.

    Attributes:
        arrays: `[columns, rows]`, all of one dtype and one number of columns.
        blocks: the rows in their order; each row of each array is in one of them.
    """

    arrays: tuple[Array, ...]
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        rows = sum(block.stop - block.start for block in self.blocks)
        return rows, self.arrays[0].shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes, 2."""
        return 2

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.arrays[0].dtype

    def reorder(self, order: Sequence[int]) -> Rows:
        """Return the matrix with its rows, in `len(order)` equal parts, reordered."""
        blocks, at, size = [], 0, self.shape[0] // len(order)
        parts: list[list[Block]] = [[] for _ in order]
        for array, start, stop in self.blocks:
            while start < stop:  # a block may reach over several parts
                end = min(stop, start + size - at % size)
                parts[at // size].append(Block(array, start, end))
                at, start = at + end - start, end
        for part in order:
            blocks += parts[part]
        return Rows(self.arrays, tuple(blocks))


def transposed(*matrices: Array) -> Rows:
    """Return the columns of matrices `[columns, rows]` as the rows of one matrix."""
    blocks = tuple(Block(n, 0, m.shape[1]) for n, m in enumerate(matrices))
    return Rows(matrices, blocks)


class Plan(NamedTuple):
    """How arrays lie in the flat vector.

    Attributes:
        shapes: of the arrays.
        by_column: for each array, whether its columns are the rows of the vector.
        blocks: the rows in the order of the vector.
    """

    shapes: tuple[tuple[int, ...], ...]
    by_column: tuple[bool, ...]
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        """The length of the vector."""
        return sum(map(math.prod, self.shapes))

    def columns(self, array: int) -> int:
        """Return how many elements a row of an array has in the vector."""
        shape = self.shapes[array]
        return shape[0] if self.by_column[array] else math.prod(shape[1:])

    def numbers(self) -> np.ndarray:
        """Return the attribute `blocks` of the native call, see weights_cpu.cc."""
        numbers, at = [], 0
        for array, start, stop in self.blocks:
            by_column, columns = self.by_column[array], self.columns(array)
            first = start if by_column else start * columns
            stride = self.shapes[array][1] if by_column else columns
            rows = stop - start
            numbers.append((array, first, stride, rows, columns, at, by_column))
            at += rows * columns
        return np.array(numbers, np.int64).reshape(-1)


def join(values: Sequence[Array | Rows]) -> Array:
    """Return the elements of matrices and vectors, row by row, as one vector."""
    arrays: list[Array] = []
    by_column: list[bool] = []
    blocks: list[Block] = []
    for value in values:
        rows = isinstance(value, Rows)
        base, new = len(arrays), value.arrays if rows else (value,)
        own = value.blocks if rows else (Block(0, 0, value.shape[0]),)
        arrays += new
        by_column += [rows] * len(new)
        blocks += [b._replace(array=base + b.array) for b in own]
    plan = Plan(tuple(a.shape for a in arrays), tuple(by_column), tuple(blocks))
    if len(arrays) == 1 and not by_column[0]:
        return arrays[0].reshape(-1)
    if _explicit(arrays):
        return _join_by_xla(*arrays, plan=plan)[0]
    arrays = sharding.make_varying(arrays)
    return join_p.bind(*arrays, plan=plan, ensemble=False)[0]


def _explicit(arrays: Sequence[Any]) -> bool:
    """Return whether arrays have their sharding in their types, for XLA to follow."""
    return any(jax.typeof(a).sharding.mesh.explicit_axes for a in arrays)


# Their arrays lead with an ensemble axis if `ensemble` says so.
join_p = Primitive("ostinato_join")
split_p = Primitive("ostinato_split")
join_p.multiple_results = split_p.multiple_results = True


def _join_abstract_eval(*arrays: Any, plan: Plan, ensemble: bool) -> list:
    lead = arrays[0].shape[:ensemble]
    return [sharding.shaped_array((*lead, plan.size), arrays[0].dtype, like=arrays)]


def _split_abstract_eval(vector: Any, *, plan: Plan, ensemble: bool) -> list:
    lead = vector.shape[:ensemble]
    return [
        sharding.shaped_array((*lead, *shape), vector.dtype, like=[vector])
        for shape in plan.shapes
    ]


# --------------------------------------------------------------------- implementations


def _join_by_xla(*arrays: Array, plan: Plan) -> list[Array]:
    rows = [a.T if t else a for a, t in zip(arrays, plan.by_column, strict=True)]
    return [jnp.concatenate([rows[n][i:j].reshape(-1) for n, i, j in plan.blocks])]


def _split_by_xla(vector: Array, *, plan: Plan) -> list[Array]:
    found: list[dict[int, Array]] = [{} for _ in plan.shapes]
    at = 0
    for array, start, stop in plan.blocks:
        size = (stop - start) * plan.columns(array)
        found[array][start] = vector[at : at + size]
        at += size
    results = []
    for blocks, shape, t in zip(found, plan.shapes, plan.by_column, strict=True):
        flat = jnp.concatenate([blocks[start] for start in sorted(blocks)])
        results.append(flat.reshape(shape[::-1]).T if t else flat.reshape(shape))
    return results


class _Rules(NamedTuple):
    """The rules of one of the two primitives."""

    primitive: Primitive
    by_xla: Callable
    abstract_eval: Callable

    def xla(self, *arrays: Array, plan: Plan, ensemble: bool) -> list[Array]:
        run = ft.partial(self.by_xla, plan=plan)
        return (jax.vmap(run) if ensemble else run)(*arrays)

    def native(self, *arrays: Array, plan: Plan, ensemble: bool) -> list[Array]:
        """Call the native library, on every device for its members of the ensemble."""

        def call(*arrays: Array) -> Sequence[Array]:
            avals = map(jax.typeof, arrays)
            shapes = self.abstract_eval(*avals, plan=plan, ensemble=ensemble)
            results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes]
            run = jax.ffi.ffi_call(self.primitive.name, results)
            return run(*arrays, blocks=plan.numbers(), ensemble=ensemble)

        count = len(plan.shapes) if self.primitive is split_p else 1
        free = sharding.FreeAxes(
            [-1] * len(arrays), [-1] * count, (ensemble,) * len(arrays)
        )
        return sharding.partition(call, free)(*arrays)

    def batch(self, args: Any, dims: Any, *, plan: Plan, ensemble: bool) -> Any:
        """Merge the mapped axis into that of the ensemble."""
        pairs = list(zip(args, dims, strict=True))
        size = next(a.shape[d] for a, d in pairs if d is not None)
        args = [
            jnp.broadcast_to(a, (size, *a.shape))
            if d is None
            else jnp.moveaxis(a, d, 0)
            for a, d in pairs
        ]
        if _explicit(args):
            run = ft.partial(self.xla, plan=plan, ensemble=ensemble)
            outs = jax.vmap(run)(*args)
        else:
            lead = args[0].shape[: 1 + ensemble]
            args = [a.reshape(-1, *a.shape[1 + ensemble :]) for a in args]
            outs = self.primitive.bind(*args, plan=plan, ensemble=True)
            outs = [a.reshape(*lead, *a.shape[1:]) for a in outs]
        return outs, [0] * len(outs)

    def jvp(self, primals: Any, tangents: Any, **params: Any) -> tuple[list, list]:
        dots = sharding.make_varying([ad.instantiate_zeros(t) for t in tangents])
        bind = self.primitive.bind
        return bind(*primals, **params), bind(*dots, **params)


def _join_transpose(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
    gradients = split_p.bind(ad.instantiate_zeros(cotangents[0]), **params)
    return [
        g if ad.is_undefined_primal(a) else None
        for g, a in zip(gradients, args, strict=True)
    ]


def _split_transpose(cotangents: Any, _: Any, **params: Any) -> list[Any]:
    arrays = sharding.make_varying([ad.instantiate_zeros(c) for c in cotangents])
    return join_p.bind(*arrays, **params)


def _register(rules: _Rules, transpose: Callable) -> None:
    primitive = rules.primitive
    xla = mlir.lower_fun(rules.xla, multiple_results=True)
    native = mlir.lower_fun(rules.native, multiple_results=True)

    def lower_on_cpu(ctx: Any, *args: Any, **params: Any) -> Any:
        known = ctx.avals_in[0].dtype.itemsize in (2, 4, 8)
        runs = known and not _compat.is_for_export(ctx)
        runs = runs and _native.status().library is not None
        return (native if runs else xla)(ctx, *args, **params)

    @ft.partial(jax.jit, static_argnames=("plan", "ensemble"))
    def alone(*arrays: Array, plan: Plan, ensemble: bool) -> list[Array]:
        return primitive.bind(*arrays, plan=plan, ensemble=ensemble)

    primitive.def_impl(always_jitted(alone))
    primitive.def_abstract_eval(rules.abstract_eval)
    batching.primitive_batchers[primitive] = rules.batch
    ad.primitive_jvps[primitive] = rules.jvp
    ad.primitive_transposes[primitive] = transpose
    _compat.lower_with_devices(primitive)
    mlir.register_lowering(primitive, xla)
    mlir.register_lowering(primitive, lower_on_cpu, "cpu")


_register(_Rules(join_p, _join_by_xla, _join_abstract_eval), _join_transpose)
_register(_Rules(split_p, _split_by_xla, _split_abstract_eval), _split_transpose)
