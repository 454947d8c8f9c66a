"""The table of what primitives of JAX are in a step program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from .values import Unsupported, Value

Rule = Callable[..., Value | list[Value]]
ANY = "fib"
"""The kinds of all numbers."""
_KINDS = {"f": jnp.floating, "i": jnp.integer, "b": jnp.bool_}


def rule_table() -> tuple[dict[str, Rule], Callable[..., Callable[[Rule], Rule]]]:
    """Return an empty table, and a decorator that fills it.

    `@rule(*names)` adds `function(builder, eqn, *values, **params)`. It returns the
    results of an equation, and raises `Unsupported` where programs lack what it needs.
    `kinds` are those of the numbers that it is for: "f" for floats, "i" for integers,
    "b" for truth values. It is not called for others.
    """
    table: dict[str, Rule] = {}

    def rule(*names: str, kinds: str = "f") -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            def checked(b: Any, eqn: JaxprEqn, *values: Value, **params: Any) -> Any:
                _check_kind(eqn, kinds)
                return function(b, eqn, *values, **params)

            table.update(dict.fromkeys(names, checked))
            return function

        return register

    return table, rule


def _check_kind(eqn: JaxprEqn, kinds: str) -> None:
    """Raise `Unsupported` if the first operand, or result, has other numbers."""
    dtype = type_of((*eqn.invars, *eqn.outvars)[0]).dtype
    if not any(jnp.issubdtype(dtype, _KINDS[kind]) for kind in kinds):
        of = "integers" if jnp.issubdtype(dtype, jnp.integer) else dtype
        raise Unsupported(f"`{eqn.primitive.name}` of {of}")


def result_shape(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the shape of the first result of an equation."""
    return type_of(eqn.outvars[0]).shape


def is_integer(eqn: JaxprEqn) -> bool:
    """Return whether the first operand of an equation has integers."""
    return jnp.issubdtype(type_of(eqn.invars[0]).dtype, jnp.integer)


def refuse_integers(eqn: JaxprEqn) -> None:
    """Raise `Unsupported` if the first operand of an equation has integers."""
    if is_integer(eqn):
        raise Unsupported(f"`{eqn.primitive.name}` of integers")
