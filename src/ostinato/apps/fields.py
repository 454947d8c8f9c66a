"""Checks of values from outside, such as those of a file, against declared types."""

import dataclasses
import math
from reprlib import repr as short
from types import GenericAlias, NoneType
from typing import Any, get_args, get_origin, get_type_hints

from .errors import UserError

MOST_INT = 2**63  # more is in no honest file


def check_types(record: Any) -> None:
    """Check the fields of a dataclass or NamedTuple against their declared types.

    An integer counts as a float, a float must be finite, and a bool is not a number.

    Raises:
        UserError: a field has another type; the message names it.
    """
    for name, kind in get_type_hints(type(record)).items():
        if name in _names(record):
            check(name, kind, getattr(record, name))


def check(name: str, kind: Any, value: object) -> None:
    """Check a value against a class, a union of classes, ``tuple[X, ...]`` or Any.

    Raises:
        UserError: the value is of another type.
    """
    if kind is Any:
        return
    single = isinstance(kind, type | GenericAlias)
    kinds = (kind,) if single else get_args(kind)
    if not any(_is(value, one) for one in kinds):
        wanted = " or ".join(_WORDS.get(one, str(one)) for one in kinds)
        if type(value) is int and int in kinds:
            wanted = "an integer of 64 bits"
        raise UserError(f"`{name}` must be {wanted}, got {short(value)}")


def check_range(name: str, wanted: str, got: object, good: bool) -> None:
    """Raise a UserError that says what was wanted, unless `good`."""
    if not good:
        raise UserError(f"`{name}` must be {wanted}, got {short(got)}")


def make(kind: Any, values: Any) -> Any:
    """Make a dataclass or NamedTuple from a mapping or a sequence, and check its types.

    Raises:
        UserError: a field is missing, unknown, or of another type.
    """
    try:
        made = kind(**values) if isinstance(values, dict) else kind(*values)
    except TypeError:
        wanted = ", ".join(_names(kind))
        got = short(values)
        raise UserError(f"`{kind.__name__}` must have {wanted}, got {got}") from None
    check_types(made)
    return made


_WORDS = {
    NoneType: "none",
    bool: "true or false",
    dict: "a mapping",
    float: "a finite number",
    int: "an integer",
    list: "a list",
    str: "a text",
    tuple[int, ...]: "integers",
    tuple[str, ...]: "texts",
}


def _names(record: Any) -> list[str]:
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    return list(record._fields)


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        (one, _) = get_args(kind)
        return type(value) is tuple and all(_is(each, one) for each in value)
    if kind is int:
        return type(value) is int and abs(value) < MOST_INT
    if kind is float:
        return type(value) in (int, float) and _finite(value)
    return type(value) is (get_origin(kind) or kind)


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
