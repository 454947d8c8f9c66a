"""The result of `recurrent_net`, its checked options, and the base class of cells."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import jax

from .. import _checks
from .._typing import Array, Padding


class RecurrentOutput(NamedTuple):
    """The result of `recurrent_net`.

    Attributes:
        outputs: the outputs of all steps, leaves `[B, T, ...]`, or `[T, B, ...]` if
            `time_major`.
        states: the final states, in the shapes of `initial_states`.
        all_states: the states after every step, in the layout of `outputs`; None
            without `return_all_states`.
    """

    outputs: Any
    states: Any
    all_states: Any = None


class SequenceOptions(NamedTuple):
    """The checked options of a call of `recurrent_net`, for `Cell.run_sequence`.

    Attributes:
        length: T.
        batch: B.
        seq_lengths: int32 `[B]`, or None.
        resets: bool `[B, T]`, `[T, B]` if `time_major`, or None.
        reverse: as given.
        time_major: as given.
        padding: as given.
        recompute: True, or a tuple of names, which may be empty.
        segment_length: k, or None; `"auto"` has been resolved to a number.
        return_all_states: as given.
        window: as given.
        backend: as given.
    """

    length: int
    batch: int
    seq_lengths: Array | None
    resets: Array | None
    reverse: bool
    time_major: bool
    padding: Padding
    recompute: tuple[str, ...] | Literal[True]
    segment_length: int | None
    return_all_states: bool
    window: int
    backend: str | None = None


class Cell:
    """A step function for `recurrent_net` that knows its parameters and states.

    Subclasses are frozen dataclasses. They define `init`, `initial_state` and `step`;
    the other methods are hooks with a default. Calling a cell runs one step:
    `cell(params, states, inputs_t, t) -> (states, output)`.
    """

    step_methods: ClassVar[tuple[str, ...]] = (
        "__call__", "step", "step_seeing", "prepare", "precompute", "input_product",
        "unpack",
    )  # fmt: skip
    """Names of methods that `run_sequence` takes for those of this package."""

    def init(self, key: Array, dtype: Any) -> Any:
        """Draw new parameters, a pytree."""
        raise NotImplementedError(f"{type(self).__name__} does not define `init`")

    def initial_state(self, batch: int, dtype: Any) -> Any:
        """Return the states before the first step: a pytree of zeros `[batch, ...]`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define `initial_state`"
        )

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Run one step in the loop, on results of `prepare` and `precompute`.

        Returns:
            `(new_states, output_t)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `step`")

    def prepare(self, params: Any) -> Any:
        """Return `params` with everything computed that is the same at every step.

        `precompute` and `step` get the result in place of `params`.
        """
        return params

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Compute what a step needs of its inputs alone, for one step or for many.

        Above all, these are the products of inputs with weights. `step` gets one step
        of the result as its `inputs_t`. Which way it is called depends on the loop, so
        what it returns for a step must follow from the inputs of that step alone.

        Args:
            params: the result of `prepare`.
            inputs: leaves `[T, B, ...]`, or `[B, ...]` for a single step; the method
                must take any number of leading axes.
        """
        return inputs

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run all steps in another way than step by step; return None if it cannot.

        `params` are the result of `init`, and `inputs` have the caller's layout. The
        result must equal that of stepping, except for rounding.
        """
        return None

    def __call__(
        self, params: Any, states: Any, inputs_t: Any, t: Array
    ) -> tuple[Any, Any]:
        """Run one step and return `(new_states, output_t)`."""
        params = self.prepare(params)
        held = lambda leaf: hasattr(leaf, "__jax_array__")  # noqa: E731
        states = jax.tree.map(_checks.unwrap, states, is_leaf=held)
        return self.step(params, states, self.precompute(params, inputs_t), t)


def overrides_step(cell: Cell) -> bool:
    """Return whether a subclass of a user's has methods of its own for a step.

    What runs whole sequences would pass them over.
    """
    methods = (getattr(type(cell), name, Cell.step) for name in cell.step_methods)
    packages = (getattr(m, "__module__", None) or "" for m in methods)
    return any(package.split(".")[0] != "ostinato" for package in packages)
