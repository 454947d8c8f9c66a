"""Symbolic sizes: the only place that evaluates them.

While a program is traced, the size of a ragged axis is a symbol, `n`, and sizes made
from it are expressions, such as `n - 1`. JAX prints them in the grammar of
`jax.export.symbolic_shape`, which is all that this module relies on.
"""

from __future__ import annotations

import ast
import functools as ft
import keyword
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import jaxprs_in_params

_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


class Range(NamedTuple):
    """The values from `low` to `high`; arithmetic gives the range of the result."""

    low: int
    high: int

    @classmethod
    def of(cls, *values: int) -> Range:
        """Return the smallest range that holds `values`."""
        return cls(min(values), max(values))

    def combine(self, other: Range, function: Callable[[int, int], int]) -> Range:
        """Return the range of a function that is monotone in each argument."""
        return Range.of(*(function(a, b) for a in self for b in other))


# One function for each operation of the grammar, on integers, arrays and ranges.


def _on_ranges(on_values: Callable, on_range: Callable) -> Callable:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Range) or isinstance(b, Range):
            a = a if isinstance(a, Range) else Range(a, a)
            b = b if isinstance(b, Range) else Range(b, b)
            return on_range(a, b)
        return on_values(a, b)

    return apply


def _monotone(function: Callable) -> Callable:
    return lambda a, b: a.combine(b, function)


def _array_module(*values: Any) -> Any:
    return jnp if any(isinstance(v, jax.Array) for v in values) else np


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)  # stays an int, of no dtype
    if is_symbolic_dim(a) or is_symbolic_dim(b):
        return jax.core.max_dim(a, b)
    return _array_module(a, b).maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if is_symbolic_dim(a) or is_symbolic_dim(b):
        return jax.core.min_dim(a, b)
    return _array_module(a, b).minimum(a, b)


def _nonzero(divisor: Any) -> Any:
    """Return a divisor, 1 where it is 0, as it may be for an empty example."""
    if isinstance(divisor, int):
        return divisor or 1
    if is_symbolic_dim(divisor):
        return divisor
    return _array_module(divisor).where(divisor == 0, 1, divisor)


def _divide(a: Any, b: Any) -> Any:
    return a // _nonzero(b)


def _remainder(a: Any, b: Any) -> Any:
    return a % _nonzero(b)


