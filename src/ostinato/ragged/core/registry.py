"""One rule for each primitive."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

Rule = Callable[..., Any]

_rules: dict[Primitive | str, Rule] = {}


class Refuse(Exception):
    """Raised by a rule: this case cannot be mapped, for the reason given.

    The caller of `ragged.vmap` sees a NotImplementedError that adds the primitive, the
    types of its operands and the line of the program.
    """


def register(*primitives: Primitive | str) -> Callable[[Rule], Rule]:
    """Decorate the rule of one or several primitives; see `ragged.register`."""
    if not primitives:
        raise ValueError("`primitives` must name at least one primitive, got none")
    for primitive in primitives:
        if not isinstance(primitive, (Primitive, str)):
            raise TypeError(
                "`primitives` must be primitives or their names, got "
                f"{type(primitive).__name__} {primitive!r}"
            )

    def decorate(rule: Rule) -> Rule:
        keys = [_exported().get(p, p) for p in primitives]
        for key in keys:
            if key in _rules or getattr(key, "name", None) in _rules:
                raise ValueError(f"primitive {key} has a ragged rule already")
        _rules.update(dict.fromkeys(keys, rule))
        return rule

    return decorate


def rule_of(primitive: Primitive) -> Rule | None:
    """Return the rule of `primitive`, or None where it has no rule."""
    return _rules.get(primitive, _rules.get(primitive.name))


@ft.cache
def _exported() -> dict[Any, Primitive]:
    """Return the primitives that JAX exports, by their names."""
    found = [
        getattr(m, n, None)
        for m in (jax_primitives, lax)
        for n in dir(m)
        if n.endswith("_p")
    ]
    return {p.name: p for p in found if isinstance(p, Primitive)}
