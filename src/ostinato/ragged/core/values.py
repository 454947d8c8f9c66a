"""How the values of all examples lie in memory: three layouts.

`shape` is the shape of one example's value. Sizes that depend on the example stand in
it as symbols; `Context` knows the largest one, and how many rows all examples have.
Rows are padded, and tails filled, with copies of valid rows: what is computed of them
alone is finite where it is on the data. What depends on positions may be anything past
the end of an example. None of it has a meaning, and no gradient of it is let through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..._typing import Array
from .sizes import symbolic_axes


@dataclasses.dataclass(frozen=True)
class Shared:
    """One value for all examples.

    A symbolic axis has its largest size; an example's value is the beginning of it.

    Attributes:
        x: the array, in the shape `shape` with every symbol at its maximum.
        shape: of one example's value.
        number: of a scalar from the text of the program, as an int.
    """

    x: Array
    shape: tuple[Any, ...]
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Padded:
    """One value per example, the batch axis in front, symbolic axes padded.

    Attributes:
        x: the array, `[batch, *shape]` with every symbol at its maximum.
        shape: of one example's value.
        filled: whether the padding is known to be copies of valid rows, or what comes
            of them alone, and so finite where the data are.
        number: of a scalar that is known to hold a symbolic size, that size.
    """

    x: Array
    shape: tuple[Any, ...]
    filled: bool = False
    number: Any = None


@dataclasses.dataclass(frozen=True)
class Flat:
    """The rows of all examples one after another on `axis`; no batch axis.

    Attributes:
        x: the array, in the shape `shape` with the capacity at `axis`.
        shape: of one example's value; `axis` is its one symbolic axis.
        axis: where the rows are.
    """

    x: Array
    shape: tuple[Any, ...]
    axis: int

    @property
    def dim(self) -> Any:
        """The symbolic size of an example's part."""
        return self.shape[self.axis]


Value = Shared | Padded | Flat


def ragged_axes(value: Value) -> list[int]:
    """The symbolic axes of one example's value."""
    return symbolic_axes(value.shape)


def is_filled(value: Value) -> bool:
    """Whether what lies outside of the examples is known to come of valid rows."""
    known = isinstance(value, Flat) or isinstance(value, Padded) and value.filled
    return known or not ragged_axes(value)


def filled_as(value: Value, *sources: Value) -> Value:
    """`value`, which comes of `sources` element by element, as filled as they are."""
    if isinstance(value, Padded) and all(map(is_filled, sources)):
        return dataclasses.replace(value, filled=True)
    return value


def with_array(value: Value, x: Any) -> Value:
    """`value` with another array, of whose padding nothing is known."""
    if isinstance(value, Flat):
        return dataclasses.replace(value, x=x)
    return type(value)(x, value.shape)


def shape_text(shape: Iterable[Any]) -> str:
    """A shape as messages show it: sizes without quotes."""
    return f"({', '.join(map(str, shape))})"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Values without their arrays: what a traced function need not be given.

    Attributes:
        values: in place of each array, None.
    """

    values: tuple[Value, ...]

    @classmethod
    def of(cls, values: Iterable[Value]) -> Packing:
        """The layouts and shapes of `values`."""
        return cls(tuple(with_array(v, None) for v in values))

    def unpack(self, arrays: Iterable[Array]) -> list[Value]:
        """Values of these layouts and shapes with `arrays`."""
        pairs = zip(self.values, arrays, strict=True)
        return [with_array(v, x) for v, x in pairs]
