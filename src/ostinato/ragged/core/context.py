"""`Context`: the view that a rule has of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._typing import Array
from . import interpreter
from .conversions import Conversions
from .example_sizes import Sizes
from .symbols import Options
from .values import Flat, Padded, Shared, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Context(Conversions):
    """One batch under `ragged.vmap`: sizes, conversions, and functions mapped over it.

    A context does not change; `nested` derives another one. Arrays that are computed
    from lengths are cached for one trace: a rule that hands JAX a function to trace,
    such as the body of a loop, uses `nested()` inside of that function.

    Attributes:
        batch: the number of examples, at least 1.
        symbols: the values that the symbols of sizes stand for.
        options: see `ragged.vmap`.
        equations: the equation at hand, after the ones that it stands in.
        going: bool `[batch]`, the examples whose results are used, in a loop that the
            others have left; None where all are used.
        reached: bool scalar, whether any example is in the loop or branch at hand; None
            outside of loops and branches that examples leave or enter by themselves.
    """

    options: Options
    equations: tuple[JaxprEqn, ...] = ()
    going: Array | None = None
    reached: Array | None = None

    def nested(self, **changes: Any) -> Context:
        """Return a context for use inside of a function that JAX traces.

        Everything cached so far is known there, too, unless sizes change; what is
        cached inside stays inside.

        Args:
            **changes: attributes that are different there.
        """
        other_sizes = not changes.keys().isdisjoint(("batch", "symbols"))
        cache = {} if other_sizes else dict(self._cache)
        return dataclasses.replace(self, **changes, _cache=cache)

    def among(self, going: Array) -> Context:
        """Return `nested()` where only the examples of `going` are used.

        Args:
            going: bool `[batch]`.
        """
        going = going if self.going is None else self.going & going
        return self.nested(going=going, reached=jnp.any(going))

    def used_examples(self) -> Array | None:
        """Return the examples that are complete and going; None where all are.

        Returns:
            bool `[batch]`, or None.
        """
        complete, going = self.complete(), self.going
        if complete is None or going is None:
            return going if complete is None else complete
        return complete & going

    def at(self, eqn: JaxprEqn) -> Context:
        """Return the context of `eqn` in the same trace; the cache is shared."""
        return dataclasses.replace(self, equations=(*self.equations, eqn))

    def evaluate(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """Run an inner jaxpr on values of this context."""
        return interpreter.evaluate(self, jaxpr, values)

    @staticmethod
    def out_shapes(eqn: JaxprEqn) -> list[tuple[Any, ...]]:
        """Return the shapes, maybe symbolic, of an equation's results."""
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        return [tuple(aval.shape) for aval in avals]

    def batched(
        self,
        function: Callable[..., Sequence[Array]],
        values: Sequence[Value],
        shapes: Sequence[tuple[Any, ...]],
        *,
        sized: bool = True,
    ) -> list[Value]:
        """Map a function of one padded example over the batch with `jax.vmap`.

        Args:
            function: `function(sizes, *arrays) -> list of arrays`. Symbolic axes of
                the arrays have their largest size; `sizes(dim)` is the example's own,
                and `sizes.mask(x, axis, dim)` tells padding from the rest.
            values: the values whose arrays `function` gets.
            shapes: the shapes of the results of one example.
            sized: whether `function` looks at `sizes`. If not, and all `values` are
                `Shared`, so are the results.

        Returns:
            One `Padded` value per shape, or `Shared`.
        """
        values = [self.to_padded(v) if isinstance(v, Flat) else v for v in values]
        values = [self.of_nonempty(v, shapes) for v in values]
        arrays = [self._without_gradient_of_padding(v) for v in values]
        if not sized and all(isinstance(v, Shared) for v in values):
            results = function(Sizes({}), *arrays)
            return [Shared(x, s) for x, s in zip(results, shapes, strict=True)]
        axes = [0 if isinstance(v, Padded) else None for v in values]
        results = jax.vmap(
            lambda values, *arrays: list(function(Sizes(values), *arrays)),
            in_axes=(0, *axes),
            axis_size=self.batch,
        )(self.symbols.values, *arrays)
        return [Padded(x, s) for x, s in zip(results, shapes, strict=True)]

    def unsized(
        self,
        function: Callable[..., Array],
        values: Sequence[Value],
        shape: tuple[Any, ...],
    ) -> Value:
        """Map `function(*arrays) -> array` that does not look at sizes; see `batched`.

        Args:
            function: a function of one padded example.
            values: the values whose arrays it gets.
            shape: the shape of its result.
        """
        (result,) = self.batched(
            lambda _, *arrays: [function(*arrays)], values, [shape], sized=False
        )
        return result
