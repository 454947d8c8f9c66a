"""Regions: the parts of a program that have values with more than one ragged axis.

Tiers are for regions. A region is a set of equations that can run as one: those that
have a value with two ragged axes, and the cheap ones in between, such as a sum over one
of the axes that goes back into the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Primitive, jaxprs_in_params

from .registry import entry_of
from .sizes import symbolic_axes

region_p = Primitive("ragged_region")
"""The primitive of an equation that stands for a region; it is never bound."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a jaxpr; it runs as a jaxpr does."""

    invars: list[Any]
    eqns: list[JaxprEqn]
    outvars: list[Any]
    constvars: tuple[()] = ()


def with_regions(jaxpr: Any) -> list[JaxprEqn]:
    """Return the equations of `jaxpr`, those of each region as one equation."""
    inside = _inside(jaxpr.eqns)
    if not any(inside):
        return jaxpr.eqns
    pending = list(range(len(jaxpr.eqns)))
    ordered: list[list[int]] = []
    wants_region = False
    while pending:  # in turns, as many of one kind as can run
        missing = {v for i in pending for v in jaxpr.eqns[i].outvars}
        batch = []
        effects_wait = False  # an earlier effect has to come before the next
        for i in pending:
            eqn = jaxpr.eqns[i]
            runs = inside[i] == wants_region and not (effects_wait and eqn.effects)
            if runs and missing.isdisjoint(_variables(eqn.invars)):
                batch.append(i)
                missing.difference_update(eqn.outvars)
            elif eqn.effects:
                effects_wait = True
        pending = [i for i in pending if i not in set(batch)]
        ordered += [batch] if wants_region else [[i] for i in batch]
        wants_region = not wants_region
    parts = [[jaxpr.eqns[i] for i in batch] for batch in ordered if batch]
    kinds = [inside[batch[0]] for batch in ordered if batch]
    needed: list[set[Any]] = [set()]  # by later parts
    for part in reversed(parts[1:]):
        needed.append({*needed[-1], *(v for e in part for v in _variables(e.invars))})
    needed.reverse()
    results = set(_variables(jaxpr.outvars))
    return [
        _as_equation(part, later | results) if is_region else part[0]
        for part, is_region, later in zip(parts, kinds, needed, strict=True)
    ]


def _as_equation(eqns: list[JaxprEqn], needed: set[Any]) -> JaxprEqn:
    made = [v for eqn in eqns for v in eqn.outvars]
    given = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars))
    region = Region(
        invars=[v for v in given if v not in set(made)],
        eqns=eqns,
        outvars=[v for v in made if v in needed],
    )
    return eqns[0].replace(
        primitive=region_p,
        invars=region.invars,
        outvars=region.outvars,
        params={"region": region},
    )


def _variables(atoms: Iterable[Any]) -> Iterable[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _inside(eqns: Sequence[JaxprEqn]) -> list[bool]:
    """Return which equations belong to a region.

    An equation with effects does not, since a region may run twice.
    """
    common = _common(eqns)
    several = [
        not shared
        and not eqn.effects
        and any(_ragged_axes(atom) > 1 for atom in (*eqn.invars, *eqn.outvars))
        for eqn, shared in zip(eqns, common, strict=True)
    ]
    if not any(several):
        return several
    cheap = [_is_cheap(eqn) and not eqn.effects for eqn in eqns]
    after: set[Any] = set()
    from_region = []
    for eqn, core, passes in zip(eqns, several, cheap, strict=True):
        comes = not after.isdisjoint(_variables(eqn.invars))
        from_region.append(comes)
        if core or comes and passes:
            after.update(eqn.outvars)
    before: set[Any] = set()
    inside = list(several)
    for i in reversed(range(len(eqns))):
        goes = not before.isdisjoint(eqns[i].outvars)
        between = from_region[i] and goes and cheap[i]
        inside[i] = several[i] or between
        if several[i] or goes and cheap[i]:
            before.update(_variables(eqns[i].invars))
    return inside


def _common(eqns: Sequence[JaxprEqn]) -> list[bool]:
    """Return which equations have the same result for all examples, such as an iota."""
    own: set[Any] = set()
    made: set[Any] = set()
    common = []
    for eqn in eqns:
        inputs = set(_variables(eqn.invars))
        same = eqn.primitive.name != "dim_as_value" and inputs <= made - own
        made.update(eqn.outvars)
        if not same:
            own.update(eqn.outvars)
        common.append(same)
    return common


def _ragged_axes(atom: Any) -> int:
    return len(symbolic_axes(getattr(atom.aval, "shape", ())))


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether an equation costs so little per element that padding is cheap."""
    entry = entry_of(eqn.primitive)
    bodies = jaxprs_in_params(eqn.params)
    inner = [inner for body in bodies for inner in body.eqns]
    return entry is not None and entry.cheap and all(map(_is_cheap, inner))