def _quotients(a: Range, b: Range) -> Range:
    """Return the range of a quotient: the extremes are those of extreme divisors."""
    extreme = [d for d in (-1, 1) if b.low <= d <= b.high]
    return Range.of(*(n // _nonzero(d) for n in a for d in (*b, *extreme)))


_add = _on_ranges(operator.add, _monotone(operator.add))
_subtract = _on_ranges(operator.sub, _monotone(operator.sub))
_multiply = _on_ranges(operator.mul, _monotone(operator.mul))
_FUNCTIONS = {
    "max": _on_ranges(_larger, _monotone(max)),
    "min": _on_ranges(_smaller, _monotone(min)),
    "floordiv": _on_ranges(_divide, _quotients),
    "mod": _on_ranges(
        _remainder, lambda a, b: Range(min(b.low + 1, 0), max(b.high - 1, 0))
    ),
}
_OPERATORS = {ast.Add: _add, ast.Sub: _subtract, ast.Mult: _multiply}


@ft.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    return ast.parse(text.strip().replace("^", "**"), mode="eval").body


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    run = ft.partial(_evaluate, values=values)
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _subtract(0, run(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return ft.reduce(_multiply, [run(left)] * power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](run(left), run(right))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return ft.reduce(_FUNCTIONS[name], map(run, args))
    raise NotImplementedError(f"ragged: cannot evaluate the size {ast.unparse(node)!r}")


# ----------------------------------------------------------------------- public names


def is_symbolic(dim: Any) -> bool:
    """Return whether `dim` is a size that depends on the example."""
    return is_symbolic_dim(dim)


def symbolic_axes(shape: Any) -> list[int]:
    """Return the axes of `shape` whose size depends on the example."""
    return [axis for axis, dim in enumerate(shape) if is_symbolic_dim(dim)]


def symbol_names(dim: Any) -> list[str]:
    """Return the names that `dim` is made from, in alphabetic order."""
    nodes = list(ast.walk(_parse(str(dim))))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = (n for n in nodes if isinstance(n, ast.Name) and id(n) not in called)
    return sorted({name.id for name in names})


def evaluate(dim: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of `dim`.

    Args:
        dim: the size.
        values: for each symbol an integer, or an array of one integer per example.
    """
    return _evaluate(_parse(str(dim)), values)


def holds(constraint: str, values: Mapping[str, Any]) -> Any:
    """Return whether a constraint such as ``"n >= 4"`` holds, one bool per example.

    Raises:
        ValueError: `constraint` has none of the forms `a >= b`, `a <= b`, `a == b`.
    """
    left, compare, right = _sides(constraint, values)
    return _COMPARE[compare](left, right)


def constraint_for_jax(constraint: str, values: Mapping[str, Any]) -> str:
    """Return a constraint as JAX takes it, with symbolic sizes for the names in it.

    JAX's grammar has no parentheses, and wants no constant left of `==`.
    """
    left, compare, right = _sides(constraint, values)
    if compare == "==" and not is_symbolic_dim(left):
        left, right = right, left
    if compare == "==" and is_symbolic_dim(left):
        constant = 0
        for sign, node in _summands(_parse(str(left)), "+"):
            match node:
                case ast.Constant(value=int(value)):
                    constant += value if sign == "+" else -value
        left, right = left - constant, right - constant
    return f"{left} {compare} {right}"


def _sides(constraint: str, values: Mapping[str, Any]) -> tuple[Any, str, Any]:
    if not isinstance(constraint, str):
        raise TypeError(f"`constraints` must hold strings, got {constraint!r}")
    parts = re.split(r"(>=|<=|==)", constraint)
    if len(parts) != 3:
        raise ValueError(
            "`constraints` must hold comparisons with >=, <= or ==, such as "
            f"'n >= 4', got {constraint!r}"
        )
    left, compare, right = parts
    try:
        names = symbol_names(left) + symbol_names(right)
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ValueError(
                f"`constraints` names {unknown[0]!r}, which is no dim of the "
                f"arguments; they have {', '.join(map(repr, values))}"
            )
        return evaluate(left, values), compare, evaluate(right, values)
    except (NotImplementedError, SyntaxError) as error:
        raise ValueError(
            "`constraints` must compare whole numbers and the names of dims, which "
            f"are those of variables in them, such as 'n >= 4', got {constraint!r}"
        ) from error


def is_symbol(name: str) -> bool:
    """Return whether JAX takes a dim's name for that of a size."""
    return (
        name.isidentifier()
        and not keyword.iskeyword(name)
        and name not in _FUNCTIONS
        and unicodedata.normalize("NFKC", name) == name  # as Python's parser does
    )


def is_derived(name: str) -> bool:
    """Return whether a dim's name is made of others, as the name of a result may be."""
    try:
        names = symbol_names(name)
        evaluate(name, dict.fromkeys(names, 1))
    except (SyntaxError, NotImplementedError):
        return False
    return bool(names) and names != [name]


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return `text` with every size that is a key of `names` replaced."""
    sizes = r"\b[A-Za-z_]\w*\b(?!\s*\()"  # not the names of functions
    return re.sub(sizes, lambda m: names.get(m[0], m[0]), text)


def largest(dim: Any, ranges: Mapping[str, Range]) -> int:
    """Return an upper bound of `dim`, at least 0; exact if one symbol occurs."""
    return max(sum(_bound(term, ranges).high for term in _terms(dim)), 0)


def smallest(dim: Any, ranges: Mapping[str, Range]) -> int:
    """Return a lower bound of `dim`, maybe negative; exact if one symbol occurs."""
    return sum(_bound(term, ranges).low for term in _terms(dim))


def in_program(jaxpr: Any) -> Iterator[Any]:
    """Yield the symbolic sizes in the shapes of all values of `jaxpr`."""
    for eqn in jaxpr.eqns:
        for variable in eqn.outvars:
            yield from filter(is_symbolic, getattr(variable.aval, "shape", ()))
        for inner in jaxprs_in_params(eqn.params):
            yield from in_program(inner)


def least_nonempty(dims: Iterable[Any]) -> dict[str, int]:
    """Return for each symbol the least value at which all `dims` are at least 1.

    Dims that are 0 for all values up to 64, such as that of `x[100:]`, are left out.
    """
    found: dict[str, int] = {}
    for dim in {str(dim): dim for dim in dims}.values():
        names = symbol_names(dim)
        for high in range(1, 65):
            if largest(dim, dict.fromkeys(names, Range(0, high))):
                found |= {name: max(found.get(name, 1), high) for name in names}
                break
    return found


def most_tokens(
    dim: Any,
    ranges: Mapping[str, Range],
    totals: Mapping[str, int],
    batch: int,
) -> int:
    """Return an upper bound of the sum of `dim` over the examples of a batch.

    Args:
        dim: the size.
        ranges: the values that each symbol may take.
        totals: for each symbol an upper bound of its sum over the batch.
        batch: the number of examples.
    """
    tokens = 0
    for term in _terms(dim):
        names = symbol_names(term)
        if len(names) != 1:
            tokens += max(_bound(term, ranges).high, 0) * batch
            continue
        # For each line the sum is at most slope * total + rest * batch.
        (name,) = names
        total, lines = totals[name], _lines_above(term, *ranges[name])
        if not isinstance(total, int):  # of `jax.export`: whole slopes make a size
            slope, rest = lines[0]
            tokens += slope * total + int(rest) * batch
            continue
        tokens += min(_floor(slope * total + rest * batch) for slope, rest in lines)
    if not isinstance(tokens, int):
        return tokens
    return max(min(tokens, largest(dim, ranges) * batch), 0)


def _floor(value: Any) -> int:
    return int(np.floor(value + 1e-6))


def _bound(term: str, ranges: Mapping[str, Range]) -> Range:
    names = symbol_names(term)
    if len(names) == 1:
        return _extremes(term, *ranges[names[0]])
    bound = _evaluate(_parse(term), ranges)
    return bound if isinstance(bound, Range) else Range(int(bound), int(bound))


@ft.lru_cache(maxsize=4096)
def _extremes(term: str, low: int, high: int) -> Range:
    """Return the range of a term of one symbol, whose values are low to high."""
    _, values = _samples(term, low, high)
    return Range(int(np.min(values)), int(np.max(values)))


@ft.lru_cache(maxsize=4096)
def _lines_above(term: str, low: int, high: int) -> tuple[tuple[Any, Any], ...]:
    """Return lines, as (slope, rest), above a term of one symbol from low to high.

    The first is one of integers; the others are those that an affine, a capped and a
    growing term ask for.
    """
    n, d = _samples(term, low, high)
    d = np.maximum(d, 0)
    whole = max(int(np.ceil(np.max(d / np.maximum(n, 1)))), 0)
    slopes = (whole, 0.0, d[-1] / max(high, 1), d[-1] - d[-2:][0], d[:2][-1] - d[0])
    return tuple((s, np.max(d - s * n)) for s in slopes if s >= 0)


def _samples(term: str, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values of the symbol of a term, and those of the term at them.

    They are all values, of which there may be millions; of an affine term two at each
    end, which tell the same.
    """
    (name,) = symbol_names(term)
    if _is_affine(_parse(term)):
        n = np.unique(np.clip([low, low + 1, high - 1, high], low, high))
    else:
        n = np.arange(low, high + 1)
    return n, np.broadcast_to(evaluate(term, {name: n}), n.shape)


def _is_affine(node: ast.expr) -> bool:
    match node:
        case ast.Constant() | ast.Name():
            return True
        case ast.UnaryOp(operand=operand):
            return _is_affine(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _is_affine(left) and _is_affine(right)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            constant = not symbol_names(ast.unparse(left))
            constant |= not symbol_names(ast.unparse(right))
            return constant and _is_affine(left) and _is_affine(right)
    return False


def _terms(dim: Any) -> list[str]:
    """Return the terms of the sum `dim`, those that share their symbols as one."""
    groups: dict[tuple[str, ...], str] = {}
    for sign, node in _summands(_parse(str(dim)), "+"):
        text = f"{sign} ({ast.unparse(node)})"
        names = tuple(symbol_names(ast.unparse(node)))
        groups[names] = f"{groups.get(names, '0')} {text}"
    return list(groups.values())


def _summands(node: ast.expr, sign: str) -> list[tuple[str, ast.expr]]:
    other = "-" if sign == "+" else "+"
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _summands(left, sign) + _summands(right, sign)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _summands(left, sign) + _summands(right, other)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _summands(operand, other)
    return [(sign, node)]
