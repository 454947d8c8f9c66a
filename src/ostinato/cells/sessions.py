"""The session of `stream` for cells and step functions."""

from __future__ import annotations

import threading
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
from .._recurrent.stepping import StepLoop
from .._rnn.streaming import BUSY, chosen_streams
from .._step import description
from .._step.programs.values import Unsupported
from .._step.session import Session
from .._typing import Array, ArrayLike, Bool, Int


class StepStream:
    """The session of `stream` for a cell or a step function: states, and calls.

    A session serves one thread at a time; threads that run at once have one each.

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
        self.batch, self._step = batch, step
        self._initial, self._tree = jax.tree.flatten(jax.tree.map(np.asarray, states))
        self._inputs, self._input_tree = tree_flatten_with_path(inputs)
        results = jax.eval_shape(
            lambda *given: check_result(step(*given), given[1], batch),
            *(params, states, inputs, jax.ShapeDtypeStruct((), jnp.int32)),
        )
        self._outputs = jax.tree.structure(results[1])
        self._free = threading.Lock()
        session = "`backend` is 'xla'"
        if backend != "xla":
            session = _native(step, params, batch, inputs, states)
        if not isinstance(session, str):
            self.backend, self.why = "cpu", session.description
            self._loop: Any = session
        elif backend == "cpu":
            raise NotImplementedError(
                f"the cpu loop cannot run this step: {session}; use backend=None or "
                "'xla'"
            )
        else:
            self.backend, self.why = "xla", session
            self._loop = _Jitted(step, params, self._tree, self._input_tree, states)

    def __repr__(self) -> str:
        name = getattr(self._step, "__name__", None) or repr(self._step)
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
        if not self._free.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            leaves = self._checked(x, ())
            if active is not None:
                active = np.asarray(_checks.check_mask("active", active, B=self.batch))
            found = self._loop.step([leaves[i] for i in self._loop.inputs], active)
            return self._results(found)
        finally:
            self._free.release()

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
        if not self._free.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            steps = self._steps(x, length)
            leaves = [np.swapaxes(a, 0, 1) for a in self._checked(x, (steps,))]
            if seq_lengths is not None:
                seq_lengths = np.asarray(
                    _checks.check_seq_lengths(seq_lengths, self.batch, steps, False)
                )
            kept = [leaves[i] for i in self._loop.inputs]
            found = self._loop.chunk(kept, steps, seq_lengths)
            return self._results([np.swapaxes(a, 0, 1) for a in found])
        finally:
            self._free.release()

    @property
    def state(self) -> Any:
        """The states of all streams, in the structure of the initial ones.

        Reading copies them, and setting copies what is set.
        """
        leaves = zip(self._loop.states, self._initial, strict=True)
        return jax.tree.unflatten(self._tree, [a.astype(b.dtype) for a, b in leaves])

    @state.setter
    def state(self, value: Any) -> None:
        paths, tree = tree_flatten_with_path(value)
        if tree != self._tree:
            raise TypeError(f"`state` must have the structure {self._tree}, got {tree}")
        arrays = [
            _numbers(f"state{keystr(path)}", a, own.shape, own.dtype)
            for (path, a), own in zip(paths, self._initial, strict=True)
        ]
        for own, a in zip(self._loop.states, arrays, strict=True):
            np.copyto(own, a, casting="unsafe")

    def reset(self, streams: ArrayLike | None = None) -> None:
        """Begin streams anew: set their states to the initial ones.

        Args:
            streams: indices of streams, an integer or a list of them, or bools `[B]`;
                None means all.

        Raises:
            TypeError, ValueError: `streams` are neither indices nor bools `[B]`.
            IndexError: there is no such stream.
        """
        which = chosen_streams(streams, self.batch)
        for own, initial in zip(self._loop.states, self._initial, strict=True):
            own[which] = initial[which]

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
    array = np.asarray(value)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"`{name}` must hold numbers that convert to {dtype}, got "
            f"{_checks.describe(value)}"
        )
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}")
    return array.astype(dtype, copy=False)


def _native(
    step: Callable, params: Any, batch: int, inputs: Any, states: Any
) -> Session | str:
    """Return a session of the native library, or why there is none."""
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
        plan = StepLoop(step, params, options, None).plan(states, steps)
        if isinstance(plan, str):
            return plan
        try:
            return Session(plan, batch)
        except Unsupported as error:
            return description.reason(error, plan.origins)


class _Jitted:
    """A loop that calls a jitted step, where the native library does not run it."""

    def __init__(
        self, step: Callable, params: Any, tree: Any, input_tree: Any, states: Any
    ) -> None:
        self.states = [np.array(a) for a in jax.tree.leaves(states)]
        self.inputs = range(input_tree.num_leaves)
        self._params, self._tree, self._input_tree = params, tree, input_tree
        self._t = 0

        def one(params: Any, states: Any, x: Any, t: Array, active: Any) -> Any:
            new, outputs = step(params, states, x, t)
            if active is None:
                return new, outputs
            zeros = jax.tree.map(jnp.zeros_like, outputs)
            return select(active, new, states), select(active, outputs, zeros)

        def at(given: Any, states: Any, x: Any, t: Array) -> Any:
            params, begin = given
            return step(params, states, x, begin + t)

        def some(
            params: Any, states: Any, x: Any, t: Array, lengths: Any, length: int
        ) -> Any:
            result = recurrent_net(
                at,
                x,
                states,
                params=(params, t),
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
        for own, new in zip(self.states, jax.tree.leaves(states), strict=True):
            np.copyto(own, new)
        self._t += steps
        return [np.array(a) for a in jax.tree.leaves(outputs)]
