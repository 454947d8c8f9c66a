"""Rounded sizes of arrays: few of them, since programs are compiled for each."""

from __future__ import annotations

from collections.abc import Callable

from ... import _checks

Size = int | Callable[[int], int] | None
"""A size, or a function of the least size that will do, such as `round_capacity`."""


def round_capacity(tokens: int, *, per_octave: int = 4) -> int:
    """Round a number of tokens up to one of a few capacities.

    A program is compiled once for every pair of a capacity and a `max_length`. Batches
    of 1 to N tokens, rounded, have about `per_octave * log2(N)` capacities, and these
    are larger than needed by at most one part in `per_octave`.

    Args:
        tokens: the number of them that is needed, 0 or more.
        per_octave: the number of capacities between one power of two and the next,
            itself a power of two.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is out of range.

    Examples:
        >>> from ostinato import ragged
        >>> list(map(ragged.round_capacity, (0, 7, 16, 17, 1000, 1025)))
        [1, 7, 16, 20, 1024, 1280]
    """
    tokens = _checks.check_size("tokens", tokens, 0)
    per_octave = _checks.check_size("per_octave", per_octave)
    if per_octave & (per_octave - 1):
        raise ValueError(f"`per_octave` must be a power of two, got {per_octave}")
    octave = 1 << max((tokens - 1).bit_length() - 1, 0)  # octave < tokens <= 2 octave
    step = max(octave // per_octave, 1)
    return max(-(-tokens // step) * step, 1)


def round_length(longest: int) -> int:
    """Round the longest length of a batch up to a power of two.

    The longest length varies more from batch to batch than the number of tokens does,
    and a program is compiled for each of its values with each capacity. Where the
    longest length of all data is known, it is the better `max_length`.

    Args:
        longest: the length needed, 0 or more.

    Raises:
        TypeError: `longest` is no integer.
        ValueError: `longest` is negative.

    Examples:
        >>> from ostinato import ragged
        >>> list(map(ragged.round_length, (0, 3, 4, 100)))
        [1, 4, 4, 128]
    """
    return round_capacity(_checks.check_size("longest", longest, 0), per_octave=1)


def chosen_size(name: str, given: Size, least: int) -> int:
    """Return the size that the caller chose; it must be at least `least`, and 1."""
    least = max(least, 1)
    if given is None:
        return least
    size = given(least) if callable(given) else given
    return _checks.check_size(name, size)
