"""The operations that kernels have, element by element, as text of C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..programs.values import Unsupported

TYPES = {
    "float32": "float",
    "bfloat16": "float",
    "float64": "double",
    "int32": "int",
    "uint32": "unsigned",
    "bool": "bool",
}
"""What a thread computes in, by dtype."""

STORED = {"bfloat16": "BFloat16", "bool": "unsigned char"}
"""What arrays hold, where it is not the same."""

SUMS = {"float32": "float", "bfloat16": "float", "float64": "double"}
"""What gradients are added up in, by dtype."""


def type_of(dtype: Any) -> str:
    """Return what a thread computes values of a dtype in.

    Raises:
        Unsupported: kernels do not have the dtype.
    """
    name = np.dtype(dtype).name
    if name not in TYPES:
        raise Unsupported(f"it has values of {name}")
    return TYPES[name]


def stored_type(dtype: Any) -> str:
    """Return what arrays of a dtype hold."""
    return STORED.get(np.dtype(dtype).name, type_of(dtype))


def literal(value: Any, dtype: Any) -> str:
    """Return a number in C++."""
    kind = type_of(dtype)
    if kind in ("float", "double"):
        number = float(np.asarray(value).astype(dtype))
        if np.isnan(number):
            return f"{kind}(AsFloat(0x7fc00000u))"
        if np.isinf(number):
            bits = "0xff800000u" if number < 0 else "0x7f800000u"
            return f"{kind}(AsFloat({bits}))"
        return f"{kind}({number.hex()})"
    if kind == "bool":
        return "true" if value else "false"
    return f"{kind}({int(value)}u)" if kind == "unsigned" else f"{kind}({int(value)}LL)"


def rounded(name: str, dtype: Any) -> str:
    """Return a result as its dtype holds it."""
    return f"Rounded({name})" if np.dtype(dtype).name == "bfloat16" else name


def expression(
    name: str, params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str | None:
    """Return the result of an operation in C++, None if kernels do not have it.

    Args:
        name: of JAX's primitive.
        params: of its equation.
        dtypes: of its operands and, at last, of the result.
        given: its operands.
    """
    if name in IDENTITIES:
        return given[0]
    if name in SPECIAL:
        return SPECIAL[name](params, dtypes, given)
    floats = jnp.issubdtype(dtypes[0], jnp.floating)
    if name in _FUNCTIONS and (floats or name in _OF_ALL_NUMBERS):
        return f"{_FUNCTIONS[name]}({', '.join(given)})"
    if name in _OPERATORS and (floats or name not in _FLOATS_ALONE):
        return f"({given[0]} {_OPERATORS[name]} {given[1]})"
    if name in _COMPARISONS:
        return f"({given[0]} {_COMPARISONS[name]} {given[1]})"
    if name in ("and", "or", "xor"):
        symbol = {"and": "&", "or": "|", "xor": "^"}[name]
        return f"{type_of(dtypes[-1])}({given[0]} {symbol} {given[1]})"
    return None


IDENTITIES = frozenset({"copy", "copy_p", "name", "pvary", "stop_gradient"})
"""Operations that return their operand."""

_FUNCTIONS = {
    name: "".join(part.capitalize() for part in name.split("_"))
    for name in (
        "abs acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh erf erfc exp "
        "expm1 floor is_finite log log1p logistic max min pow rem rsqrt sign sin sinh "
        "sqrt tan tanh"
    ).split()
} | {"exp2": "PowerOf2"}
"""Of one or more floats; _cuda/text/step.h has them."""
_OF_ALL_NUMBERS = frozenset({"max", "min"})

_OPERATORS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/"}
_FLOATS_ALONE = frozenset({"div"})
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _convert(
    params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str:
    old, new = map(type_of, (dtypes[0], dtypes[-1]))
    if new == "bool":
        return f"({given[0]} != {old}(0))"
    return f"{new}({given[0]})"


def _power(params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]) -> str:
    exponent, kind = params["y"], type_of(dtypes[-1])
    if abs(exponent) > _MOST_FACTORS:
        return f"Pow({given[0]}, {kind}({exponent}))"
    product = " * ".join([given[0]] * abs(exponent)) or f"{kind}(1)"
    return f"({product})" if exponent >= 0 else f"({kind}(1) / ({product}))"


_MOST_FACTORS = 8


def _reduced(
    params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str:
    bits = params["exponent_bits"], params["mantissa_bits"]
    info = jnp.finfo(dtypes[0])
    if bits == (info.nexp, info.nmant):
        return given[0]
    if bits == (8, 7) and np.dtype(dtypes[0]) == np.float32:
        return f"Rounded({given[0]})"
    raise Unsupported("it reduces the precision of values")


def _round(params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]) -> str:
    even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return f"{'RoundEven' if even else 'RoundAway'}({given[0]})"


def _select(params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]) -> str:
    which, *cases = given
    found = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        found = f"({which} == {type_of(dtypes[0])}({i}) ? {cases[i]} : {found})"
    return found


SPECIAL: dict[str, Callable[[dict[str, Any], Sequence[Any], Sequence[str]], str]] = {
    "clamp": lambda p, d, given: f"Min(Max({given[1]}, {given[0]}), {given[2]})",
    "convert_element_type": _convert,
    "integer_pow": _power,
    "neg": lambda p, d, given: f"(-{given[0]})",
    "not": lambda p, d, given: (
        f"(!{given[0]})" if np.dtype(d[0]) == np.bool_ else f"(~{given[0]})"
    ),
    "reduce_precision": _reduced,
    "round": _round,
    "select_n": _select,
    "square": lambda p, d, given: f"({given[0]} * {given[0]})",
}
"""Operations that are no call of a function; see `expression` for the arguments."""
