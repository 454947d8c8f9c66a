"""`ragged.register`: rules of users, next to those of JAX's primitives."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from jax.extend.core import Primitive

from .core import registry
from .core.registry import Rule


def register(*primitives: Primitive | str) -> Callable[[Rule], Rule]:
    """Decorate the rule of one or several primitives for `ragged.vmap`.

    Args:
        primitives: primitives, or names of primitives. A name is for a primitive that
            JAX does not export; one that JAX exports is never confused with another
            primitive of the same name.

    Returns:
        A decorator of `rule(ctx, eqn, *values, **params)`. `ctx` is the
        `ragged.Context`; `eqn.outvars[i].aval` has shape and dtype of the results of
        one example; `values` are `Shared`, `Padded` or `Flat`. The rule returns one
        such value, or a list of them for a primitive of several results, and raises
        `ragged.Refuse(reason)` where it cannot.

    Raises:
        TypeError: an argument is neither a primitive nor a name.
        ValueError: a primitive has a rule already, or no primitive is given.
    """
    load_rules()
    return registry.register(*primitives)


def load_rules() -> None:
    """Import the rules of JAX's primitives.

    Only a program that maps a function, or registers a rule, needs them; importing them
    takes a third of the time that `import ostinato` takes.
    """
    importlib.import_module("ostinato.ragged.rules")
