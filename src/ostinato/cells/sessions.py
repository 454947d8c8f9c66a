"""The session of `stream` for cells and step functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .. import _checks
from .._padding import select
from .._recurrent.arguments import check_result
from .._recurrent.loop import LoopInputs
from .._recurrent.net import recurrent_net
from .._recurrent.protocol import SequenceOptions
from .._recurrent.stepping import StepLoop, split_arrays
from .._rnn.streaming import chosen_streams
from .._sessions import OneThread, wholly
from .._step import description
from .._step.programs.values import Unsupported
from .._step.refusal import refusal
from .._step.scan import RunsAsScan
from .._step.session import LARGEST_STATE, Session, largest
from .._typing import Array, ArrayLike, Bool, Int


class StepStream(OneThread):
    """The session of `stream` for a cell or a step function: states, and calls.

    A session serves one thread at a time; threads that run at once have one each. While
    a thread is in a call, any other call raises RuntimeError, `reset` and uses of
    `state` included.

    Attributes:
        batch: the number of streams, B.
        backend: `"cpu"` calls the native loop directly, `"xla"` a jitted step.
        why: what the native loop runs at a step; or, on xla, what it lacks.
    """

    def __init__(
        self,
        step: Callable,
        params: Any,
        batch: int,
        inputs: Any,
        states: Any,
        backend: Literal["cpu", "xla"] | None,
    ) -> None:
        super().__init__(batch)
        self._step = step
        self._initial, self._tree = jax.tree.flatten(jax.tree.map(np.array, states))
        self._inputs, self._input_tree = tree_flatten_with_path(inputs)
        self._outputs = _outputs(step, params, batch, inputs, states)
        self._loop: Any
        try:
            if backend == "xla":
                raise RunsAsScan("`backend` is 'xla'")
            self._loop = _native(step, params, batch, inputs, states)
            self.backend, self.why = "cpu", self._loop.description
        except RunsAsScan as reason:
            if backend == "cpu":
                raise refusal(backend, str(reason)) from None
            self.backend, self.why = "xla", str(reason)
            self._loop = _Jitted(step, params, self._tree, self._input_tree, states)

    def __repr__(self) -> str:
        name = getattr(self._step, "__name__", None) or type(self._step).__name__
        return (
            f"<session of {self.batch} streams of {name} on {self.backend}: {self.why}>"
        )

    def step(self, x: Any = None, active: Bool[ArrayLike, " B"] | None = None) -> Any:
        """Run one step of every stream.

        Args:
            x: the inputs of a step, leaves `[B, ...]`, in the structure that the
                session was opened with; numbers are converted to the dtypes there.
            active: bool `[B]`: where False, the stream keeps its states, its outputs
                are 0, and its inputs reach nothing. None means all.

        Returns:
            The outputs, leaves `[B, ...]`, new arrays of numpy.

        Raises:
            TypeError: `x` has another structure or holds no numbers; `active` no bools.
            ValueError: a shape is wrong.
            RuntimeError: another thread is in a call of this session.
        """
        with self._alone():
            leaves = self._checked(x, ())
            if active is not None:
                active = _checks.host_mask("active", active, B=self.batch)
            found = self._loop.step([leaves[i] for i in self._loop.inputs], active)
            return self._results(found)

    def chunk(
        self,
        x: Any = None,
        seq_lengths: Int[ArrayLike, " B"] | None = None,
        *,
        length: int | None = None,
    ) -> Any:
        """Run some steps of every stream.

        Args:
            x: the inputs of some steps, leaves `[B, T, ...]`; see `step`.
            seq_lengths: integers in 0..T, `[B]`, the number of steps that each stream
                has; None means T.
            length: T, for a step without inputs.

        Returns:
            The outputs, leaves `[B, T, ...]`, zeros where a stream has no step.

        Raises:
            TypeError: as `step`; `seq_lengths` do not hold integers.
            ValueError: a shape or a length is wrong, or `length` is missing.
            RuntimeError: another thread is in a call of this session.
        """
        with self._alone():
            steps = self._steps(x, length)
            leaves = [np.swapaxes(a, 0, 1) for a in self._checked(x, (steps,))]
            lengths = None
            if seq_lengths is not None:
                lengths = _checks.host_seq_lengths(seq_lengths, self.batch, steps)
            kept = [leaves[i] for i in self._loop.inputs]
            found = self._loop.chunk(kept, steps, lengths)
            return self._results([np.swapaxes(a, 0, 1) for a in found])

    @property
    def state(self) -> Any:
        """The states of all streams, in the structure of the initial ones.

        Reading copies them, and setting copies what is set.
        """
        with self._alone():
            pairs = zip(self._loop.states, self._initial, strict=True)
            leaves = [a.astype(initial.dtype) for a, initial in pairs]
        return jax.tree.unflatten(self._tree, leaves)

    @state.setter
    def state(self, value: Any) -> None:
        paths, tree = tree_flatten_with_path(value)
        if tree != self._tree:
            raise TypeError(f"`state` must have the structure {self._tree}, got {tree}")
        arrays = [
            _numbers(f"state{keystr(path)}", a, own.shape, own.dtype)
            for (path, a), own in zip(paths, self._initial, strict=True)
        ]
        if self.backend == "cpu":
            for (path, _), a in zip(paths, arrays, strict=True):
                _check_largest(f"state{keystr(path)}", a)
        with self._alone():
            wholly(lambda: self._write(arrays))

    def reset(self, streams: ArrayLike | None = None) -> None:
        """Begin streams anew: set their states to the initial ones.

        Args:
            streams: indices of streams, an integer or a list of them, or bools `[B]`;
                None means all.

        Raises:
            TypeError, ValueError: `streams` are neither indices nor bools `[B]`.
            IndexError: there is no such stream.
            RuntimeError: another thread is in a call of this session.
        """
        which = chosen_streams(streams, self.batch)
        with self._alone():
            wholly(lambda: self._write([a[which] for a in self._initial], which))

    def _write(self, values: Sequence[np.ndarray], which: Any = slice(None)) -> None:
        """Set the states of some streams."""
        for own, value in zip(self._loop.states, values, strict=True):
            own[which] = value

    def _results(self, leaves: list[np.ndarray]) -> Any:
        """Return outputs in their structure."""
        if self._outputs == _LEAF:  # a third of the time of `unflatten`
            return leaves[0]
        return jax.tree.unflatten(self._outputs, leaves)

    def _steps(self, x: Any, length: int | None) -> int:
        """Return the number of steps of a chunk."""
        leaves = jax.tree.leaves(x)
        if not leaves:
            if length is None:
                raise ValueError("`length` must be given where `x` holds no array")
            return _checks.check_size("length", length, 0)
        first = np.shape(leaves[0])
        if len(first) < 2:
            raise ValueError(
                f"`x` must have leaves [B, T, ...], got {_checks.describe(leaves[0])}"
            )
        if length not in (None, first[1]):
            raise ValueError(
                f"`length` must be None or T = {first[1]}, that of `x`, got {length}"
            )
        return first[1]

    def _checked(self, x: Any, steps: tuple[int, ...]) -> list[np.ndarray]:
        """Return inputs as arrays `[B, *steps, ...]` in their structure's order."""
        if type(x) is np.ndarray and len(self._inputs) == 1 and not steps:
            own = self._inputs[0][1]
            if x.shape == own.shape and x.dtype == own.dtype and not self._inputs[0][0]:
                return [x]
        leaves, tree = jax.tree.flatten(x)
        if tree != self._input_tree:
            raise TypeError(
                f"`x` must have the structure {self._input_tree}, got {tree}"
            )
        return [
            _numbers(
                f"x{keystr(path)}", a, (self.batch, *steps, *own.shape[1:]), own.dtype
            )
            for a, (path, own) in zip(leaves, self._inputs, strict=True)
        ]


