"""Tiers: examples sorted by length, in a few groups that are padded each by itself.

What takes two ragged axes, as attention within a sequence does, costs the square of the
padded size. In tiers `(count, max)` that is the sum of `count * max**2`: the `count`
longest examples are padded to the first `max`, the next ones to the second, and so on.
Counts and sizes are static, lengths need not be. Tiers that an integer asks for are
placed so that all lengths of the batch's capacity fit. Where given ones do not fit, one
padded run of the whole batch takes their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import _checks

Tiers = tuple[tuple[int, int], ...]

_AUTO = 4
"""Tiers that "auto" means: more gain little and take time to compile."""
_PLACES = 48
"""Sources that are tried for the boundary of a tier."""


def length_tiers(lengths: Any, number: int = _AUTO, *, multiple: int = 8) -> Tiers:
    """Tiers for batches of lengths like these, to give to `ragged.vmap`.

    Args:
        lengths: integers `[batch]`, of a typical batch. A batch whose lengths do not
            fit runs padded as a whole, so give some that are rather too long.
        number: how many tiers, at most.
        multiple: of what the sizes are, except that of the longest example.

    Returns:
        `((count, max), ...)`, the longest examples first.

    Raises:
        TypeError: `lengths` is traced, or `number` or `multiple` is no integer.
        ValueError: `number` or `multiple` is below 1, or there are no lengths.

    >>> from ostinato import ragged
    >>> ragged.length_tiers([3, 40, 5, 9, 12, 100, 7], 3)
    ((1, 100), (1, 40), (5, 16))
    """
    number = _checks.check_size("number", number)
    multiple = _checks.check_size("multiple", multiple)
    if not _checks.is_concrete(lengths):
        raise TypeError(
            "`lengths` must be concrete, got traced ones; choose tiers outside of jit"
        )
    descending = np.sort(np.asarray(lengths))[::-1]
    if descending.size == 0:
        raise ValueError("`lengths` must hold at least one length, got none")
    longest = max(int(descending[0]), 1)
    most = np.minimum(-(-descending // multiple) * multiple, longest)
    return _best(np.maximum(most, 1), number)


def fitting_tiers(batch: int, capacity: int, longest: int, number: int) -> Tiers:
    """Tiers that all lengths fit: of so many rows, the i-th example has 1/i at most."""
    place = np.arange(1, batch + 1)
    return _best(np.clip(capacity // place, 1, max(longest, 1)), number)


def fit(tiers: Tiers, lengths: Any) -> bool:
    """Whether lengths, concrete, fit."""
    most = np.concatenate([np.full(count, most) for count, most in tiers])
    return bool(np.all(np.sort(np.asarray(lengths))[::-1] <= most))


def always_fit(tiers: Tiers, capacity: int, longest: int) -> bool:
    """Whether all lengths of so many rows, each at most `longest`, fit."""
    first = 0
    for count, most in tiers:
        if most < min(longest, capacity // (first + 1)):
            return False
        first += count
    return True


def _best(most: np.ndarray, number: int) -> Tiers:
    """The cheapest tiers where the i-th longest example has at most `most[i]` steps."""
    # A tier begins best where the size falls; of many such places some will do.
    falls = np.flatnonzero(np.diff(most, prepend=most[0] + 1))
    if len(falls) > _PLACES:
        falls = falls[np.linspace(0, len(falls) - 1, _PLACES).round().astype(int)]
    places = np.append(falls, len(most))
    # cost[i, j] is that of one tier from place i to place j, least[j] that of the best
    # tiers for all before place j.
    cost = most[falls, None].astype(float) ** 2 * (places[None] - falls[:, None])
    cost[cost <= 0] = np.inf
    least = np.where(places == 0, 0.0, np.inf)
    begins = []
    for _ in range(min(number, len(falls))):
        through = least[:-1, None] + cost
        begins.append(np.argmin(through, axis=0))
        least = np.min(through, axis=0)
    end, tiers = len(falls), []
    for begin in reversed(begins):
        start = int(begin[end])
        tiers.append((int(places[end] - places[start]), int(most[falls[start]])))
        end = start
    return tuple(reversed(tiers))


def resolve(given: Any, dims: Mapping[str, Any], batch: int) -> dict[str, Tiers] | None:
    """The argument `tiers` of `ragged.vmap`: for symbols of the trace their tiers.

    Args:
        given: None, "auto", an integer, tiers, or a dict of such by dim name.
        dims: the `Dim` of each name.
        batch: the number of examples.
    """
    if given is None or not dims:
        return None
    if not isinstance(given, Mapping):
        if isinstance(given, (str, int)) and len(dims) > 1:
            given = dict.fromkeys(dims, given)
        elif len(dims) > 1:
            raise ValueError(
                "`tiers` must be a dict, from dim names to tiers, where there are "
                f"several; the arguments have {', '.join(map(repr, dims))}"
            )
        else:
            given = {next(iter(dims)): given}
    unknown = [name for name in given if name not in dims]
    if unknown:
        raise ValueError(
            f"`tiers` names {unknown[0]!r}, which is no dim of the arguments; they "
            f"have {', '.join(map(repr, dims))}"
        )
    return {
        dims[name].symbol: _of_dim(value, dims[name], batch)
        for name, value in given.items()
    }


def _of_dim(given: Any, dim: Any, batch: int) -> Tiers:
    if given == "auto":
        given = _AUTO
    if isinstance(given, int):
        number = _checks.check_size("tiers", given)
        tiers = fitting_tiers(batch, dim.capacity, dim.max_length, number)
    else:
        tiers = _check(given, batch)
    return tuple((count, most + dim.offset) for count, most in tiers)


def check_tiers(tiers: Any) -> None:
    """What can be checked before the arguments are there."""
    if isinstance(tiers, Mapping):
        for value in tiers.values():
            check_tiers(value)
    elif isinstance(tiers, str) and tiers != "auto":
        _checks.check_choice("tiers", tiers, ("auto",))
    elif isinstance(tiers, Sequence) and not isinstance(tiers, str):
        _check(tiers, None)
    elif tiers is not None and tiers != "auto":
        _checks.check_size("tiers", tiers)


def _check(tiers: Any, batch: int | None) -> Tiers:
    checked = []
    for tier in tiers:
        if not (isinstance(tier, Sequence) and len(tier) == 2):
            raise TypeError(
                f"`tiers` must hold pairs (count, max), got {_checks.describe(tier)}"
            )
        count, most = tier
        checked.append(
            (_checks.check_size("tiers", count), _checks.check_size("tiers", most))
        )
    sizes = [most for _, most in checked]
    if sizes != sorted(sizes, reverse=True):
        raise ValueError(
            f"`tiers` must begin with the longest examples, got sizes {sizes}"
        )
    count = sum(count for count, _ in checked)
    if batch is not None and count != batch:
        raise ValueError(
            f"`tiers` must have as many examples as the batch, {batch}, got {count}"
        )
    return tuple(checked)
