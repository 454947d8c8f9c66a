"""The function `shard`, which deals the examples of a batch out to devices."""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import _checks
from .types.array import RaggedArray
from .types.capacity import Size, chosen_size, round_capacity
from .types.checks import check_known
from .types.sharded import ShardedBatch, ShardedRagged, count_of, spec_of


def shard(
    batch: Any,
    mesh: Any,
    axis: str | tuple[str, ...],
    *,
    capacity: Size = round_capacity,
) -> Any:
    """Deal the examples of a batch out to devices, so that all have as many tokens.

    Every device gets as many examples, long and short ones, in a buffer of its own; all
    buffers have one capacity. `ragged.vmap` runs each share on its device: the forward
    pass communicates nothing, and the backward pass sums the gradients of shared
    arguments.

    Args:
        batch: a RaggedArray, or a pytree of RaggedArrays and of arrays `[batch, ...]`
            of equally many examples, such as inputs and labels.
        mesh: the mesh of the devices, `jax.sharding.Mesh`.
        axis: the name of the axis of `mesh` over which examples are dealt, or a tuple
            of names. Its size must divide the number of examples.
        capacity: the capacity of one buffer: a number, or a function of the largest
            number of tokens that a device gets. None stands for that number.

    Returns:
        A `ShardedRagged` for each RaggedArray and a `ShardedBatch` for each array, in
        the same tree. The `imbalance` of a ShardedRagged is how many more tokens the
        fullest device has than the mean.

    Raises:
        TypeError: `batch` has no RaggedArray, its lengths are traced, or a leaf is no
            array; `mesh` or `axis` has the wrong type.
        ValueError: the mesh has no such axis, numbers of examples differ or are no
            multiple of the devices, or `capacity` is too small.

    Runs on the host, outside of `jit`. On a mesh of several processes, each must call
    it with the same batch.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ostinato import ragged
        >>> mesh = jax.make_mesh((1,), ("batch",))
        >>> batch = ragged.stack([jnp.arange(3.0), jnp.arange(2.0)])
        >>> shares = ragged.shard(batch, mesh, "batch")
        >>> ragged.vmap(lambda x: x.sum())(shares).in_order().tolist()
        [3.0, 1.0]
    """
    axis = _check_axis(mesh, axis)
    named, tree = jax.tree.flatten_with_path(batch, is_leaf=_is_ragged)
    leaves = [_checks.unwrap(x) for _, x in named]
    ragged = [x for x in leaves if _is_ragged(x)]
    if not ragged:
        raise TypeError(
            f"`batch` must have a RaggedArray, got {_checks.describe(batch)}; "
            "jax.device_put shards arrays of equal sizes"
        )
    for (path, _), x in zip(named, leaves, strict=True):
        _check_leaf(f"batch{jax.tree_util.keystr(path)}", x, len(ragged[0]))
    lengths = [np.asarray(check_known("RaggedArray", x.lengths)) for x in ragged]
    shares = count_of(mesh, axis)
    if len(ragged[0]) % shares:
        raise ValueError(
            f"`batch` must have a multiple of {shares} examples, the number of "
            f"devices, got {len(ragged[0])}; add empty ones"
        )
    dealt = _deal(np.stack(lengths).sum(0), shares)
    order = _put(dealt.ravel().astype(np.int32), 0, mesh, axis)

    def sharded(x: Any) -> Any:
        if not _is_ragged(x):
            x = x[dealt.ravel()]
            return ShardedBatch(_put(x, 0, mesh, axis), order, mesh, axis)
        own = np.asarray(x.lengths)
        data = _tokens(x, own, dealt, capacity)
        return ShardedRagged(
            _put(data, x.axis, mesh, axis),
            _put(own[dealt.ravel()], 0, mesh, axis),
            order,
            x.axis,
            x.dim,
            x.max_length,
            mesh,
            axis,
        )

    return jax.tree.unflatten(tree, [sharded(x) for x in leaves])


def _check_axis(mesh: Any, axis: Any) -> str | tuple[str, ...]:
    """Return the name or names of axes of a mesh; check both."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {_checks.describe(mesh)}; "
            "jax.make_mesh makes one"
        )
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(name, str) for name in names
    ):
        raise TypeError(
            "`axis` must be the name of an axis of the mesh, or a tuple of names, got "
            f"{_checks.describe(axis)}"
        )
    if not names or not all(name in mesh.shape for name in names):
        raise ValueError(
            f"`axis` must name axes of the mesh, of "
            f"{', '.join(map(repr, mesh.shape))}, got {axis!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"`axis` must name each axis of the mesh once, got {axis!r}")
    return axis if isinstance(axis, str) else tuple(names)


def _check_leaf(name: str, x: Any, count: int) -> None:
    """Check that `x` is an array or a RaggedArray of as many examples."""
    if not (_is_ragged(x) or (_checks.is_array(x) and np.ndim(x))):
        raise TypeError(
            f"`{name}` must be an array [batch, ...], got {_checks.describe(x)}; "
            "np.array makes one of a list of numbers"
        )
    if len(x) != count:
        raise ValueError(
            "`batch` must have arrays of equally many examples, got "
            f"{len(x)} in `{name}` and {count} in the first RaggedArray"
        )


def _deal(sizes: np.ndarray, shares: int) -> np.ndarray:
    """Return which examples each share has, `[shares, examples]`, in their order.

    The longest example that is left goes to the share with the fewest tokens that has a
    place left.
    """
    places = len(sizes) // shares
    dealt: list[list[int]] = [[] for _ in range(shares)]
    heap = [(0, share) for share in range(shares)]
    for example in np.argsort(-sizes, kind="stable").tolist():
        tokens, share = heapq.heappop(heap)
        dealt[share].append(example)
        if len(dealt[share]) < places:
            heapq.heappush(heap, (tokens + int(sizes[example]), share))
    return np.sort(np.array(dealt, np.int64).reshape(shares, places), axis=1)


def _tokens(
    x: RaggedArray, lengths: np.ndarray, dealt: np.ndarray, capacity: Size
) -> np.ndarray:
    """Return the buffers of all shares one after another, zeros where unused."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise NotImplementedError(
            "ragged.shard cannot deal out tokens that are PRNG keys; pass one key for "
            "each example, and split it in the mapped function"
        )
    begins = np.cumsum(lengths) - lengths
    totals = lengths[dealt].sum(1)
    size = chosen_size("capacity", capacity, int(totals.max(initial=0)))
    if size < totals.max(initial=0):
        raise ValueError(
            f"`capacity` must hold the {totals.max()} tokens of the fullest device, "
            f"got {size}"
        )
    data = np.asarray(x.data)
    shape = list(data.shape)
    shape[x.axis] = size * len(dealt)
    buffers = np.zeros(shape, data.dtype)
    source, target = np.moveaxis(data, x.axis, 0), np.moveaxis(buffers, x.axis, 0)
    for share, examples in enumerate(dealt):
        at = share * size
        for example in examples:
            begin, count = begins[example], lengths[example]
            target[at : at + count] = source[begin : begin + count]
            at += count
    return buffers


def _put(x: Any, at: int, mesh: Any, axis: Any) -> Any:
    """Return the array on the devices of the mesh, split along its axis `at`."""
    sharding = NamedSharding(mesh, spec_of(at, axis))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _put(jax.random.key_data(x), at, mesh, axis)
        return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(x)))
    whole = np.asarray(x)  # that of every process
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])


def _is_ragged(x: Any) -> bool:
    return isinstance(x, RaggedArray)
