"""Checks of lengths: at once where they are concrete, under checkify where not."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from ... import _checks
from ..._typing import Array
from .checked import checked


def check_axis(axis: Any, ndim: int) -> int:
    """Return `axis` of an array of `ndim` axes, not negative."""
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"`axis` must be an integer, got {_checks.describe(axis)}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"`axis` must be one of {ndim} axes, got {axis}")
    return int(axis) % ndim


MOST_PLACES = 2**31 - 1  # of tokens and elements: their places are int32


def check_capacity(capacity: Any) -> None:
    """Raise ValueError if there are more tokens than places have numbers."""
    if isinstance(capacity, int) and capacity > MOST_PLACES:
        raise ValueError(
            "`data` must have fewer than 2**31 tokens on its ragged axis, got "
            f"{capacity}; make several batches of them"
        )


def check_padded(batch: Any, longest: Any) -> None:
    """Raise NotImplementedError if padded examples have more places than numbers."""
    known = isinstance(batch, int) and isinstance(longest, int)
    if known and batch * longest > MOST_PLACES:
        raise NotImplementedError(
            f"ragged.vmap: this needs padded examples, of which {batch} of up to "
            f"{longest} tokens have 2**31 places or more; choose a lower "
            "`max_length`, or map fewer examples at a time"
        )


def check_given(lengths: Any, name: str = "lengths") -> Any:
    """Return lengths `[batch]` as given, an array of integers of numpy or JAX."""
    lengths = _checks.check_integers(name, lengths)
    _checks.check_rank(name, lengths, "batch")
    return lengths


def check_lengths(lengths: Any, name: str = "lengths") -> Array:
    """Return lengths as int32 `[batch]`."""
    return _checks.as_int32(check_given(lengths, name))


def check_fit(lengths: Any, capacity: int, max_length: int, given: Any) -> Any:
    """Return lengths; raise ValueError where they do not fit.

    Traced ones are checked at run time, where the caller is under checkify.

    Args:
        lengths: int32 `[batch]`.
        capacity: the largest sum.
        max_length: the largest length.
        given: the same lengths before they became int32, for errors.
    """
    if not _checks.is_concrete(lengths):
        range_text = f"`lengths` must lie in 0..max_length = 0..{max_length}"
        sum_text = f"`lengths` must sum to at most the capacity, {capacity} tokens"
        return checked(
            lengths,
            {
                range_text: (lengths >= 0) & (lengths <= max_length),
                sum_text: lengths.sum() <= capacity,
            },
        )
    values = np.asarray(lengths)
    wrong = np.flatnonzero((values < 0) | (values > max_length))
    if wrong.size:
        raise ValueError(
            f"`lengths` must lie in 0..max_length = 0..{max_length}, got "
            f"{np.asarray(given)[wrong[0]]} in example {wrong[0]}"
        )
    if int(values.sum(dtype=np.int64)) > capacity:
        raise ValueError(
            f"`lengths` must sum to at most the capacity, {capacity} tokens, "
            f"got {sum(np.asarray(given).tolist())}"
        )
    return lengths


def check_known(kind: str, lengths: Any) -> np.ndarray:
    """Return concrete lengths as an array of numpy; raise TypeError for traced ones."""
    if not _checks.is_concrete(lengths):
        raise TypeError(
            f"the examples of a {kind} of traced lengths have no sizes yet; under jit "
            "use ragged.vmap, or padded arrays and a mask"
        )
    return np.asarray(lengths)


def check_index(index: Any, batch: int) -> int:
    """Return the index of one of `batch` examples, not negative."""
    try:
        if isinstance(index, bool):  # an int, to Python
            raise TypeError
        example = operator.index(index)
    except TypeError:
        raise TypeError(
            f"the index of an example must be an integer, got {_checks.describe(index)}"
        ) from None
    if not -batch <= example < batch:
        raise IndexError(f"no example {example} in a batch of {batch}")
    return example % batch


def refuse_in(kind: str) -> NoReturn:
    """Raise the TypeError of `x in batch`."""
    raise TypeError(
        f"`in` does not look into a {kind}, whose examples are arrays; "
        "any(jnp.array_equal(x, example) for example in batch) does"
    )


_KINDS = np.bool_, np.integer, np.floating, np.complexfloating
_EXACT = 2  # the first two do not round


def check_fill(fill: Any, dtype: Any) -> Array:
    """Return `fill` as a scalar of `dtype`; check that this dtype holds it.

    Integers and bools hold equal numbers alone, floats round, and keys are zeros. Of
    traced numbers the kind is checked: bools, integers, floats or complex numbers.
    """
    fill = _checks.unwrap(fill)
    _checks.check_unmasked("fill", fill)
    if not isinstance(fill, (int, float, complex)) and not (
        _checks.is_array(fill) and _kind(fill.dtype)
    ):
        raise TypeError(f"`fill` must be one number, got {_checks.describe(fill)}")
    if np.ndim(fill):
        raise ValueError(f"`fill` must be one number, got {_checks.describe(fill)}")
    kind = _kind(dtype)
    known = kind <= _EXACT and is_readable(fill)
    value = np.asarray(fill).item() if known else fill
    if not kind:
        fits = known and value == 0
    elif known:
        fits = _holds(dtype, value)
    else:
        fits = _kind(jnp.result_type(fill)) <= kind
    if not fits:
        wanted = f"a number that {dtype} holds" if kind else "0 for keys"
        got = value if known else _checks.describe(fill)
        raise ValueError(f"`fill` must be {wanted}, got {got}")
    return jnp.asarray(fill, dtype) if kind else jnp.zeros((), dtype)


def _kind(dtype: Any) -> int:
    """Return 1 for bools, 2 for integers, 3 for floats, 4 for complex, 0 for others."""
    kinds = (jnp.issubdtype(dtype, kind) for kind in _KINDS)
    return next((i for i, found in enumerate(kinds, 1) if found), 0)


def _holds(dtype: Any, value: Any) -> bool:
    """Return whether bools or integers hold a number exactly."""
    if isinstance(value, complex):
        return False
    ends = jnp.iinfo(dtype) if dtype != np.bool_ else None
    least, most = (int(ends.min), int(ends.max)) if ends else (0, 1)
    return value // 1 == value and least <= value <= most


def is_readable(x: Any) -> bool:
    """Return whether the value of `x` is known, and lies in this process."""
    return _checks.is_concrete(x) and getattr(x, "is_fully_addressable", True)


def host(lengths: Any) -> Any:
    """Return lengths as an array of numpy, or as they are where they are traced."""
    return np.asarray(lengths) if is_readable(lengths) else lengths


def require(x: Any, conditions: Mapping[str, Any]) -> Any:
    """Return `x`; raise ValueError where a condition is False.

    Traced ones are checked at run time, where the caller is under checkify.

    Args:
        x: a pytree of arrays; traced conditions are looked at where one is used.
        conditions: by what must hold, in words, a bool or an array of bools.
    """
    traced = {}
    for message, holds in conditions.items():
        if not is_readable(holds):
            traced[message] = holds
        elif not np.all(holds):
            where = np.flatnonzero(~np.asarray(holds))
            raise ValueError(
                f"{message}"
                + (f"; not so in example {where[0]}" if np.ndim(holds) else "")
            )
    return checked(x, traced) if traced else x
