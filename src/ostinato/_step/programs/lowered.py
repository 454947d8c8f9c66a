"""A lowered step: its program, what it takes and what it returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .program import Place, Program


class Given(NamedTuple):
    """An argument of a step.

    Attributes:
        place: `Place.INVARIANT`, `INPUT` or `STATE`.
        axis: which axis is that of sequences; None if it has none, or, of an invariant
            value, if that is not known.
        most: the largest absolute value of an integer, if it is known.
        turned: whether the native loop reads the transpose of a matrix in its place.
    """

    place: Place
    axis: int | None
    most: int | None = None
    turned: bool = False


class Result(NamedTuple):
    """A result of a loop.

    Attributes:
        place: `Place.OUTPUT`, `NEXT` or `SUM`.
        axis: which axis of the result of the step is that of sequences; the native loop
            has it first.
        shape: of the step's result, as the native loop has it.
        dtype: its dtype.
        most: the largest absolute value of an integer, if it is one.
        added: over which axes of all steps to add up an output: 0 for the steps, 1 for
            the sequences.
        turned: whether the native loop writes the transpose of a matrix in its place.
    """

    place: Place
    axis: int | None
    shape: tuple[int, ...]
    dtype: Any
    most: int | None = None
    added: tuple[int, ...] = ()
    turned: bool = False


class Lowered(NamedTuple):
    """A step program and how to call it.

    Attributes:
        program: the program.
        given: the arguments of the step.
        arguments: the arguments, by position, that are operands of the loop.
        results: the results of the loop.
        sources: for every result of the step, where it is among the results of the
            loop; or as a negative number `-1 - i`, that it is argument `i`; or None,
            if it is zero or not a result of the loop.
        matrices: for every product, where the gradient of its matrix is among the
            results; None if the loop returns its factors instead.
        batch: the number of sequences.
        dtype: what it computes in.
    """

    program: Program
    given: tuple[Given, ...]
    arguments: tuple[int, ...]
    results: tuple[Result, ...]
    sources: tuple[int | None, ...]
    matrices: tuple[int | None, ...]
    batch: int
    dtype: Any

    def type_of_argument(self, i: int, dtype: Any) -> Any:
        """Return the type in which the library takes argument `i` of a type."""
        stays = self.given[i].place is not Place.INVARIANT
        if not stays and i in self.arguments:
            stays = self.arguments.index(i) in _of_half_products(self.program)
        return dtype if dtype == jnp.bfloat16 and stays else self.dtype


def _of_half_products(program: Program) -> frozenset[int]:
    """Return the operands that are matrices of products of bfloat16."""
    weights = (i.weight for i in program.instructions if i.weight is not None)
    return frozenset(w.buffer.array for w in weights if w.half)
