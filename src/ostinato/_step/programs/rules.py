"""What primitives that compute are in a step program; see also `shape_rules`."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from . import values as shapes
from .builder import Builder
from .indexed_rows import added_rows, added_windows
from .products import dot_general
from .registry import ANY, is_integer, result_shape, rule_table
from .values import Unsupported, Value, most_of

RULES, rule = rule_table()


# ------------------------------------------------------------------ element by element

_SAME = {
    "logistic": "sigmoid", "neg": "negate", "add_any": "add", "div": "divide",
    "mul": "multiply", "sub": "subtract", "eq": "equal", "lt": "less",
    "le": "less_equal", "pow": "power", "rem": "remainder",
} | {
    name: name
    for name in (
        "abs acos acosh add asin asinh atan atan2 atanh cbrt cos cosh erf erfc exp "
        "expm1 floor is_finite log log1p max min rsqrt sign sin sinh sqrt tan tanh"
    ).split()
}  # fmt: skip
_EXACT = {"abs", "add", "add_any", "max", "min", "mul", "neg", "rem", "sign", "sub"}
"""Operations on integers whose results are integers."""
_MOST_IN_BFLOAT16 = 256
"""Up to it, bfloat16 has all integers."""
_TESTS = {"eq", "ge", "gt", "le", "lt", "ne"}


def _same(name: str, b: Builder, eqn: JaxprEqn, *given: Value, **_: Any) -> Value:
    if is_integer(eqn):
        if name == "div":
            return _divide_integers(b, eqn, *given)
        if name in ("neg", "sub") and _is_unsigned(eqn):
            raise Unsupported("it subtracts unsigned integers")
    if name == "floor":
        _refuse_bfloat16(eqn)
    if name in ("add", "add_any"):
        for one, other in (given, given[::-1]):
            if one.buffer.numbers == (0.0,) and _covers(other, eqn, b):
                return other
    if name == "add_any":
        for added_by in (added_rows, added_windows):
            if (added := added_by(b, *given)) is not None:
                return added
    result = b.elementwise(_SAME[name], *given)
    if is_integer(eqn) and name in _EXACT:
        if name == "rem" and _may_be_zero(given[1]):  # by 0, it is the dividend
            result = b.elementwise("select", given[1], result, given[0])
        result = result._replace(most=_largest(name, given))
    return result


def _refuse_bfloat16(eqn: JaxprEqn) -> None:
    """Refuse what digits decide that bfloat16 lacks, and values of a program have."""
    if type_of(eqn.invars[0]).dtype == jnp.bfloat16:
        raise Unsupported(f"`{eqn.primitive.name}` of bfloat16")


def _divide_integers(b: Builder, eqn: JaxprEqn, x: Value, y: Value) -> Value:
    """Return the quotient without its fraction, exact for the integers that we have.

    A quotient by 0 has all bits, as XLA's has.
    """
    quotient = b.elementwise("divide", x, y)
    size = b.elementwise("floor", b.elementwise("abs", quotient))
    whole = b.elementwise("multiply", b.elementwise("sign", quotient), size)
    if not _may_be_zero(y):
        return whole._replace(most=most_of(x))
    bits = jnp.iinfo(type_of(eqn.invars[0]).dtype).max if _is_unsigned(eqn) else -1
    found = b.elementwise("select", y, whole, b.constant(float(bits)))
    return found._replace(most=max(most_of(x), abs(bits)))


def _may_be_zero(value: Value) -> bool:
    return not value.buffer.numbers or 0 in value.buffer.numbers


def _is_unsigned(eqn: JaxprEqn) -> bool:
    return jnp.issubdtype(type_of(eqn.invars[0]).dtype, jnp.unsignedinteger)


def _covers(value: Value, eqn: JaxprEqn, b: Builder) -> bool:
    return value.summed or shapes.full_shape(value, b.batch) == result_shape(eqn)


def _largest(name: str, given: Sequence[Value]) -> int:
    """Return how large a result of integers may be, if numbers can stand for it."""
    sizes = [most_of(v) for v in given]
    if name in ("max", "min"):
        return max(sizes)
    if name == "sign":
        return 1
    if name == "rem":
        divisor = given[1]
        below = sizes[0] if _may_be_zero(divisor) else most_of(divisor) - 1
        return min(sizes[0], below)
    return math.prod(sizes) if name == "mul" else sum(sizes)


for _name in _SAME:
    _kinds = ANY if _name in _EXACT | _TESTS else "fi" if _name == "div" else "f"
    rule(_name, kinds=_kinds)(ft.partial(_same, _name))


@rule("gt", "ge", kinds=ANY)
def _greater(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    name = "less" if eqn.primitive.name == "gt" else "less_equal"
    return b.elementwise(name, y, x)


@rule("ne", kinds=ANY)
def _not_equal(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    return b.elementwise("subtract", b.constant(1.0), b.elementwise("equal", x, y))


@rule("not", kinds="b")
def _not(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    return b.elementwise("subtract", b.constant(1.0), x)


@rule("and", "or", "xor", kinds="b")
def _logic(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    name = eqn.primitive.name
    if name == "xor":
        return b.elementwise("subtract", b.constant(1.0), b.elementwise("equal", x, y))
    return b.elementwise("multiply" if name == "and" else "max", x, y)


@rule("square", kinds="fi")
def _square(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    power = _power_of(b, x, 2)
    return power._replace(most=most_of(x) ** 2) if is_integer(eqn) else power


@rule("integer_pow", kinds="fi")
def _integer_pow(b: Builder, eqn: JaxprEqn, x: Value, *, y: int, **_: Any) -> Value:
    if y == 0:  # of infinity and NaN, too
        return shapes.broadcast(b.constant(1.0), result_shape(eqn), (), b.batch)
    if is_integer(eqn) and y < 0:
        raise Unsupported("it has negative powers of integers")
    power = _power_of(b, x, abs(y))
    if is_integer(eqn):
        return power._replace(most=most_of(x) ** y)
    return power if y >= 0 else b.elementwise("divide", b.constant(1.0), power)


def _power_of(b: Builder, x: Value, n: int) -> Value:
    if n == 1:
        return x
    half = _power_of(b, x, n // 2)
    even = b.elementwise("multiply", half, half)
    return b.elementwise("multiply", even, x) if n % 2 else even


@rule("one_minus_square", kinds="fi")
def _one_minus_square(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    result = b.elementwise("subtract", b.constant(1.0), _power_of(b, x, 2))
    return result._replace(most=1 + most_of(x) ** 2) if is_integer(eqn) else result


@rule("polynomial")
def _polynomial(
    b: Builder, eqn: JaxprEqn, x: Value, *coefficients: Value, **_: Any
) -> Value:
    *lower, result = coefficients
    for c in reversed(lower):
        result = b.elementwise("add", b.elementwise("multiply", result, x), c)
    return result


@rule("log2")
def _log2(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    of_e = b.elementwise("log", x)
    return b.elementwise("multiply", of_e, b.constant(1 / math.log(2)))


@rule("exp2")
def _exp2(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    return b.elementwise("exp", b.elementwise("multiply", x, b.constant(math.log(2))))


@rule("round")
def _round(
    b: Builder, eqn: JaxprEqn, x: Value, *, rounding_method: Any, **_: Any
) -> Value:
    if int(rounding_method) != 1:  # to the nearest, ties to even
        raise Unsupported("it rounds ties away from zero")
    _refuse_bfloat16(eqn)
    return b.elementwise("round", x)


@rule("clamp", kinds=ANY)
def _clamp(
    b: Builder, eqn: JaxprEqn, low: Value, x: Value, high: Value, **_: Any
) -> Value:
    result = b.elementwise("min", b.elementwise("max", x, low), high)
    if x.most is None:
        return result
    return result._replace(most=max(map(most_of, (low, x, high))))


@rule("select_n", kinds=ANY)
def _select(b: Builder, eqn: JaxprEqn, which: Value, *cases: Value, **_: Any) -> Value:
    if len(cases) != 2 or type_of(eqn.invars[0]).dtype != jnp.bool_:
        raise Unsupported("it selects among several cases")
    which, first, second = b.of_one_axis([which, *cases])
    cases = first, second
    if any(v.summed for v in cases):
        raise Unsupported("it combines different sequences")
    if first == second:
        return first
    result = b.elementwise("select", which, second, first)
    if jnp.issubdtype(type_of(eqn.invars[1]).dtype, jnp.integer):
        result = result._replace(most=max(map(most_of, cases)))
    return result


@rule(
    "copy", "copy_p", "name", "stop_gradient", "optimization_barrier", "pvary",
    "reshard", "sharding_constraint", "ostinato_asked", "ostinato_once",
    "ragged_constant", kinds=ANY,
)  # fmt: skip
def _same_value(b: Builder, eqn: JaxprEqn, *given: Value, **_: Any) -> list[Value]:
    return list(given)


@rule("reduce_precision")
def _reduce_precision(
    b: Builder,
    eqn: JaxprEqn,
    x: Value,
    *,
    exponent_bits: int,
    mantissa_bits: int,
    **_: Any,
) -> Value:
    info = jnp.finfo(type_of(eqn.invars[0]).dtype)
    if (exponent_bits, mantissa_bits) != (info.nexp, info.nmant):
        raise Unsupported("it reduces the precision")
    return x


@rule("convert_element_type", kinds=ANY)
def _convert(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    old, new = type_of(eqn.invars[0]).dtype, type_of(eqn.outvars[0]).dtype
    if jnp.issubdtype(new, jnp.integer):
        if not (old == jnp.bool_ or jnp.issubdtype(old, jnp.integer)):
            raise Unsupported("it converts to integers")
        signed = jnp.issubdtype(old, jnp.signedinteger)
        if signed and jnp.issubdtype(new, jnp.unsignedinteger):
            if not x.buffer.numbers or min(x.buffer.numbers) < 0:
                raise Unsupported("it converts signed integers to unsigned ones")
        return x._replace(most=most_of(x))
    if new == jnp.bool_ and old != jnp.bool_:
        equal = b.elementwise("equal", x, b.constant(0.0))
        return b.elementwise("subtract", b.constant(1.0), equal)
    exact = old in (jnp.bfloat16, jnp.bool_) or (
        x.most is not None and x.most <= _MOST_IN_BFLOAT16
    )
    if new == jnp.bfloat16 and not exact:
        b.narrowed.add(x.buffer)
    elif jnp.issubdtype(old, jnp.integer) and not x.buffer.numbers:
        x = b.elementwise("add", x, b.constant(0.0))  # no integer is -0
    elif (old, new) == (jnp.bfloat16, jnp.float32) and x.buffer in b.narrowed:
        raise Unsupported("it rounds float32 to bfloat16 and goes on in float32")
    return x._replace(most=None)


@rule("dot_general", kinds="fb")
def _dot_general(b: Builder, eqn: JaxprEqn, *given: Value, **params: Any) -> Value:
    result = dot_general(b, eqn, *given, **params)
    if type_of(eqn.outvars[0]).dtype != jnp.bool_:
        return result
    return b.elementwise("min", result, b.constant(1.0))  # whether any is True
