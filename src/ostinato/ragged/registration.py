"""`ragged.register`: rules of users, next to those of JAX's primitives."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from jax.extend.core import Primitive

from .core import registry
from .core.registry import Rule


def register(
    *primitives: Primitive | str, cheap: bool = False
) -> Callable[[Rule], Rule]:
    """Decorate the rule of one or several primitives for `ragged.vmap`.

    Args:
        primitives: primitives, or names of primitives. A name is for a primitive that
            JAX does not export; a primitive of your own that has the name of one that
            JAX exports is not meant by it.
        cheap: whether the primitive costs little per element, jaxprs among its
            parameters aside. A cheap one between two operations that run in tiers runs
            there, too.

    Returns:
        A decorator of `rule(ctx, eqn, *values, **params)`. `ctx` is the
        `ragged.Context`; `eqn.outvars[i].aval` has shape and dtype of the results of
        one example; `values` are `Shared`, `Padded` or `Flat`. The rule returns one
        such value, or a list of them for a primitive of several results, and raises
        `ragged.Unsupported(reason)` for a case that it cannot map.

    Raises:
        TypeError: an argument is neither a primitive nor a name.
        ValueError: a primitive has a rule already, or no primitive is given.
    """
    load_rules()
    return registry.register(*primitives, cheap=cheap)


def load_rules() -> None:
    """Import the rules of JAX's primitives.

    Importing them takes a while, and only programs that map a function or register a
    rule need them.
    """
    importlib.import_module("ostinato.ragged.rules")
