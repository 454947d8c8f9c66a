"""The table of what primitives of JAX are in a step program."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..jaxprs import type_of
from .values import Unsupported, Value

Rule = Callable[..., Value | list[Value]]


def rule_table() -> tuple[dict[str, Rule], Callable[..., Callable[[Rule], Rule]]]:
    """Return an empty table, and a decorator that fills it.

    `@rule(*names)` adds `function(builder, eqn, *values, **params)`. It returns the
    results of an equation, and raises `Unsupported` where programs lack what it needs.
    """
    table: dict[str, Rule] = {}

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return table, rule


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
