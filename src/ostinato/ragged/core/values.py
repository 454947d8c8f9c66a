"""The values of all examples: how they lie in memory, in three layouts.

`shape` is the shape of one example's value. Sizes that depend on the example stand in
it as symbols; `Context` knows the largest value of a symbol, and how many tokens all
examples have together.

Padding and unused capacity hold copies of valid tokens: values that are computed from
them alone are finite where they are finite on the data. Values that depend on positions
may be anything past the end of an example. Nothing there has a meaning, and its
gradient is dropped.

A value is a pytree. Its array is the only leaf; its shape and layout are static, so
that values pass through `scan`, `cond`, `checkpoint` and custom derivatives. Knowledge
about its elements, `filled` and `number`, is not carried across: it may not hold in
every turn of a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from ..._typing import Array
from .sizes import symbolic_axes


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Shared:
    """One value for all examples.

    A symbolic axis has its largest size; an example's value is the beginning of it.

    Attributes:
        x: the array, in the shape `shape` with every symbol at its maximum.
        shape: the shape of one example's value.
        number: the int that a scalar from the text of the program holds, else None.
    """

    x: Array
    shape: tuple[Any, ...]
    number: int | None = None

    def tree_flatten(self) -> tuple[tuple[Array], Any]:
        """Return the leaf and the static part, for JAX."""
        return (self.x,), (self.shape,)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Shared:
        """Return a value of any leaf, for JAX."""
        return cls(*leaves, *static)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Padded:
    """One value per example, the batch axis in front, symbolic axes padded.

    Attributes:
        x: the array, `[batch, *shape]` with every symbol at its maximum.
        shape: the shape of one example's value.
        filled: whether the padding is known to be copies of valid tokens, or to be
            computed of them alone, and so finite where the data are.
        number: the symbolic size that a scalar is known to hold, else None.
    """

    x: Array
    shape: tuple[Any, ...]
    filled: bool = False
    number: Any = None

    def tree_flatten(self) -> tuple[tuple[Array], Any]:
        """Return the leaf and the static part, for JAX."""
        return (self.x,), (self.shape,)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Padded:
        """Return a value of any leaf, for JAX."""
        return cls(*leaves, *static)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Flat:
    """The tokens of all examples one after another on `axis`; no batch axis.

    Attributes:
        x: the array, in the shape `shape` with the capacity at `axis`.
        shape: the shape of one example's value; `axis` is its one symbolic axis.
        axis: the axis of the tokens.
    """

    x: Array
    shape: tuple[Any, ...]
    axis: int

    @property
    def dim(self) -> Any:
        """The symbolic size of an example's part."""
        return self.shape[self.axis]

    def tree_flatten(self) -> tuple[tuple[Array], Any]:
        """Return the leaf and the static part, for JAX."""
        return (self.x,), (self.shape, self.axis)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Flat:
        """Return a value of any leaf, for JAX."""
        return cls(*leaves, *static)


Value = Shared | Padded | Flat


def is_value(x: Any) -> bool:
    """Return whether `x` is a value, for `is_leaf` of `jax.tree`."""
    return isinstance(x, Value)


def ragged_axes(value: Value) -> list[int]:
    """Return the symbolic axes of one example's value."""
    return symbolic_axes(value.shape)


def is_dense(value: Value) -> bool:
    """Return whether a value is the same array, of one shape, for all examples."""
    return isinstance(value, Shared) and not ragged_axes(value)


def is_filled(value: Value) -> bool:
    """Return whether everything outside of the examples is computed of valid tokens."""
    known = isinstance(value, Flat) or isinstance(value, Padded) and value.filled
    return known or not ragged_axes(value)


def filled_as(value: Value, *sources: Value) -> Value:
    """Return `value`, made of `sources` element by element, as filled as they are."""
    if isinstance(value, Padded) and all(map(is_filled, sources)):
        return dataclasses.replace(value, filled=True)
    return value


def with_array(value: Value, x: Any) -> Value:
    """Return `value` with another array, about whose elements nothing is known."""
    _, static = value.tree_flatten()
    return type(value).tree_unflatten(static, (x,))


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as messages show it: sizes without quotes."""
    return f"({', '.join(map(str, shape))})"
