"""Arguments that `shard` dealt out to devices, and `vmap` on each device's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _checks
from .._typing import Array
from .results import of_examples
from .types.array import RaggedArray
from .types.checks import host, is_readable, require
from .types.padded import PaddedRagged
from .types.sharded import ShardedBatch, ShardedRagged, is_sharded, spec_of

_TOGETHER = "arguments must be dealt out together, by one call of ragged.shard"


class Shares:
    """The arguments of a mapped function, some of which are dealt out to devices.

    Args:
        leaves: those of `(args, kwargs)`.
        tree: the structure of `(args, kwargs)`.

    Attributes:
        known: whether lengths and orders can be read in this process.
    """

    def __init__(self, leaves: Sequence[Any], tree: Any) -> None:
        self._leaves, self._tree = leaves, tree
        self._dealt = [x for x in leaves if is_sharded(x)]
        self._ragged = [x for x in leaves if isinstance(x, ShardedRagged)]
        self._first = self._dealt[0]
        orders = [x.order for x in self._dealt]
        self._others = [order for order in orders if order is not orders[0]]
        self.known = all(
            map(is_readable, (*orders, *(x.lengths for x in self._ragged)))
        )

    def check_axes(self, axes: Sequence[Any], out: Any) -> None:
        """Check that arguments are dealt out alike, and that axes are those they have.

        Args:
            axes: for each leaf its entry of `in_axes`.
            out: the `out_axes`.
        """
        first = self._first
        for x, axis in zip(self._leaves, axes, strict=True):
            if is_sharded(x):
                if not _is_zero(axis):
                    raise ValueError(
                        "`in_axes` must be 0 for an argument that ragged.shard dealt "
                        f"out, got {axis!r}"
                    )
                if (x.mesh, x.mesh_axis) != (first.mesh, first.mesh_axis) or (
                    x.order.shape != first.order.shape
                ):
                    raise ValueError(f"{_TOGETHER}, got {first} and {x}")
            elif axis is not None:
                raise ValueError(
                    f"mapped {_TOGETHER}, got {_checks.describe(x)} beside {first}; "
                    "`in_axes` None shares it among all examples"
                )
        if not all(map(_is_zero, jax.tree.leaves(out, is_leaf=lambda x: x is None))):
            raise ValueError(
                "`out_axes` must be 0 for results of a batch on several devices, got "
                f"{out}"
            )

    def check_orders(self, x: Any) -> Any:
        """Return `x`; check that all have the examples in one order, as `require`."""
        first = self._first
        for other in self._dealt:
            if other.order is not first.order:
                message = f"{_TOGETHER}, got {first} and {other} of different orders"
                same = (host(other.order) == host(first.order)).all()
                x = require(x, {message: same})
        return x

    def batches(self) -> list[RaggedArray]:
        """Return the ragged ones as whole batches, for checks of their lengths.

        Lengths that are known are in the caller's order, for messages.
        """

        def whole(x: ShardedRagged) -> RaggedArray:
            lengths: Any = x.lengths
            if is_readable(lengths) and is_readable(x.order):
                lengths = np.asarray(lengths)[np.argsort(np.asarray(x.order))]
            return RaggedArray.tree_unflatten(_static(x), (x.data, lengths))

        return list(map(whole, self._ragged))

    def run(self, run: Callable, last: Callable) -> Any:
        """Run a mapped function on each device's share.

        Args:
            run: the mapped function of RaggedArrays and arrays: `run(args, kwargs)`.
            last: a function that the arrays of all results pass through.
        """
        first = self._first
        mesh, axis = first.mesh, first.mesh_axis
        arrays, specs = [self._same_examples()], [spec_of(0, axis)]
        for x in self._leaves:
            if isinstance(x, ShardedRagged):
                arrays += [x.data, x.lengths]
                specs += [spec_of(x.axis, axis), spec_of(0, axis)]
            elif isinstance(x, ShardedBatch):
                arrays.append(x.data)
                specs.append(spec_of(0, axis))
            elif _checks.is_array(x):
                arrays.append(x)
                specs.append(PartitionSpec())
        found: list[Any] = []  # the tree of results and its leaves, when it is known

        def local(same: Array | None, *arrays: Any) -> list[Any]:
            given = iter(arrays)

            def own(x: Any) -> Any:
                if isinstance(x, ShardedRagged):
                    pair = next(given), next(given)
                    return RaggedArray.tree_unflatten(_static(x), pair)
                return next(given) if is_sharded(x) or _checks.is_array(x) else x

            args, kwargs = jax.tree.unflatten(self._tree, map(own, self._leaves))
            results, out_tree = jax.tree.flatten(run(args, kwargs), _is_result)
            if same is not None:
                results = [of_examples(x, same) for x in results]
            found[:] = out_tree, results
            return list(map(_split_axis_first, results))

        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=tuple(specs), out_specs=spec_of(0, axis)
        )
        arrays = last(sharded(*arrays))
        out_tree, results = found

        def whole(like: Any, x: Any) -> Any:
            if not isinstance(like, RaggedArray):
                return ShardedBatch(x, first.order, mesh, axis)
            data = jnp.moveaxis(x[0], 0, like.axis)
            return ShardedRagged(data, x[1], first.order, *_static(like), mesh, axis)

        wrapped = [whole(like, x) for like, x in zip(results, arrays, strict=True)]
        return jax.tree.unflatten(out_tree, wrapped)

    def _same_examples(self) -> Array | None:
        """Return where orders are the same, bool `[batch]`; None if they are known to.

        Orders that are traced may differ.
        """
        if not self._others or self.known:
            return None
        equal = [order == self._first.order for order in self._others]
        return jnp.all(jnp.stack(equal), axis=0)


def _static(x: Any) -> tuple[int, str, int]:
    return x.axis, x.dim, x.max_length


def _split_axis_first(x: Any) -> Any:
    """Return the arrays of a result with the axis in front along which it is split."""
    if isinstance(x, RaggedArray):
        return jnp.moveaxis(x.data, x.axis, 0), x.lengths
    return x


def _is_zero(axis: Any) -> bool:
    return axis == 0 and not isinstance(axis, bool)


def _is_result(x: Any) -> bool:
    return isinstance(x, (PaddedRagged, RaggedArray))
