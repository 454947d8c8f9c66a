"""What `recurrent_net` gives and takes: its result, and the hooks of a cell."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .._typing import Array, Padding


class RecurrentOutput(NamedTuple):
    """What `recurrent_net` returns.

    Attributes:
        outputs: of every step, leaves `[B, T, ...]`, `[T, B, ...]` if `time_major`.
        states: final, shaped as `initial_states`.
        all_states: after every step, laid out as `outputs`; None unless asked for.
    """

    outputs: Any
    states: Any
    all_states: Any = None


class SequenceOptions(NamedTuple):
    """How `recurrent_net` was called, checked; what `Cell.run_sequence` must honour.

    Attributes:
        length: T.
        batch: B.
        seq_lengths: int32 `[B]`, or None.
        resets: bool `[B, T]`, `[T, B]` if `time_major`, or None.
        reverse: as given.
        time_major: as given.
        padding: as given.
        recompute: True, or the names asked for, perhaps none.
        segment_length: k, or None; `"auto"` is resolved.
        return_all_states: as given.
        window: as given.
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


class Cell:
    """A step function for `recurrent_net` that knows its parameters and states.

    Subclasses are frozen dataclasses. They define `init`, `initial_state` and `step`;
    the other methods are hooks with a default. What a cell is called with by itself is
    one step: `cell(params, states, inputs_t, t) -> (states, output)`.
    """

    def init(self, key: Array, dtype: Any) -> Any:
        """Draw fresh parameters, a pytree."""
        raise NotImplementedError(f"{type(self).__name__} does not define `init`")

    def initial_state(self, batch: int, dtype: Any) -> Any:
        """The states before the first step, zeros: a pytree of `[batch, ...]`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define `initial_state`"
        )

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """One step in the loop, on what `prepare` and `precompute` made.

        Returns:
            `(new_states, output_t)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `step`")

    def prepare(self, params: Any) -> Any:
        """What of `params` is worth computing once, before all steps.

        `precompute` and `step` then get the result in place of `params`.
        """
        return params

    def precompute(self, params: Any, inputs: Any) -> Any:
        """What of the inputs is worth computing for all steps at once.

        The products of inputs with weights, above all. `step` gets one step of the
        result as its `inputs_t`.

        Args:
            params: from `prepare`.
            inputs: leaves `[T, B, ...]`, or `[B, ...]` for a single step; so write it
                for any number of leading axes.
        """
        return inputs

    def run_sequence(
        self, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
    ) -> RecurrentOutput | None:
        """Run all steps in another way than step by step, or None where it cannot.

        `params` are those of `init` and `inputs` laid out as the caller gave them. The
        result must be what stepping gives, but for rounding.
        """
        return None

    def __call__(
        self, params: Any, states: Any, inputs_t: Any, t: Array
    ) -> tuple[Any, Any]:
        """One step: `(new_states, output_t)`."""
        params = self.prepare(params)
        return self.step(params, states, self.precompute(params, inputs_t), t)