_LEAF = jax.tree.structure(0)


def _numbers(name: str, value: Any, shape: tuple, dtype: Any) -> np.ndarray:
    """Return numbers as an array; check its shape."""
    array = _checks.host_numbers(name, value, dtype)
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}")
    return array.astype(dtype, copy=False)


def _check_largest(name: str, a: np.ndarray) -> None:
    """Check that the native loop can hold the integers of a state."""
    if largest(a) > LARGEST_STATE:
        raise ValueError(
            f"`{name}` must hold integers of at most {LARGEST_STATE} in the native "
            f"loop, got {largest(a)}; open a session with `initial_states` like these, "
            "or with backend='xla'"
        )


def _outputs(step: Callable, params: Any, batch: int, inputs: Any, states: Any) -> Any:
    """Return the structure of a step's outputs; check its results."""
    arrays, rebuild = split_arrays(params)

    def results(arrays: Any, *given: Any) -> Any:
        return check_result(step(rebuild(arrays), *given), given[0], batch)

    t = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        _, outputs = jax.eval_shape(results, arrays, states, inputs, t)
    except Exception as error:
        if inputs is None:
            error.add_note(
                "ost.stream was called without `inputs`, so that the step got None; "
                "give it one step of inputs, arrays [B, ...] or their shapes and dtypes"
            )
        raise
    return jax.tree.structure(outputs)


