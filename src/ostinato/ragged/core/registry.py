"""The registry of rules: one rule for each primitive."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

Rule = Callable[..., Any]


class Entry(NamedTuple):
    """A rule, and whether its primitive costs little per element."""

    rule: Rule
    cheap: bool


_entries: dict[Primitive | str, Entry] = {}


class Unsupported(Exception):
    """An exception that a rule raises for a case that it cannot map, with the reason.

    The caller of `ragged.vmap` sees a NotImplementedError that adds the primitive, the
    types of its operands and the line of the program.
    """


def register(
    *primitives: Primitive | str, cheap: bool = False
) -> Callable[[Rule], Rule]:
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
            if key in _entries or getattr(key, "name", None) in _entries:
                raise ValueError(f"primitive {key} has a ragged rule already")
        _entries.update(dict.fromkeys(keys, Entry(rule, cheap)))
        return rule

    return decorate


def entry_of(primitive: Primitive) -> Entry | None:
    """Return the entry of `primitive`, or None where it has no rule."""
    return _entries.get(primitive, _entries.get(primitive.name))


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
