"""The named sizes of one call of `ragged.vmap`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.export import SymbolicScope, symbolic_shape

from .._typing import Array
from .core import checks
from .core.sizes import evaluate, is_derived, is_symbol, symbol_names
from .types.array import RaggedArray


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


def dims_of(
    arrays: Sequence[RaggedArray],
    min_length: int | Mapping[str, int],
) -> dict[str, Dim]:
    """Return the sizes of arrays by name; those that are made of others come last.

    Args:
        arrays: the arrays whose sizes differ between examples.
        min_length: an int, or one for each dim.
    """
    names = dict.fromkeys(x.dim for x in arrays)
    least = least_lengths(min_length, names)
    made = {n for n in names if is_derived(n) and names.keys() >= set(symbol_names(n))}
    dims: dict[str, Dim] = {}
    for name in sorted(names, key=made.__contains__):
        base = {n: dims[n] for n in symbol_names(name)} if name in made else None
        named = [x for x in arrays if x.dim == name]
        dims[name] = _dim_of(name, named, least[name], dims, base)
    return dims


def _dim_of(
    name: str,
    arrays: list[RaggedArray],
    min_length: int,
    others: Mapping[str, Dim],
    base: Mapping[str, Dim] | None,
) -> Dim:
    """Return the size of `arrays`, made of the sizes in `base` if there are any."""
    common = {
        "name": name,
        "lengths": arrays[0].lengths,
        "max_length": max(min(a.max_length for a in arrays), min_length),
        "capacity": max(min(a.capacity for a in arrays), 1),
        "min_length": min_length,
    }
    if base is not None:
        scope = SymbolicScope()
        sizes = {n: symbolic_shape(d.size, scope=scope)[0] for n, d in base.items()}
        return Dim(symbol="", offset=0, size=str(evaluate(name, sizes)), **common)
    symbol = name if is_symbol(name) else "size"
    offset = 1 if min_length == 0 else 0
    if offset:
        symbol = f"{symbol}_plus_1"
    while symbol in {d.symbol for d in others.values()}:
        symbol += "_"
    size = f"{symbol} - 1" if offset else symbol
    return Dim(symbol=symbol, offset=offset, size=size, **common)


def check_sizes(
    x: Any,
    arrays: Sequence[RaggedArray],
    dims: Mapping[str, Dim],
    constraints: Sequence[str],
) -> Any:
    """Return `x`; check lengths of arrays against each other, and against constraints.

    Args:
        x: a pytree of arrays; lengths that are traced are checked where one is used.
        arrays: the arrays whose sizes differ between examples.
        dims: their sizes, as `dims_of` returns them.
        constraints: the constraints of the caller.
    """
    lengths = {name: d.lengths for name, d in dims.items()}
    for name, d in dims.items():
        x = checks.check_dim(x, [a for a in arrays if a.dim == name], d.min_length)
        if not d.symbol:
            base = {n: lengths[n] for n in symbol_names(name)}
            x = checks.check_derived(x, name, d.lengths, base)
    for constraint in constraints:
        x = checks.check_constraint(x, constraint, lengths)
    return x


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

    JAX does not see it where a factor may be 0. Such a product is that of a size and
    the one before it, too: twice the number of pairs.
    """
    maybe_0 = [d.symbol for d in dims if d.offset]
    positive = [d.symbol for d in dims if not d.offset]
    products = itertools.combinations_with_replacement(maybe_0, 2)
    return [
        *(f"{a} * {b} - {a} - {b} + 1 >= 0" for a, b in products),
        *(f"{a} * {a} - 3 * {a} + 2 >= 0" for a in maybe_0),
        *(f"{a} * {b} - {b} >= 0" for a in (*maybe_0, *positive) for b in positive),
    ]
