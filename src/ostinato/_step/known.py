"""Jaxprs that are equal to earlier ones, so that a second trace compiles nothing."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .. import _checks
from .constants import with_all_constants
from .jaxprs import evaluate, is_literal, run_one, split_at, trace, type_of

_MOST_RULES = 2
"""Custom derivatives are compared to this order, as their rules may use themselves."""


def known(jaxpr: Jaxpr) -> Jaxpr:
    """Return an earlier jaxpr that computes the same, or else the one that is given.

    Functions among the parameters of operations are equal if they are the same object.
    """
    try:
        key = _Key(jaxpr)
        hash(key)
    except Exception:  # a parameter that cannot be compared, or a rule that raises
        return jaxpr
    return _first(key)


def call_known(function: Callable, *arguments: Any) -> Any:
    """Call a function; outside of transformations, equal ones are compiled once.

    JAX would compile each call of `lax.scan` there, as the step is a new function, and
    keep what it compiled.

    Args:
        function: a function of JAX, which may close over arrays.
        arguments: pytrees of arrays.
    """
    leaves = jax.tree.leaves(arguments)
    disabled = jax.config.jax_disable_jit  # pyright: ignore
    if disabled or not all(map(_checks.is_concrete, leaves)):
        return function(*arguments)
    traced, results = trace(function, arguments)
    traced = with_all_constants(traced)
    if traced.effects or not all(map(_checks.is_concrete, traced.consts)):
        return function(*arguments)
    out = _run(known(traced.jaxpr), *traced.consts, *leaves)
    return jax.tree.unflatten(results, out)


@ft.partial(jax.jit, static_argnums=0)
def _run(jaxpr: Jaxpr, *values: Any) -> list[Any]:
    consts, arguments = split_at(values, [len(jaxpr.constvars)])
    return evaluate(ClosedJaxpr(jaxpr, consts), arguments)


class _Key:
    """A jaxpr that is compared by its equations."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.content = jaxpr, _content(jaxpr)

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.content == other.content


@ft.lru_cache(maxsize=256)
def _first(key: _Key) -> Jaxpr:
    return key.jaxpr


def _content(jaxpr: Jaxpr, order: int = 0) -> tuple:
    """Return what a jaxpr is compared by; `order` counts rules that it stands in."""
    number: dict[Any, int] = {}

    def name(atom: Any) -> Any:
        if is_literal(atom):
            return (_parameter(np.asarray(atom.val), order), atom.aval)
        return number.setdefault(atom, len(number))

    arguments = (*jaxpr.constvars, *jaxpr.invars)
    types = tuple((name(v), v.aval) for v in arguments)
    equations = tuple(
        (
            eqn.primitive,
            tuple(map(name, eqn.invars)),
            tuple((name(v), v.aval) for v in eqn.outvars),
            _parameters(eqn, order),
            eqn.ctx,
        )
        for eqn in jaxpr.eqns
    )
    return types, equations, tuple(map(name, jaxpr.outvars))


def _parameters(eqn: JaxprEqn, order: int) -> Any:
    """Return what the parameters of an equation are compared by."""
    if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return tuple((k, _parameter(v, order)) for k, v in sorted(eqn.params.items()))
    inner = tuple(_content(j, order) for j in jaxprs_in_params(eqn.params))
    if order == _MOST_RULES:
        return inner
    # Their rules are new functions at each trace: compared is what these compute.
    types = [type_of(v) for v in (*eqn.invars, *eqn.outvars)]
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in types):
        raise TypeError("there are no tangents of integers")
    x, y = types[: len(eqn.invars)], types[len(eqn.invars) :]
    call = lambda *values: run_one(eqn, values)  # noqa: E731
    if eqn.primitive.name == "custom_jvp_call":
        rule = jax.make_jaxpr(lambda x, dx: jax.jvp(call, x, dx))(tuple(x), tuple(x))
    else:
        rule = jax.make_jaxpr(lambda x, dy: jax.vjp(call, *x)[1](dy))(x, y)
    return _parameter(rule, order + 1), inner


def _parameter(value: Any, order: int) -> Any:
    """Return what a parameter is compared by."""
    if isinstance(value, ClosedJaxpr):
        return value if value.consts else _content(value.jaxpr, order)
    if isinstance(value, Jaxpr):
        return _content(value, order)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_parameter(v, order) for v in value))
    if isinstance(value, (np.ndarray, np.generic, float)):
        array = np.asarray(value)  # as bytes, 0 and -0 differ, and NaN equals itself
        return type(value), array.shape, array.dtype, array.tobytes()
    return type(value), value
