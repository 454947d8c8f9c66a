"""A walk through what JAX traced."""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations, each before those inside of it.

    Where JAX wraps an operation in a jitted function differs between its versions.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations_in(inner)
