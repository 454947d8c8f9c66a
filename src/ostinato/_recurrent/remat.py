"""What is saved for the backward pass, and what is computed there again.

`jax.checkpoint` decides by policies that see one operation at a time. That a value is
not to be saved does not help while the value before it is, so `recompute` first finds
everything that leads to the named values alone, then names all the rest and lets a
policy save that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core.primitives import name_p

from .._typing import Array

_SAVED = "ostinato saved"
_count = itertools.count()
# Never saved themselves but made again. These only move numbers,
_MOVES = (
    "broadcast_in_dim complex concatenate convert_element_type copy dynamic_slice "
    "expand_dims imag iota name pad real reshape rev select_n slice split "
    "squeeze stop_gradient transpose"
)
# and the derivatives of these, which are made of their results, run them again anyway.
_REUSED = "cbrt exp exp2 expm1 logistic rsqrt sqrt tan tanh"
MOVES = frozenset(f"{_MOVES} {_REUSED}".split())
# With the rest of what works number by number: in the steps of cells, whose products
# are few, that is quicker to run again than to store and to load.
_OTHERS = (
    "abs add add_any and clamp cos div eq erf ge gt integer_pow le log log1p log2 lt "
    "max min mul ne neg not one_minus_square or pow sign sin square sub xor"
)
ARITHMETIC = MOVES | frozenset(_OTHERS.split())


def all_but_arithmetic(primitive: Any, *avals: Any, **_: Any) -> bool:
    """Return whether `checkpoint` saves a result: of products, sums, random numbers.

    Complex results are run again, see `checkpoint`.
    """
    makes_complex = primitive.name in ("complex", "fft") or any(map(_is_complex, avals))
    return primitive.name not in ARITHMETIC and not makes_complex


def checkpoint(
    function: Callable, policy: Callable[..., bool] | None, prevent_cse: bool = True
) -> Callable:
    """Return `function` under `jax.checkpoint`, with complex arguments stored in parts.

    JAX rounds what it stores with an operation that does not take complex numbers
    (`reduce_precision`, JAX 0.10 and 0.11), so real and imaginary parts go in apart. A
    `policy` must not save complex results either.
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
    """Return real and imaginary part of a complex array, or the array alone."""
    return (lax.real(a), lax.imag(a)) if _is_complex(jax.typeof(a)) else (a,)


def _save_as(value: Any, name: str) -> Any:
    """Name every array of `value` for a policy, the parts of complex ones apart."""

    def named(a: Any) -> Any:
        parts = [checkpoint_name(part, name) for part in _parts(a)]
        return lax.complex(*parts) if len(parts) == 2 else parts[0]

    return jax.tree.map(named, value)