def _native(
    step: Callable, params: Any, batch: int, inputs: Any, states: Any
) -> Session:
    """Return a session of the native library; raise RunsAsScan if there is none."""
    options = SequenceOptions(
        length=1,
        batch=batch,
        seq_lengths=None,
        resets=None,
        reverse=False,
        time_major=True,
        padding="zero",
        recompute=(),
        segment_length=None,
        return_all_states=False,
        window=1,
        backend="cpu",
    )
    with jax.default_device(jax.devices("cpu")[0]):
        at = jax.tree.map(lambda a: jnp.zeros((1, *a.shape), a.dtype), inputs)
        steps = LoopInputs(at, jnp.zeros(1, jnp.int32), None, None)
        prepared = StepLoop(step, params, options, None).prepare(states, steps)
        try:
            return Session(prepared, batch)
        except Unsupported as error:
            raise RunsAsScan(description.reason(error, prepared.origins)) from None


class _Jitted:
    """A loop that calls a jitted step, where the native library does not run it."""

    def __init__(
        self, step: Callable, params: Any, tree: Any, input_tree: Any, states: Any
    ) -> None:
        arrays, rebuild = split_arrays(params)
        self._params = [jnp.array(a) for a in arrays]  # copies
        self._tree, self._input_tree = tree, input_tree
        self.states = [np.array(a) for a in jax.tree.leaves(states)]
        self.inputs = range(input_tree.num_leaves)
        self._t = 0

        def one(arrays: Any, states: Any, x: Any, t: Array, active: Any) -> Any:
            new, outputs = step(rebuild(arrays), states, x, t)
            if active is None:
                return new, outputs
            zeros = jax.tree.map(jnp.zeros_like, outputs)
            return select(active, new, states), select(active, outputs, zeros)

        def at(given: Any, states: Any, x: Any, t: Array) -> Any:
            params, begin = given
            return step(params, states, x, begin + jnp.minimum(t, _LAST - begin))

        def some(
            arrays: Any, states: Any, x: Any, t: Array, lengths: Any, length: int
        ) -> Any:
            result = recurrent_net(
                at,
                x,
                states,
                params=(rebuild(arrays), t),
                seq_lengths=lengths,
                time_major=True,
                padding="zero",
                length=length,
            )
            return result.states, result.outputs

        self._one, self._some = jax.jit(one), jax.jit(some, static_argnums=5)

    def step(
        self, inputs: Sequence[np.ndarray], active: np.ndarray | None
    ) -> list[np.ndarray]:
        """Run one step; see `Session.step`."""
        return self._take(1, *self._one(*self._given(inputs), active))

    def chunk(
        self, inputs: Sequence[np.ndarray], steps: int, lengths: np.ndarray | None
    ) -> list[np.ndarray]:
        """Run some steps; see `Session.chunk`."""
        return self._take(steps, *self._some(*self._given(inputs), lengths, steps))

    def _given(self, inputs: Sequence[np.ndarray]) -> tuple:
        states = jax.tree.unflatten(self._tree, self.states)
        x = jax.tree.unflatten(self._input_tree, inputs)
        return self._params, states, x, np.int32(self._t)

    def _take(self, steps: int, states: Any, outputs: Any) -> list[np.ndarray]:
        found = [np.array(a) for a in jax.tree.leaves(outputs)]
        new, t = [np.array(a) for a in jax.tree.leaves(states)], self._t + steps
        self.states, self._t = new, min(t, _LAST)
        return found


_LAST = 2**31 - 1
"""The largest `t`, at which it stays."""
