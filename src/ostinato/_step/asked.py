"""`asked`: a mark in a step that says how the caller wants its loop to run.

A loop over a symbolic number of steps, inside of `ragged.vmap`, is traced as
`lax.scan`. What runs it later finds the mark in the body, on the number of the step.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .._typing import Array
from .cost import equations_of

asked_p = Primitive("ostinato_asked")
asked_p.def_impl(lambda t, backend: t)
asked_p.def_abstract_eval(lambda t, backend: t)
mlir.register_lowering(asked_p, lambda _, t, backend: [t])
batching.defvectorized(asked_p)


def mark(t: Array, backend: str | None) -> Array:
    """Return the number of a step, an integer, with the `backend` asked for, if any."""
    return asked_p.bind(t, backend=backend)


def asked_backend(jaxpr: Any) -> str | None:
    """Return the backend that a step is marked with, None if it has no mark."""
    found = [eqn for eqn in equations_of(jaxpr) if eqn.primitive is asked_p]
    return found[0].params["backend"] if found else None


def marked(jaxpr: Any) -> list[int]:
    """Return which arguments of a step, by position, are numbers of steps."""
    found = [e.invars[0] for e in jaxpr.eqns if e.primitive is asked_p]
    return [i for i, v in enumerate(jaxpr.invars) if v in found]
