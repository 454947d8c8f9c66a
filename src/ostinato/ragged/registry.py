"""One rule for each primitive."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

Rule = Callable[..., Any]

_rules: dict[Primitive | str, Rule] = {}


class Refuse(Exception):
    """Raised by a rule: this case cannot be mapped, for the reason given.

    The caller of `ragged.vmap` sees a NotImplementedError that adds the primitive, the
    types of its operands and the line of the program.
    """


def register(*primitives: Primitive | str) -> Callable[[Rule], Rule]:
    """Decorate the rule of one or several primitives for `ragged.vmap`.

    Args:
        primitives: primitives, or the names of primitives that JAX does not export.

    Returns:
        A decorator of `rule(ctx, eqn, *values, **params)`. `ctx` is the
        `ragged.Context`; `eqn.outvars[i].aval` has shape and dtype of the results of
        one example; `values` are `Shared`, `Padded` or `Flat`. The rule returns one
        such value, or a list of them for a primitive of several results, and raises
        `ragged.Refuse(reason)` where it cannot.

    Raises:
        TypeError: an argument is neither a primitive nor a name.
        ValueError: a primitive has a rule already, or none is given.
    """
    if not primitives:
        raise ValueError("`primitives` must name at least one primitive, got none")
    for primitive in primitives:
        if not isinstance(primitive, (Primitive, str)):
            raise TypeError(
                "`primitives` must be primitives or their names, got "
                f"{type(primitive).__name__} {primitive!r}"
            )

    def decorate(rule: Rule) -> Rule:
        _import_rules()
        for primitive in primitives:
            if primitive in _rules or getattr(primitive, "name", None) in _rules:
                raise ValueError(f"primitive {primitive} has a ragged rule already")
        _rules.update(dict.fromkeys(primitives, rule))
        return rule

    return decorate


def rule_of(primitive: Primitive) -> Rule | None:
    """The rule of `primitive`, None where there is none."""
    _import_rules()
    return _rules.get(primitive, _rules.get(primitive.name))


def _import_rules() -> None:
    """Those of JAX's primitives, only when they are needed: importing takes a while."""
    importlib.import_module("ostinato.ragged.rules")
