"""Batches of arrays that differ in the size of one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _checks
from ..._typing import Array, ArrayLike, Int, Shaped
from .building import (
    check_other_axes,
    checked_examples,
    joined,
    lengths_of_ids,
    longest_of,
    pack_padded,
    unpack_padded,
)
from .capacity import Size, chosen_size, round_capacity, round_length
from .checked import checked
from .checks import (
    check_axis,
    check_capacity,
    check_fit,
    check_given,
    check_index,
    check_known,
    refuse_in,
)
from .cutting import cut
from .joining import example_numbers, map_tokens, take_examples
from .padded import numbers_text, type_text
from .refusals import NoArray


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class RaggedArray(NoArray):
    """A batch of arrays of one dtype and rank that differ in the size of one axis.

    Their tokens, the slices along that axis, lie one after another in one buffer, as in
    a pile of JAX. A RaggedArray is a pytree: `data` and `lengths` are its leaves, the
    rest is static.

    `==` and hashes go by identity: a batch equals itself alone, whatever others hold.
    `jax.tree.map(jnp.array_equal, a, b)` compares the leaves of two batches, with the
    unused capacity.

    Args:
        data: `[capacity, ...]`, with the tokens on `axis`. Tokens past the sum of
            `lengths` are unused capacity: they reach no result and no gradient, even
            if they are NaN.
        lengths: integers `[batch]`, the tokens of each example. They are kept as int32.
        axis: the axis of the tokens, in `data` and in each example.
        dim: the name of the size. Arrays of one name have the same lengths.
        max_length: the largest length; padded intermediate values have this size. None
            stands for the longest length, or for the capacity if `lengths` are traced.

    Attributes:
        data: the tokens.
        lengths: int32 `[batch]`.
        axis: as given, not negative.
        dim: as given.
        max_length: as given, at least 1.

    Raises:
        TypeError: `data` is no array, `lengths` hold no integers, `dim` is no string.
        ValueError: a wrong shape or axis; concrete lengths that are negative, longer
            than `max_length`, or larger in sum than the capacity.

    Traced lengths are checked where the caller is under `jax.experimental.checkify`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.RaggedArray(jnp.arange(6.0), [2, 0, 3])
        >>> batch
        RaggedArray(float32[6], n=[2, 0, 3], axis=0, max_length=3)
        >>> batch[-1].tolist()
        [2.0, 3.0, 4.0]
    """

    data: Shaped[Array, "capacity ..."]
    lengths: Int[Array, " batch"]
    axis: int
    dim: str
    max_length: int

    def __init__(
        self,
        data: Shaped[ArrayLike, "capacity ..."],
        lengths: Int[ArrayLike, " batch"],
        *,
        axis: int = 0,
        dim: str = "n",
        max_length: int | None = None,
    ):
        data = _checks.check_array("data", data)
        axis = check_axis(axis, data.ndim)
        if not isinstance(dim, str) or not dim:
            raise TypeError(f"`dim` must be a name, got {_checks.describe(dim)}")
        given = check_given(lengths)
        lengths = _checks.as_int32(given)
        capacity = data.shape[axis]
        check_capacity(capacity)
        if max_length is None:
            concrete = _checks.is_concrete(lengths)
            max_length = max(longest_of(given) if concrete else capacity, 1)
        max_length = _checks.check_size("max_length", max_length)
        lengths = check_fit(lengths, capacity, max_length, given)
        _set(self, data, lengths, axis, dim, max_length)

    # ------------------------------------------------------------------------ in

    @classmethod
    def from_list(
        cls,
        arrays: Sequence[ArrayLike],
        *,
        axis: int = 0,
        dim: str = "n",
        capacity: Size = round_capacity,
        max_length: Size = round_length,
    ) -> RaggedArray:
        """Make a batch of its examples.

        Capacity and `max_length` are rounded, so that batches drawn at random have few
        different ones: a jitted function is compiled for each pair. Arrays of numpy are
        joined by numpy, which compiles nothing.

        Args:
            arrays: arrays that differ in the size of `axis` alone. An empty sequence
                makes an empty batch of float32 scalars as tokens.
            axis: the axis of different sizes.
            dim: see `RaggedArray`.
            capacity: the capacity of `data`: a number, or a function of the number of
                tokens. None stands for that number.
            max_length: a number, best the longest length of all data, or a function of
                the longest length of these arrays. None stands for that length.

        Raises:
            TypeError: `arrays` are no arrays, or have different dtypes.
            ValueError: shapes differ in another axis, or a size is too small.
        """
        examples = checked_examples(arrays)
        given = examples or [np.zeros(0, np.float32)]
        axis = check_axis(axis, given[0].ndim)
        check_other_axes(given, axis)
        lengths = np.array([a.shape[axis] for a in examples], np.int32)
        tokens = sum(a.shape[axis] for a in given)
        return cls(
            joined(given, axis, chosen_size("capacity", capacity, tokens)),
            lengths,
            axis=axis,
            dim=dim,
            max_length=chosen_size("max_length", max_length, longest_of(lengths)),
        )

    @classmethod
    def from_padded(
        cls,
        x: Shaped[ArrayLike, "batch T ..."],
        lengths: Int[ArrayLike, " batch"],
        *,
        axis: int = 0,
        dim: str = "n",
        capacity: Size = round_capacity,
    ) -> RaggedArray:
        """Make a batch of padded examples. Holds under `jit` and `grad`.

        Args:
            x: `[batch, ...]`, padded to the size T on `axis` of each example. The
                padding is dropped.
            lengths: integers `[batch]` in 0..T.
            axis: the ragged axis of one example, so it is axis `axis + 1` of `x`.
            dim: see `RaggedArray`.
            capacity: the capacity of `data`: a number, or a function of the number of
                tokens, which is taken for `batch * T` if `lengths` are traced. None
                stands for that number.

        Returns:
            A RaggedArray with `max_length` T and zeros in the unused capacity.
        """
        x = _checks.check_array("x", x)
        axis = check_axis(axis, x.ndim - 1)
        given = check_given(lengths)
        lengths = _checks.as_int32(given)
        _checks.check_shape("lengths", lengths, batch=x.shape[0])
        longest, concrete = x.shape[axis + 1], _checks.is_concrete(lengths)
        tokens = int(np.sum(lengths)) if concrete else x.shape[0] * longest
        capacity = chosen_size("capacity", capacity, tokens)
        lengths = check_fit(lengths, capacity, longest, given)
        data = pack_padded(jnp.moveaxis(x, axis + 1, 1), lengths, capacity)
        data = jnp.moveaxis(data, 0, axis)
        return cls(data, lengths, axis=axis, dim=dim, max_length=max(longest, 1))

    @classmethod
    def from_row_splits(
        cls,
        data: Shaped[ArrayLike, "capacity ..."],
        row_splits: Int[ArrayLike, " batch+1"],
        **options: Any,
    ) -> RaggedArray:
        """Make a batch of its tokens and the offsets of examples, as TensorFlow does.

        Args:
            data: see `RaggedArray`.
            row_splits: integers `[batch + 1]`, ascending from 0; example b has the
                tokens `row_splits[b]` to `row_splits[b + 1] - 1`.
            **options: `axis`, `dim`, `max_length` of `RaggedArray`.

        Raises:
            ValueError: `row_splits` do not begin with 0, or descend.
        """
        splits = check_given(row_splits, "row_splits")
        if isinstance(splits, np.ndarray):
            splits = splits.astype(np.int64)  # differences of unsigned ones wrap around
        elif splits.dtype != np.int64:
            splits = _checks.as_int32(splits)
        if splits.shape[0] == 0:
            raise ValueError("`row_splits` must have batch + 1 elements, got none")
        if not _checks.is_concrete(splits):
            splits = checked(splits, {"`row_splits` must begin with 0": splits[0] == 0})
        elif int(np.asarray(splits)[0]) != 0:
            raise ValueError(f"`row_splits` must begin with 0, got {splits[0]}")
        return cls(data, splits[1:] - splits[:-1], **options)

    @classmethod
    def from_segment_ids(
        cls,
        data: Shaped[ArrayLike, "capacity ..."],
        segment_ids: Int[ArrayLike, " capacity"],
        *,
        num_segments: int | None = None,
        **options: Any,
    ) -> RaggedArray:
        """Make a batch of its tokens and the example of each token.

        Args:
            data: see `RaggedArray`.
            segment_ids: integers `[capacity]`, ascending, one for each token. Tokens
                whose id is `num_segments` or more are unused capacity.
            num_segments: the number of examples. None stands for the largest id and 1.
            **options: `axis`, `dim`, `max_length` of `RaggedArray`.

        Raises:
            TypeError: `segment_ids` are traced, and `num_segments` is None.
            ValueError: ids descend, are negative, or are not one for each token.
        """
        data = _checks.check_array("data", data)
        capacity = data.shape[check_axis(options.get("axis", 0), data.ndim)]
        counts = lengths_of_ids(segment_ids, num_segments, capacity)
        return cls(data, counts, **options)

    # ----------------------------------------------------------------------- out

    @property
    def capacity(self) -> int:
        """The number of tokens that `data` can hold, used or not."""
        return self.data.shape[self.axis]

    @property
    def dtype(self) -> Any:
        """The dtype of `data`."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the batch, `(batch, ...)`, with None for the ragged axis."""
        sizes = [None if i == self.axis else n for i, n in enumerate(self.data.shape)]
        return (len(self), *sizes)

    @property
    def ndim(self) -> int:
        """The number of axes, with that of the batch."""
        return self.data.ndim + 1

    def map(self, function: Callable[[Array], Array]) -> RaggedArray:
        """Return the batch of `function(token)` for all tokens.

        Args:
            function: a function of one token, a slice of `data` along `axis`; it
                returns one array. `ragged.vmap` maps functions of whole examples.

        Returns:
            A RaggedArray of the same lengths, with zeros in the unused capacity. Tokens
            are in front where `function` returns fewer axes than come before `axis`.

        Raises:
            TypeError: `function` does not return one array.

        Holds under `jit`, `grad` and `vmap`; the unused capacity reaches no gradient.

        Examples:
            >>> import jax.numpy as jnp
            >>> from ostinato import ragged
            >>> batch = ragged.RaggedArray(jnp.array([1.0, 2.0, 3.0]), [1, 2])
            >>> batch.map(lambda token: token**2).to_list()[1].tolist()
            [4.0, 9.0]
        """
        data, axis = map_tokens(function, self.data, self.axis, self.lengths)
        return _new(data, self.lengths, axis, self.dim, self.max_length)

    def with_data(self, data: ArrayLike) -> RaggedArray:
        """Return the same batch with other tokens.

        Raises:
            ValueError: the size of `data` on `axis` is not `capacity`.
        """
        data = _checks.check_array("data", data)
        if data.ndim <= self.axis or data.shape[self.axis] != self.capacity:
            raise ValueError(
                f"`data` must have {self.capacity} tokens on axis {self.axis}, "
                f"got shape {list(data.shape)}"
            )
        return _new(data, self.lengths, self.axis, self.dim, self.max_length)

    def to_list(self) -> list[Array]:
        """Return the examples. Not under `jit`, where their sizes are not known."""
        lengths = check_known("RaggedArray", self.lengths)
        ends, before = np.cumsum(lengths), (slice(None),) * self.axis
        tokens = map(slice, ends - lengths, ends)
        return cut(self.data, [(*before, of) for of in tokens])

    def to_padded(self, fill: ArrayLike = 0) -> Shaped[Array, "batch T ..."]:
        """Return `[batch, ...]`, padded with `fill` to `max_length` on the ragged axis.

        Args:
            fill: one number that the dtype holds: floats round it, integers and bools
                must equal it. Keys are padded with keys of zeros, and take 0 alone.

        Raises:
            TypeError: `fill` is no number.
            ValueError: `fill` is several numbers, or one that the dtype does not hold.

        Holds under `jit`, `grad` and `vmap`.
        """
        return unpack_padded(self.data, self.axis, self.lengths, self.max_length, fill)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.lengths.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return one example, or a batch of some of them.

        Args:
            index: an integer selects one example, which needs lengths that are not
                traced. A slice, or a vector of integers or bools, selects a batch.
                Under `jit` integers may be traced; they are clipped to the batch.

        Returns:
            An array, or a RaggedArray of the same `max_length` with a rounded capacity
            (under `jit` one that is large enough for all lengths).
        """
        if isinstance(index, (slice, list, tuple)) or np.ndim(index) == 1:
            return self._select(index)
        number = check_index(index, len(self))
        ends = np.cumsum(check_known("RaggedArray", self.lengths))
        begin = ends[number - 1] if number else 0
        size = int(ends[number] - begin)
        # Compiled for each size, not for each offset.
        return lax.dynamic_slice_in_dim(self.data, int(begin), size, self.axis)

    def _select(self, index: Any) -> RaggedArray:
        numbers = example_numbers(index, len(self))
        most = numbers.shape[0] * self.max_length
        if isinstance(index, slice):
            most = min(most, self.capacity)  # no example comes twice
        data, lengths = take_examples(
            self.data, self.axis, self.lengths, numbers, most, round_capacity
        )
        return _new(data, lengths, self.axis, self.dim, self.max_length)

    def __iter__(self) -> Iterator[Array]:
        """Iterate over the examples. `lengths` must not be traced."""
        check_known("RaggedArray", self.lengths)
        return (self[i] for i in range(len(self)))

    def __contains__(self, x: Any) -> bool:
        """Raise TypeError: examples are arrays, whose `==` is no truth value."""
        refuse_in("RaggedArray")

    def __repr__(self) -> str:
        axis, dim, most = self.axis, self.dim, self.max_length
        name = dim if dim.isidentifier() else repr(dim)
        return (
            f"RaggedArray({type_text(self.data)}, {name}={numbers_text(self.lengths)}, "
            f"axis={axis}, max_length={most})"
        )

    # -------------------------------------------------------------------- pytree

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return the leaves `data` and `lengths` and the static part, for JAX."""
        key = jax.tree_util.GetAttrKey
        leaves = (key("data"), self.data), (key("lengths"), self.lengths)
        return leaves, (self.axis, self.dim, self.max_length)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> RaggedArray:
        """Return a batch of any leaves, without checks, for JAX."""
        return _new(*leaves, *static)


# ---------------------------------------------------------------------------- helpers


def _set(
    array: RaggedArray, data: Any, lengths: Any, axis: int, dim: str, most: int
) -> None:
    for name, value in zip(
        ("data", "lengths", "axis", "dim", "max_length"),
        (data, lengths, axis, dim, most),
        strict=True,
    ):
        object.__setattr__(array, name, value)


def _new(*fields: Any) -> RaggedArray:
    array = object.__new__(RaggedArray)
    _set(array, *fields)
    return array
