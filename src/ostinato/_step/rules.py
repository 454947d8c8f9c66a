"""What each primitive of JAX is in a step program."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from . import values as shapes
from .builder import Builder
from .products import dot_general
from .values import Unsupported, Value

Rule = Callable[..., Value | list[Value]]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _is_integer(eqn: JaxprEqn) -> bool:
    return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape


# ------------------------------------------------------------------ element by element

_SAME = {
    "abs": "abs", "exp": "exp", "expm1": "expm1", "floor": "floor",
    "is_finite": "is_finite", "log": "log", "log1p": "log1p", "logistic": "sigmoid",
    "neg": "negate", "rsqrt": "rsqrt", "sign": "sign", "sqrt": "sqrt", "tanh": "tanh",
    "add": "add", "add_any": "add", "div": "divide", "max": "max", "min": "min",
    "mul": "multiply", "sub": "subtract", "eq": "equal", "lt": "less",
    "le": "less_equal",
}  # fmt: skip
_EXACT = {"abs", "add", "add_any", "max", "min", "mul", "neg", "sub"}
"""Operations on integers whose results are integers."""
_TESTS = {"eq", "ge", "gt", "le", "lt", "ne"}


def _same(name: str, b: Builder, eqn: JaxprEqn, *given: Value, **_: Any) -> Value:
    if _is_integer(eqn) and name not in _EXACT | _TESTS:
        raise Unsupported("it has integers")
    if name in ("add", "add_any"):
        for one, other in (given, given[::-1]):
            if one.buffer.numbers == (0.0,) and _covers(other, eqn, b):
                return other
    result = b.elementwise(_SAME[name], *given)
    if _is_integer(eqn) and name in _EXACT:
        result = result._replace(most=_largest(name, given))
    return result


def _covers(value: Value, eqn: JaxprEqn, b: Builder) -> bool:
    return value.summed or shapes.full_shape(value, b.batch) == _shape(eqn)


def _largest(name: str, given: Sequence[Value]) -> int:
    """Return how large a result of integers may be, if numbers can stand for it."""
    sizes = [most_of(v) for v in given]
    most = math.prod(sizes) if name == "mul" else sum(sizes)
    if most > 2**24:
        raise Unsupported("it has integers that may be larger than 2^24")
    return most


def most_of(value: Value) -> int:
    """Return the largest absolute value of an integer, or of a truth value."""
    if value.buffer.numbers:
        return int(max(map(abs, value.buffer.numbers)))
    return 1 if value.most is None else value.most


for _name in _SAME:
    RULES[_name] = ft.partial(_same, _name)


@_rule("gt", "ge")
def _greater(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    name = "less" if eqn.primitive.name == "gt" else "less_equal"
    return b.elementwise(name, y, x)


@_rule("ne")
def _not_equal(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    return b.elementwise("subtract", b.constant(1.0), b.elementwise("equal", x, y))


@_rule("not")
def _not(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    _only_truth(eqn)
    return b.elementwise("subtract", b.constant(1.0), x)


@_rule("and", "or", "xor")
def _logic(b: Builder, eqn: JaxprEqn, x: Value, y: Value, **_: Any) -> Value:
    _only_truth(eqn)
    name = eqn.primitive.name
    if name == "xor":
        return _not_equal(b, eqn, x, y)
    return b.elementwise("multiply" if name == "and" else "max", x, y)


def _only_truth(eqn: JaxprEqn) -> None:
    if eqn.invars[0].aval.dtype != jnp.bool_:
        raise Unsupported("it has bits of integers")


@_rule("square")
def _square(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    return _power_of(b, x, 2)


@_rule("integer_pow")
def _integer_pow(b: Builder, eqn: JaxprEqn, x: Value, *, y: int, **_: Any) -> Value:
    if _is_integer(eqn):
        raise Unsupported("it has integers")
    power = _power_of(b, x, abs(y))
    return power if y >= 0 else b.elementwise("divide", b.constant(1.0), power)


def _power_of(b: Builder, x: Value, n: int) -> Value:
    if n == 0:
        return b.elementwise(
            "add", b.elementwise("multiply", x, b.constant(0.0)), b.constant(1.0)
        )
    if n == 1:
        return x
    half = _power_of(b, x, n // 2)
    even = b.elementwise("multiply", half, half)
    return b.elementwise("multiply", even, x) if n % 2 else even


@_rule("exp2")
def _exp2(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    return b.elementwise("exp", b.elementwise("multiply", x, b.constant(math.log(2))))


@_rule("round")
def _round(
    b: Builder, eqn: JaxprEqn, x: Value, *, rounding_method: Any, **_: Any
) -> Value:
    if int(rounding_method) != 1:  # to the nearest, ties to even
        raise Unsupported("it rounds ties away from zero")
    return b.elementwise("round", x)


@_rule("clamp")
def _clamp(
    b: Builder, eqn: JaxprEqn, low: Value, x: Value, high: Value, **_: Any
) -> Value:
    result = b.elementwise("min", b.elementwise("max", x, low), high)
    return result._replace(most=x.most)


@_rule("select_n")
def _select(b: Builder, eqn: JaxprEqn, which: Value, *cases: Value, **_: Any) -> Value:
    if len(cases) != 2 or eqn.invars[0].aval.dtype != jnp.bool_:
        raise Unsupported("it selects among several cases")
    if any(v.summed for v in cases):
        raise Unsupported("it combines different sequences")
    result = b.elementwise("select", which, cases[1], cases[0])
    if jnp.issubdtype(eqn.invars[1].aval.dtype, jnp.integer):
        result = result._replace(most=max(map(most_of, cases)))
    return result


@_rule("copy", "copy_p", "name", "stop_gradient", "optimization_barrier", "pvary")
def _same_value(b: Builder, eqn: JaxprEqn, *given: Value, **_: Any) -> list[Value]:
    return list(given)


@_rule("reduce_precision")
def _reduce_precision(
    b: Builder,
    eqn: JaxprEqn,
    x: Value,
    *,
    exponent_bits: int,
    mantissa_bits: int,
    **_: Any,
) -> Value:
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    if (exponent_bits, mantissa_bits) != (info.nexp, info.nmant):
        raise Unsupported("it reduces the precision")
    return x


@_rule("convert_element_type")
def _convert(b: Builder, eqn: JaxprEqn, x: Value, **_: Any) -> Value:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if jnp.issubdtype(new, jnp.integer):
        if not (old == jnp.bool_ or jnp.issubdtype(old, jnp.integer)):
            raise Unsupported("it converts to integers")
        return x._replace(most=most_of(x))
    if new == jnp.bool_ and old != jnp.bool_:
        equal = b.elementwise("equal", x, b.constant(0.0))
        return b.elementwise("subtract", b.constant(1.0), equal)
    return x._replace(most=None)


# ----------------------------------------------------------------------------- shapes


@_rule("broadcast_in_dim")
def _broadcast(
    b: Builder,
    eqn: JaxprEqn,
    x: Value,
    *,
    shape: Any,
    broadcast_dimensions: Any,
    **_: Any,
) -> Value:
    if x.summed:
        if len(broadcast_dimensions) != len(shape) and math.prod(shape) != x.size:
            raise Unsupported("it combines different sequences")
        return _reshape_to(b, x, tuple(shape))
    return shapes.broadcast(x, shape, broadcast_dimensions, b.batch)


@_rule("reshape")
def _reshape(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any = None, **_: Any):
    if dimensions is not None:
        raise Unsupported("it reshapes in another order")
    return _reshape_to(b, x, _shape(eqn))


def _reshape_to(b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
    axis = None
    if x.axis is not None:
        try:
            axis = shapes.axis_after_reshape(x, shape, b.batch)
        except Unsupported:
            if b.batch != 1 or x.axis != 0:
                raise
            x = x._replace(axis=None, summed=True)  # of one sequence
    features = tuple(n for i, n in enumerate(shape) if i != axis)
    if not x.is_contiguous():
        x = b.elementwise("copy", x)
    return x._replace(shape=features, strides=shapes.row_major(features), axis=axis)


@_rule("squeeze")
def _squeeze(
    b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any
) -> Value:
    if x.axis in dimensions and b.batch == 1:
        return _reshape_to(b, x, _shape(eqn))
    return shapes.drop_axes(x, dimensions)


@_rule("expand_dims")
def _expand(b: Builder, eqn: JaxprEqn, x: Value, *, dimensions: Any, **_: Any) -> Value:
    return shapes.insert_axes(x, dimensions, len(_shape(eqn)))


@_rule("transpose")
def _transpose(
    b: Builder, eqn: JaxprEqn, x: Value, *, permutation: Any, **_: Any
) -> Value:
    if x.summed:
        turned = x._replace(summed=False)
        return shapes.transpose(turned, permutation, b.batch)._replace(summed=True)
    return shapes.transpose(x, permutation, b.batch)


@_rule("slice")
def _slice(
    b: Builder, eqn: JaxprEqn, x: Value, *, start_indices: Any, strides: Any, **_: Any
) -> Value:
    if strides is not None and any(s != 1 for s in strides):
        raise Unsupported("it slices with steps")
    return shapes.take(x, start_indices, _shape(eqn), b.batch)


@_rule("split")
def _split(
    b: Builder, eqn: JaxprEqn, x: Value, *, sizes: Any, axis: int, **_: Any
) -> list[Value]:
    start = [0] * len(eqn.invars[0].aval.shape)
    parts = []
    for size, out in zip(sizes, eqn.outvars, strict=True):
        parts.append(shapes.take(x, start, out.aval.shape, b.batch))
        start[axis] += size
    return parts


@_rule("concatenate")
def _concatenate(
    b: Builder, eqn: JaxprEqn, *given: Value, dimension: int, **_: Any
) -> Value:
    return _join(b, given, dimension, _shape(eqn))


def _join(
    b: Builder, given: Sequence[Value], dimension: int, shape: tuple[int, ...]
) -> Value:
    if any(v.summed for v in given):
        raise Unsupported("it combines different sequences")
    axes = {v.axis for v in given if v.axis is not None}
    axis = next(iter(axes), None)
    if len(axes) > 1 or axis == dimension:
        raise Unsupported("it joins the axis of sequences")
    if axis is not None:
        given = [b.as_rows(v, axis) for v in given]
    where = dimension - (axis is not None and dimension > axis)
    result = b.local([n for i, n in enumerate(shape) if i != axis], axis)
    at = 0
    for value in given:
        part = result._replace(
            offset=at * result.strides[where],
            shape=(
                *result.shape[:where],
                value.shape[where],
                *result.shape[where + 1 :],
            ),
        )
        b.write("copy", part, value)
        at += value.shape[where]
    return result


@_rule("pad")
def _pad(
    b: Builder, eqn: JaxprEqn, x: Value, value: Value, *, padding_config: Any, **_: Any
):
    if any(low < 0 or high < 0 or inside for low, high, inside in padding_config):
        raise Unsupported("it cuts, or pads between elements")
    shape = list(shapes.full_shape(x, b.batch))
    for axis, (low, high, _) in enumerate(padding_config):
        for size, first in ((low, True), (high, False)):
            if size:
                sides = [*shape[:axis], size, *shape[axis + 1 :]]
                side = shapes.broadcast(value, sides, (), b.batch)
                shape[axis] += size
                parts = [side, x] if first else [x, side]
                x = _join(b, parts, axis, tuple(shape))
    return x


@_rule("iota")
def _iota(b: Builder, eqn: JaxprEqn, *, dimension: int, shape: Any, **_: Any) -> Value:
    if shape[dimension] > 2**16:
        raise Unsupported("it counts beyond 2^16")
    numbers = b.constant(*map(float, range(shape[dimension])))
    if not numbers.shape:
        numbers = numbers._replace(shape=(1,), strides=(1,))
    wide = shapes.broadcast(numbers, shape, (dimension,), b.batch)
    return wide._replace(most=shape[dimension])


# ------------------------------------------------------------- reductions and products


@_rule("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
def _reduce(b: Builder, eqn: JaxprEqn, x: Value, *, axes: Any, **_: Any) -> Value:
    name = eqn.primitive.name
    if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer):
        raise Unsupported("it has integers")
    if x.summed:
        if name != "reduce_sum":
            raise Unsupported("it combines different sequences")
        rows = x._replace(summed=False, axis=0)
        inner = _reduce_features(b, "sum", rows, list(axes))
        return inner._replace(summed=True, axis=None)
    features = [a - (x.axis is not None and a > x.axis) for a in axes if a != x.axis]
    if x.axis in axes:
        if name != "reduce_sum":
            raise Unsupported("it combines different sequences")
        x = _reduce_features(b, "sum", x, features)
        return x._replace(axis=None, summed=True)
    if name in ("reduce_min", "reduce_and"):
        negated = b.elementwise("negate", x)
        return b.elementwise("negate", _reduce_features(b, "max", negated, features))
    operation = "sum" if name == "reduce_sum" else "max"
    return _reduce_features(b, operation, x, features)


def _reduce_features(b: Builder, name: str, x: Value, axes: Sequence[int]) -> Value:
    if not axes:
        return x
    axis = x.axis
    result = b.reduce(name, x, axes)
    if axis is None:
        return result
    return result._replace(axis=axis - sum(a < axis for a in axes))


RULES["dot_general"] = dot_general


def number(value: Any) -> float | None:
    """Return the number of a literal, or None if it is an array."""
    array = np.asarray(value)
    return float(array) if array.size == 1 else None
