"""Rematerialisation: the choice of values that are saved or recomputed.

`jax.checkpoint` decides by policies that see one operation at a time. Not saving a
value does not help while the value before it is saved, so `recompute` first finds all
values that lead only to the named values, then names all other values and lets a policy
save those.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.core.primitives import name_p

from .._compat import ELEMENTWISE
from .._step import jaxprs
from .._typing import Array

_SAVED = "ostinato saved"
_count = itertools.count()
# Recomputing the results of these is cheap: they are saved only where a `Choice` names
# them, and that takes no more bytes. The first ones only move data.
_DATA_MOVEMENT = (
    "broadcast_in_dim complex concatenate convert_element_type copy dynamic_slice "
    "expand_dims imag iota name optimization_barrier ostinato_once pad real reshape "
    "rev select_n slice split squeeze stop_gradient transpose"
)
# The derivatives of these are functions of their results, and recompute them anyway.
_IN_OWN_DERIVATIVE = "cbrt exp exp2 expm1 logistic rsqrt sqrt tan tanh"
CHEAP = frozenset(f"{_DATA_MOVEMENT} {_IN_OWN_DERIVATIVE}".split())
_EXPENSIVE = (
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cosh digamma erf_inv "
    "erfc igamma igamma_grad_a igammac lgamma polygamma random_gamma_grad "
    "regularized_incomplete_beta sinh zeta"
)
# The derivative of a maximum compares it with what it was found in, bit by bit: both
# are recomputed, as XLA may round another way when it computes one of them again.
_COMPARED = "reduce_max reduce_min"
# In the steps of cells, which have few products, it is quicker to recompute the other
# elementwise operations than to store and to load their results.
ARITHMETIC = (
    CHEAP | frozenset(_COMPARED.split()) | (ELEMENTWISE - frozenset(_EXPENSIVE.split()))
)
# These take many times as long as a sum or a product of elements.
TRANSCENDENTAL = frozenset(
    "cbrt cos erf exp exp2 expm1 log log1p log2 logistic pow sin tan tanh".split()
)


def all_but_arithmetic(primitive: Any, *avals: Any, **_: Any) -> bool:
    """Return whether `checkpoint` saves the result of an operation.

    It saves those of products, sums and random draws, except complex results, see
    `checkpoint`.
    """
    makes_complex = primitive.name in ("complex", "fft") or any(map(_is_complex, avals))
    return primitive.name not in ARITHMETIC and not makes_complex


def checkpoint(
    function: Callable, policy: Callable[..., bool] | None, prevent_cse: bool = True
) -> Callable:
    """Return `function` under `jax.checkpoint`, with complex arguments stored in parts.

    JAX rounds stored values with an operation that does not take complex numbers
    (`reduce_precision`, JAX 0.10 and 0.11), so real and imaginary parts are stored
    separately. For the same reason, a `policy` must not save complex results.
    """

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)

        def of_parts(parts: list[tuple[Array, ...]]) -> Any:
            joined = [lax.complex(*p) if len(p) == 2 else p[0] for p in parts]
            return function(*jax.tree.unflatten(tree, joined))

        inner = jax.checkpoint(of_parts, policy=policy, prevent_cse=prevent_cse)
        return inner(list(map(_parts, leaves)))

    return run


def _is_complex(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.complexfloating)


def _parts(a: Any) -> tuple[Any, ...]:
    """Return the real and imaginary part of a complex array; else the array alone."""
    return (lax.real(a), lax.imag(a)) if _is_complex(jax.typeof(a)) else (a,)


def _save_as(value: Any, name: str) -> Any:
    """Name every array of `value` for a policy; complex arrays by their two parts."""

    def named(a: Any) -> Any:
        parts = [checkpoint_name(part, name) for part in _parts(a)]
        return lax.complex(*parts) if len(parts) == 2 else parts[0]

    return jax.tree.map(named, value)


def tag(value: Any, name: str) -> Any:
    """Name `value` in a step, for `recurrent_net(..., recompute=(name,))`.

    Without `recompute`, the name has no effect. `jax.checkpoint` sees it too: policies
    like `jax.checkpoint_policies.save_only_these_names` take it.

    Args:
        value: an array, or a pytree of arrays.
        name: the name; several values may share it.

    Returns:
        `value`.

    Raises:
        TypeError: `name` is not a string.

    Holds under every transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> def step(params, h, x, t):
        ...     gate = ost.tag(jnp.tanh(x + h @ params), "gate")
        ...     return gate * h, gate
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a string, got {type(name).__name__} {name!r}")
    return checkpoint_name(value, name)


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The choice of values that one call of `recurrent_net` recomputes.

    Attributes:
        names: the names of the values not to save, or True for all except the states.
        cheap: primitives whose results are not saved either.
        saved: the name given to all other values, unique to this call: a network inside
            the step of another one must not decide what the outer one saves.
    """

    names: tuple[str, ...] | Literal[True]
    cheap: frozenset[str]
    saved: str = dataclasses.field(default_factory=lambda: f"{_SAVED} {next(_count)}")

    @property
    def policy(self) -> Callable[..., bool]:
        """A policy of `jax.checkpoint` that saves only the values that `mark` named."""
        return jax.checkpoint_policies.save_only_these_names(self.saved)

    def mark(self, step: Callable) -> Callable:
        """Return `step(params, states, inputs_t, t)`, changed to name values to save.

        The result raises ValueError when it is traced, if `step` does not give one of
        `names` to a value.
        """

        def marked(params: Any, states: Any, inputs_t: Any, t: Any) -> Any:
            states = _save_as(states, self.saved)
            if self.names is True:
                return step(params, states, inputs_t, t)
            arguments = (params, states, inputs_t, t)
            traced, results = jaxprs.trace(jaxprs.inlined(step), arguments)
            _check_names(traced.jaxpr, self.names)
            num_params = len(jax.tree.leaves(params))
            saved = self._saved_variables(traced.jaxpr, num_params)

            variables = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
            leaves = jax.tree.leaves(arguments)
            values = dict(zip(variables, [*traced.consts, *leaves], strict=True))
            for eqn in traced.jaxpr.eqns:
                jaxprs.run([eqn], values)
                for variable in saved.intersection(eqn.outvars):
                    values[variable] = _save_as(values[variable], self.saved)
            out = [jaxprs.read(atom, values) for atom in traced.jaxpr.outvars]
            return jax.tree.unflatten(results, out)

        return marked

    def _saved_variables(self, jaxpr: Jaxpr, num_params: int) -> set:
        """Return all variables that change from step to step, except recomputed ones.

        Recomputed are the named variables, those that lead only to them, and the
        results of cheap primitives.
        """
        assert self.names is not True
        recomputed = _named_or_leading(jaxpr, frozenset(self.names))
        changing = set(jaxpr.invars[num_params:])
        saved = set()
        for eqn in jaxpr.eqns:
            if changing.isdisjoint(jaxprs.variables(eqn)):
                continue  # equal at every step: to store it T times would cost most
            changing.update(eqn.outvars)
            cheap = eqn.primitive.name in self.cheap
            if not cheap and recomputed.isdisjoint(eqn.outvars):
                saved.update(v for v in eqn.outvars if _is_plain(v.aval))
        return saved


# ------------------------------------------------------------------------- on jaxprs


def _names(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield every name in `jaxpr` and in its inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield from _names_of(eqn)


def _names_of(eqn: JaxprEqn) -> Iterator[str]:
    if eqn.primitive is name_p:
        yield eqn.params["name"]
    for inner in jaxprs_in_params(eqn.params):
        yield from _names(inner)


def _check_names(jaxpr: Jaxpr, wanted: tuple[str, ...]) -> None:
    known = sorted(n for n in {*_names(jaxpr)} if not n.startswith(_SAVED))
    for name in wanted:
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ValueError(
                f"`recompute` must hold names that `step` gives with ostinato.tag, "
                f"got {name!r}; the step has: {names}"
            )


def _named_or_leading(jaxpr: Jaxpr, names: frozenset[str]) -> set:
    """Return the variables that carry one of `names`, or lead only to those that do."""
    needed = {atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)}
    recomputed = set()
    for eqn in reversed(jaxpr.eqns):
        named = not names.isdisjoint(_names_of(eqn))
        if named or needed.isdisjoint(eqn.outvars):
            recomputed.update(eqn.outvars)
        else:
            needed.update(jaxprs.variables(eqn))
    return recomputed


def _is_plain(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # PRNG keys are extended
