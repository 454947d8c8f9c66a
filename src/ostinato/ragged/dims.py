"""The named sizes of one call of `ragged.vmap`."""

from __future__ import annotations

import dataclasses
import itertools
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from jax.export import SymbolicScope, symbolic_shape

from .._typing import Array
from .core import checks
from .core.sizes import evaluate
from .types.array import RaggedArray

_RESERVED = {"max", "min", "mod", "floordiv"}


@dataclasses.dataclass(frozen=True)
class Dim:
    """One named size of a call.

    Attributes:
        name: the name that the caller gave it.
        symbol: the symbol that stands in a trace for the size, or for the size plus 1
            if it may be 0: JAX takes every symbol for 1 or more. It is empty for a size
            that is made of others.
        offset: 1 if `symbol` stands for the size plus 1, else 0.
        lengths: int32 `[batch]`.
        max_length: the smallest `max_length` of all arrays of that name.
        capacity: the smallest capacity of them, at least 1.
        min_length: the least length; traced lengths may be below it.
        size: the size as an expression of symbols.
    """

    name: str
    symbol: str
    offset: int
    lengths: Array
    max_length: int
    capacity: int
    min_length: int
    size: str

    @property
    def high(self) -> int:
        """The largest value of the symbol, as the trace may assume.

        It is larger than the least value, so that the size is not known to be a number.
        """
        return max(self.max_length, self.min_length + 1) + self.offset


def dim_of(
    name: str,
    arrays: list[RaggedArray],
    min_length: int,
    others: Mapping[str, Dim],
    base: Mapping[str, Dim] | None,
) -> Dim:
    """Return the size of `arrays`, made of the sizes in `base` if there are any."""
    max_length = min(a.max_length for a in arrays)
    capacity = min(a.capacity for a in arrays)
    checks.check_dim(arrays, max_length, capacity, min_length)
    lengths = arrays[0].lengths
    common = {
        "name": name,
        "lengths": lengths,
        "max_length": max(max_length, min_length),
        "capacity": max(capacity, 1),
        "min_length": min_length,
    }
    if base is not None:
        checks.check_derived(name, lengths, {n: d.lengths for n, d in base.items()})
        scope = SymbolicScope()
        sizes = {n: symbolic_shape(d.size, scope=scope)[0] for n, d in base.items()}
        return Dim(symbol="", offset=0, size=str(evaluate(name, sizes)), **common)
    symbol = name
    if not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED:
        symbol = "size"
    offset = 1 if min_length == 0 else 0
    if offset:
        symbol = f"{symbol}_plus_1"
    while symbol in {d.symbol for d in others.values()}:
        symbol += "_"
    size = f"{symbol} - 1" if offset else symbol
    return Dim(symbol=symbol, offset=offset, size=size, **common)


def least_lengths(
    given: int | Mapping[str, int], names: Mapping[str, Any]
) -> dict[str, int]:
    """Return the `min_length` of every dim."""
    if not isinstance(given, Mapping):
        return {name: given for name in names}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(
            f"`min_length` names {unknown[0]!r}, which is no dim of the arguments; "
            f"they have {', '.join(map(repr, names))}"
        )
    return {name: int(given.get(name, 1)) for name in names}


def nonnegative_products(dims: Sequence[Dim]) -> list[str]:
    """Return constraints that say that products of sizes are not negative.

    JAX does not see it where both factors may be 0.
    """
    maybe_0 = [d.symbol for d in dims if d.offset]
    pairs = itertools.combinations_with_replacement(maybe_0, 2)
    return [f"{a} * {b} - {a} - {b} + 1 >= 0" for a, b in pairs]
