"""Traces of step functions, as flat lists of equations."""

from __future__ import annotations

import functools as ft
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.source_info_util import user_context

from .._rnn.sharding import make_varying, vary_over, varying
from .integers import computed

Origins = dict[str, tuple[JaxprEqn, ...]]
Hook = Callable[[JaxprEqn, list[Any]], list[Any] | None]

CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
"""The names of what `jax.checkpoint` makes."""


def trace(function: Callable, arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of `function(*arguments)` and the tree of its results."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return traced, jax.tree.structure(shapes)


def flat_trace(function: Callable, *avals: Any) -> ClosedJaxpr:
    """Return the jaxpr of a function of flat arguments without inner `jit`.

    Equations whose results nothing needs are left out.
    """
    traced = jax.make_jaxpr(function)(*avals)
    names = {eqn.primitive.name for eqn in traced.jaxpr.eqns}
    if "jit" in names:
        inlined = lambda *args: evaluate(traced, args)  # noqa: E731
        traced = jax.make_jaxpr(inlined)(*avals)
    jaxpr = traced.jaxpr
    kept = needed(jaxpr.eqns, jaxpr.outvars)
    return ClosedJaxpr(jaxpr.replace(eqns=kept), traced.consts)


@ft.lru_cache(maxsize=256)
def flat(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without constants, which come first, and without inner `jit`."""
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    closed = jaxpr_of(jaxpr.eqns, arguments, jaxpr.outvars)
    assert not closed.consts, "a jaxpr without constants closes over nothing"
    return closed.jaxpr


def origins_of(jaxpr: Jaxpr) -> Origins:
    """Return the first equation of each primitive, after the ones that it stands in."""
    origins: Origins = {}
    _find_origins(jaxpr, (), origins)
    return origins


def _find_origins(jaxpr: Any, around: tuple, origins: Origins) -> None:
    for eqn in jaxpr.eqns:
        equations = (*around, eqn)
        origins.setdefault(eqn.primitive.name, equations)
        for inner in jaxprs_in_params(eqn.params):
            _find_origins(inner, equations, origins)


def jaxpr_of(
    eqns: Sequence[JaxprEqn],
    arguments: Sequence[Any],
    results: Sequence[Any],
    constants: Mapping[Any, Any] | None = None,
) -> ClosedJaxpr:
    """Return the jaxpr of those of `eqns` that lead from variables to others.

    Args:
        eqns: equations in order.
        arguments: variables, the arguments of the jaxpr.
        results: variables or literals, its results.
        constants: the values of further variables.
    """
    eqns = needed(eqns, results)

    def function(*given: Any) -> list[Any]:
        values = dict(constants or {})
        values |= dict(zip(arguments, given, strict=True))
        run(eqns, values)
        return [read(atom, values) for atom in results]

    return jax.make_jaxpr(function)(*(struct(v.aval) for v in arguments))


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a type, to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def type_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a variable or a literal."""
    return struct(atom.aval)


def known_product(sizes: Iterable[Any]) -> int:
    """Return the product of sizes; symbols, which `jax.export` has, count as 1."""
    return math.prod(n for n in sizes if not is_symbolic_dim(n))


def needed(eqns: Sequence[JaxprEqn], results: Iterable[Any]) -> list[JaxprEqn]:
    """Return the equations that lead to `results`, or that have an effect."""
    wanted = {atom for atom in results if not is_literal(atom)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted.update(variables(eqn))
    return kept[::-1]


def evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Any], hook: Hook | None = None
) -> list[Any]:
    """Run a jaxpr and inline functions under `jit`; see `run`."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    run(jaxpr.eqns, values, hook)
    return [read(atom, values) for atom in jaxpr.outvars]


def inlined(function: Callable, hook: Hook | None = None) -> Callable:
    """Return a function without inner `jit`, whose equations run with a hook."""

    def run(*arguments: Any) -> Any:
        traced, results = trace(function, arguments)
        values = evaluate(traced, jax.tree.leaves(arguments), hook)
        pairs = zip(traced.out_avals, values, strict=True)
        kept = [vary_over(varying(aval), value) for aval, value in pairs]
        return jax.tree.unflatten(results, kept)

    return run


def run(
    eqns: Iterable[JaxprEqn], values: dict[Any, Any], hook: Hook | None = None
) -> None:
    """Run equations and add their results to `values`.

    `hook(eqn, inputs)` may return the results of an equation in place of its primitive.
    It sees those inside of a function under `jit`, too.
    """
    for eqn in eqns:
        inputs = [read(atom, values) for atom in eqn.invars]
        results = hook(eqn, inputs) if hook is not None else None
        if results is None:
            results = run_one(eqn, inputs, hook)
        values.update(zip(eqn.outvars, results, strict=True))


def run_one(
    eqn: JaxprEqn, inputs: Sequence[Any], hook: Hook | None = None
) -> list[Any]:
    """Run one equation, and the equations inside of a function under `jit`.

    `hook` is for the latter, see `run`. In a `shard_map`, operands that vary over fewer
    axes than others, as constants do, are made to vary over the same.
    """
    if eqn.primitive.name == "jit":
        return evaluate(eqn.params["jaxpr"], inputs, hook)
    if eqn.primitive.name == "pvary":
        return list(inputs)
    integers = computed(eqn, inputs)
    if integers is not None and not integers.shape:  # arrays would be constants
        return [integers]
    inputs = make_varying(list(inputs))
    params = eqn.primitive.get_bind_params(eqn.params)
    # Where it is traced anew, an equation keeps its line of the user's program.
    with eqn.ctx.manager, user_context(eqn.source_info.traceback):
        results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


def checkpoint_like(eqn: JaxprEqn, function: Callable) -> Callable:
    """Return a function under `jax.checkpoint`, with the options of an equation of it.

    Args:
        eqn: an equation of one of `CHECKPOINTS`.
        function: takes the place of what is inside of the equation.
    """
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(function, **options)


def run_checkpoint(eqn: JaxprEqn, inputs: Sequence[Any], hook: Hook) -> list[Any]:
    """Run what is under `jax.checkpoint`, with a hook, under it again; see `run`."""
    (jaxpr,) = jaxprs_in_params(eqn.params)
    run = lambda *given: evaluate(ClosedJaxpr(jaxpr, ()), given, hook)  # noqa: E731
    return checkpoint_like(eqn, run)(*inputs)


def read(atom: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if is_literal(atom) else values[atom]


def is_literal(atom: Any) -> bool:
    """Return whether an operand of an equation is a literal."""
    return isinstance(atom, Literal)


def variables(eqn: JaxprEqn) -> list[Any]:
    """Return the operands of an equation that are not literals."""
    return [atom for atom in eqn.invars if not is_literal(atom)]


def split_at(items: Sequence[Any], places: Sequence[int]) -> list[list[Any]]:
    """Return the parts of a list between places."""
    bounds = [0, *places, len(items)]
    return [list(items[a:b]) for a, b in itertools.pairwise(bounds)]


def split_by(items: Sequence[Any], sizes: Iterable[int]) -> list[list[Any]]:
    """Return the parts of a list that have these sizes, and the rest."""
    return split_at(items, list(itertools.accumulate(sizes)))


def unique(atoms: Sequence[Any]) -> list[Any]:
    """Return the variables among `atoms`, each once."""
    return list(dict.fromkeys(v for v in atoms if not is_literal(v)))
