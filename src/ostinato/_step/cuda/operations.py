"""The operations that kernels have, element by element, as text of C++."""

from __future__ import annotations

import math
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
    kind = type_of(dtypes[0])
    floats = jnp.issubdtype(dtypes[0], jnp.floating)
    if name in _FUNCTIONS and (floats or name in _OF_ALL_NUMBERS):
        return f"{_FUNCTIONS[name]}({', '.join(given)})"
    if name in _OPERATORS and floats:
        return f"({given[0]} {_OPERATORS[name]} {given[1]})"
    if name in _OPERATORS and name != "div" and kind != "bool":  # modulo 2^32
        return f"{kind}(unsigned({given[0]}) {_OPERATORS[name]} unsigned({given[1]}))"
    if name in _COMPARISONS:
        return f"({given[0]} {_COMPARISONS[name]} {given[1]})"
    if name in _OF_BITS:
        return f"{type_of(dtypes[-1])}({given[0]} {_OF_BITS[name]} {given[1]})"
    return None


IDENTITIES = frozenset(
    "copy copy_p name ostinato_asked ostinato_once pvary stop_gradient".split()
)
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
_OF_ALL_NUMBERS = frozenset({"max", "min", "rem"})

_OPERATORS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/"}
_OF_BITS = {"and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _convert(
    params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str:
    old, new = map(type_of, (dtypes[0], dtypes[-1]))
    if new == "bool":
        return f"({given[0]} != {old}(0))"
    if old in ("float", "double") and new in ("int", "unsigned"):
        return f"{'ToInt' if new == 'int' else 'ToUnsigned'}({given[0]})"
    return f"{new}({given[0]})"


def _power(params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]) -> str:
    exponent, kind = params["y"], type_of(dtypes[-1])
    floats = kind in ("float", "double")
    if abs(exponent) > (_MOST_FACTORS if floats else _MOST_INTEGER_FACTORS):
        if not floats:
            raise Unsupported("a large power of integers")
        return f"Pow({given[0]}, {kind}({exponent}))"
    if not floats:
        factors = " * ".join([f"unsigned({given[0]})"] * exponent) or "1u"
        return f"{kind}({factors})"
    product = " * ".join([given[0]] * abs(exponent)) or f"{kind}(1)"
    return f"({product})" if exponent >= 0 else f"({kind}(1) / ({product}))"


_MOST_FACTORS, _MOST_INTEGER_FACTORS = 8, 32


def _reduced(
    params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str:
    bits = params["exponent_bits"], params["mantissa_bits"]
    if bits == (8, 7) and np.dtype(dtypes[0]).name in ("float32", "bfloat16"):
        return f"Rounded({given[0]})"
    info = jnp.finfo(dtypes[0])
    if bits == (info.nexp, info.nmant):
        return given[0]
    raise Unsupported("it reduces the precision of values")


def _polynomial(
    params: dict[str, Any], dtypes: Sequence[Any], given: Sequence[str]
) -> str:
    x, *lower, result = given
    for coefficient in reversed(lower):
        result = f"({result} * {x} + {coefficient})"
    return result


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
    "log2": lambda p, d, given: f"(Log({given[0]}) * {literal(1 / math.log(2), d[0])})",
    "neg": lambda p, d, given: (
        f"(-{given[0]})"
        if jnp.issubdtype(d[0], jnp.floating)
        else f"{type_of(d[0])}(0u - unsigned({given[0]}))"
    ),
    "not": lambda p, d, given: (
        f"(!{given[0]})" if np.dtype(d[0]) == np.bool_ else f"(~{given[0]})"
    ),
    "one_minus_square": lambda p, d, given: (
        f"({type_of(d[0])}(1) - {given[0]} * {given[0]})"
    ),
    "polynomial": _polynomial,
    "reduce_precision": _reduced,
    "round": _round,
    "select_n": _select,
    "square": lambda p, d, given: _power({"y": 2}, d, given),
}
"""Operations that are no call of a function; see `expression` for the arguments."""

NAMES = frozenset(
    {*IDENTITIES, *_FUNCTIONS, *_OPERATORS, *_COMPARISONS, *_OF_BITS, *SPECIAL}
)
"""All operations that compute each element by itself."""