def tag(value: Any, name: str) -> Any:
    """Name `value` inside a step, so that `recurrent_net(..., recompute=(name,))` may.

    Without that it does nothing. The name is one of `jax.checkpoint` too: policies such
    as `jax.checkpoint_policies.save_only_these_names` know it.

    Args:
        value: an array, or a pytree of arrays.
        name: what to call it; several values may share a name.

    Returns:
        `value`.

    Raises:
        TypeError: `name` is not a string.

    Holds under every transformation.

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
    """How one call of `recurrent_net` saves less.

    Attributes:
        names: of the values not to save, or True for all but the states.
        made_again: primitives whose results are not saved either.
        saved: the name that the others get, of this call alone: a network inside the
            step of another one must not decide what that one saves.
    """

    names: tuple[str, ...] | Literal[True]
    made_again: frozenset[str]
    saved: str = dataclasses.field(default_factory=lambda: f"{_SAVED} {next(_count)}")

    @property
    def policy(self) -> Callable[..., bool]:
        """For `jax.checkpoint`: save what `mark` chose and nothing else."""
        return jax.checkpoint_policies.save_only_these_names(self.saved)

    def mark(self, step: Callable) -> Callable:
        """`step(params, states, inputs_t, t)` that names what to save.

        Raises, when it is traced:
            ValueError: `step` has no value with one of the names.
        """

        def marked(params: Any, states: Any, inputs_t: Any, t: Any) -> Any:
            states = _save_as(states, self.saved)
            if self.names is True:
                return step(params, states, inputs_t, t)
            arguments = (params, states, inputs_t, t)
            traced, results = _trace(_inlined(step), arguments)
            _check_names(traced.jaxpr, self.names)
            num_params = len(jax.tree.leaves(params))
            saved = self._saved_variables(traced.jaxpr, num_params)

            def mark(variable: Any, value: Any) -> Any:
                return _save_as(value, self.saved) if variable in saved else value

            leaves = jax.tree.leaves(arguments)
            values = _evaluate(traced.jaxpr, traced.consts, leaves, mark)
            return jax.tree.unflatten(results, values)

        return marked

    def _saved_variables(self, jaxpr: Jaxpr, num_params: int) -> set:
        """All that changes from step to step, but for what the names leave out.

        Left out are the named values and whatever leads to them alone.
        """
        assert self.names is not True
        left_out = _recomputed(jaxpr, frozenset(self.names))
        changing = set(jaxpr.invars[num_params:])
        saved = set()
        for eqn in jaxpr.eqns:
            if changing.isdisjoint(a for a in eqn.invars if not _is_literal(a)):
                continue  # the same at every step: storing it T times would cost most
            changing.update(eqn.outvars)
            made_again = eqn.primitive.name in self.made_again
            if not made_again and left_out.isdisjoint(eqn.outvars):
                saved.update(v for v in eqn.outvars if _is_plain(v.aval))
        return saved


# ------------------------------------------------------------------------- on jaxprs


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    mark: Callable[[Any, Any], Any] = lambda _, value: value,
) -> list[Any]:
    """Run `jaxpr`, functions under `jit` inlined, results through `mark`."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, JaxprLiteral) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*inputs, **params)
            results = results if eqn.primitive.multiple_results else [results]
        for variable, value in zip(eqn.outvars, results, strict=True):
            values[variable] = mark(variable, value)
    return [read(atom) for atom in jaxpr.outvars]


def _trace(function: Callable, arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``function(*arguments)`` and the tree of its results."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return traced, jax.tree.structure(shapes)


def _inlined(function: Callable) -> Callable:
    """`function` without inner `jit`, so that one jaxpr shows all its values."""

    def run(*arguments: Any) -> Any:
        traced, results = _trace(function, arguments)
        values = _evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(results, values)

    return run


def _names(jaxpr: Jaxpr) -> Iterator[str]:
    """Every name in `jaxpr` and in the jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield from _names_of(eqn)


def _names_of(eqn: JaxprEqn) -> Iterator[str]:
    if eqn.primitive is name_p:
        yield eqn.params["name"]
    for inner in jaxprs_in_params(eqn.params):
        yield from _names(inner)


def _check_names(jaxpr: Jaxpr, wanted: tuple[str, ...]) -> None:
    there = sorted(n for n in {*_names(jaxpr)} if not n.startswith(_SAVED))
    for name in wanted:
        if name not in there:
            names = ", ".join(map(repr, there)) or "none"
            raise ValueError(
                f"`recompute` must hold names that `step` gives with ostinato.tag, "
                f"got {name!r}; the step has: {names}"
            )


def _recomputed(jaxpr: Jaxpr, names: frozenset[str]) -> set:
    """Variables that carry one of `names`, or lead to such variables alone."""
    needed = {atom for atom in jaxpr.outvars if not _is_literal(atom)}
    recomputed = set()
    for eqn in reversed(jaxpr.eqns):
        named = not names.isdisjoint(_names_of(eqn))
        if named or needed.isdisjoint(eqn.outvars):
            recomputed.update(eqn.outvars)
        else:
            needed.update(a for a in eqn.invars if not _is_literal(a))
    return recomputed


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, JaxprLiteral)


def _is_plain(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # such as PRNG keys
