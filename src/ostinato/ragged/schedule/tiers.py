"""The choice of tiers: groups of examples of similar length, padded each by itself.

A value with two ragged axes, such as the scores of attention within a sequence, costs
the square of the padded size. In tiers `(count, max)` the cost is the sum of
`count * max**2`: the `count` longest examples are padded to the first `max`, the next
ones to the second, and so on. Counts and sizes are static, lengths need not be. Tiers
that an integer asks for fit all lengths of the batch's capacity. If given tiers do not
fit, the whole batch is padded as one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim

from ... import _checks

Tiers = tuple[tuple[int, int], ...]

_AUTO = 4
"""The number of tiers for `"auto"`: more gain little and take time to compile."""
_BOUNDARIES = 48
"""Sources that are tried for the boundary of a tier."""


def length_tiers(lengths: Any, number: int = _AUTO, *, multiple: int = 8) -> Tiers:
    """Return tiers for batches of similar lengths, for `ragged.vmap`.

    Args:
        lengths: integers `[batch]`, the lengths of a typical batch. A batch whose
            lengths do not fit is padded as a whole, so give lengths that are rather too
            long.
        number: the largest number of tiers.
        multiple: a number that the sizes are multiples of, except the size of the
            longest example.

    Returns:
        `((count, max), ...)`, the longest examples first.

    Raises:
        TypeError: `lengths` is traced, or `number` or `multiple` is no integer.
        ValueError: `number` or `multiple` is below 1, or `lengths` are empty.

    Examples:
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


def fitting_tiers(batch: int, capacity: Any, longest: int, number: int) -> Tiers:
    """Return tiers that fit all lengths of a capacity.

    The i-th longest example has at most 1/i of the tokens.
    """
    rank = np.arange(1, batch + 1)
    capacity = _most_tokens(capacity, batch, longest)
    return _best(np.clip(capacity // rank, 1, max(longest, 1)), number)


def fit(tiers: Tiers, lengths: Any) -> bool:
    """Return whether concrete lengths fit."""
    most = np.concatenate([np.full(count, most) for count, most in tiers])
    return bool(np.all(np.sort(np.asarray(lengths))[::-1] <= most))


def always_fit(tiers: Tiers, capacity: Any, longest: int) -> bool:
    """Return whether all lengths fit that a capacity and `longest` allow."""
    first = 0
    capacity = _most_tokens(capacity, sum(count for count, _ in tiers), longest)
    for count, most in tiers:
        if most < min(longest, capacity // (first + 1)):
            return False
        first += count
    return True


def _most_tokens(capacity: Any, batch: int, longest: int) -> int:
    """Return a capacity; for a symbol of an export the most tokens of the lengths."""
    return batch * longest if is_symbolic_dim(capacity) else capacity


def _best(most: np.ndarray, number: int) -> Tiers:
    """Return the cheapest tiers if the i-th longest example has at most `most[i]`."""
    # It is best that a tier begins where the size falls; if there are many such
    # examples, some of them are tried.
    falls = np.flatnonzero(np.diff(most, prepend=most[0] + 1))
    if len(falls) > _BOUNDARIES:
        falls = falls[np.linspace(0, len(falls) - 1, _BOUNDARIES).round().astype(int)]
    ends = np.append(falls, len(most))
    # cost[i, j] is the cost of one tier from example falls[i] to example ends[j],
    # least[j] the cost of the best tiers for all examples before ends[j].
    cost = most[falls, None].astype(float) ** 2 * (ends[None] - falls[:, None])
    cost[cost <= 0] = np.inf
    least = np.where(ends == 0, 0.0, np.inf)
    begins = []
    for _ in range(min(number, len(falls))):
        through = least[:-1, None] + cost
        begins.append(np.argmin(through, axis=0))
        least = np.min(through, axis=0)
    end, tiers = len(falls), []
    for begin in reversed(begins):
        start = int(begin[end])
        tiers.append((int(ends[end] - ends[start]), int(most[falls[start]])))
        end = start
    return tuple(reversed(tiers))


def resolve(given: Any, dims: Mapping[str, Any], batch: int) -> dict[str, Tiers] | None:
    """Return for symbols of the trace their tiers, None for no tiers.

    Args:
        given: the argument `tiers` of `ragged.vmap`: None, "auto", an integer, tiers,
            or a dict of these by dim name.
        dims: the `Dim` of each name.
        batch: the number of examples.
    """
    if given is None or not dims:
        return None
    if not isinstance(given, Mapping):
        if not _are_pairs(given) and len(dims) > 1:
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
        if value is not None
    }


def _of_dim(given: Any, dim: Any, batch: int) -> Tiers:
    if _are_pairs(given):
        tiers = _check(given, batch)
    else:
        number = _AUTO if given == "auto" else _checks.check_size("tiers", given)
        tiers = fitting_tiers(batch, dim.capacity, dim.max_length, number)
    return tuple((count, most + dim.offset) for count, most in tiers)


def check_tiers(tiers: Any) -> None:
    """Check the argument `tiers` as far as it does not depend on the batch."""
    if isinstance(tiers, Mapping):
        for value in tiers.values():
            check_tiers(value)
    elif isinstance(tiers, str) and tiers != "auto":
        raise ValueError(
            "`tiers` must be 'auto', a number of tiers, or pairs (count, max), got "
            f"{tiers!r}"
        )
    elif _are_pairs(tiers):
        _check(tiers, None)
    elif tiers is not None and tiers != "auto":
        _checks.check_size("tiers", tiers)


def _are_pairs(tiers: Any) -> bool:
    """Return whether `tiers` are given themselves, not "auto" or their number."""
    return _is_sequence(tiers) and not isinstance(tiers, str)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _check(tiers: Any, batch: int | None) -> Tiers:
    checked = []
    for tier in tiers:
        if not (_is_sequence(tier) and len(tier) == 2):
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
