"""The function `stream`: a session that runs a network step by step, for serving."""

from __future__ import annotations

import ctypes
import functools as ft
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks, _compat
from .._sessions import MOST_COPIED, OneThread, wholly
from .._typing import ArrayLike, Backend, Bool, Float, Int, State
from . import backends, cpu, layout
from .api import rnn
from .arguments import check_state
from .output import as_state
from .prepared import PreparedWeights, prepare
from .spec import RNNSpec, check_spec, state_shapes


class Stream(OneThread, ABC):
    """The session of `stream`: states of some streams, and the calls that move them.

    A session serves one thread at a time; threads that run at once have one each. They
    may share weights, and the memory of prepared ones. While a thread is in a call, any
    other call raises RuntimeError, `reset` and uses of `state` included.

    Attributes:
        spec: the network.
        batch: the number of streams, B.
        dtype: the dtype of the weights, of states and outputs.
        backend: the name of the backend: `"cpu"` calls the native library directly,
            `"xla"` a jitted program.
    """

    spec: RNNSpec
    dtype: np.dtype
    backend: str

    def __init__(self, spec: RNNSpec, batch: int, dtype: np.dtype) -> None:
        super().__init__(batch)
        self.spec, self.dtype = spec, dtype
        self._states = [np.zeros(s, dtype) for s in state_shapes(spec, batch)]
        self._step_x = np.zeros((batch, spec.input_size), dtype)
        self._step_y = np.zeros((batch, spec.output_size), dtype)
        self._active = np.ones(batch, np.int32)

    def __repr__(self) -> str:
        return (
            f"<session of {self.batch} streams of mode {self.spec.mode!r} on "
            f"{self.backend}>"
        )

    def step(
        self,
        x: Float[ArrayLike, "B I"],
        active: Bool[ArrayLike, " B"] | None = None,
    ) -> Float[np.ndarray, "B S"]:
        """Run one step of every stream.

        Args:
            x: one input step, `[B, I]`, numbers that are converted to `dtype`.
            active: bool `[B]`: where False, the stream keeps its state, its output is
                0, and its input reaches nothing. None means all.

        Returns:
            The outputs of the last layer, `[B, S]`, a new array.

        Raises:
            TypeError: `x` does not hold numbers, or `active` no bools.
            ValueError: a shape is wrong.
            RuntimeError: another thread is in a call of this session.
        """
        with self._alone():
            own = self._step_x
            if not (
                type(x) is np.ndarray and x.shape == own.shape and x.dtype == own.dtype
            ):
                x = self._numbers("x", x, B=self.batch, I=self.spec.input_size)
            if active is not None:
                active = _checks.host_mask("active", active, B=self.batch)
                np.copyto(self._active, active)
            if own.nbytes + self._step_y.nbytes > MOST_COPIED:
                x = np.require(x, self.dtype, ("C", "ALIGNED"))[:, None]
                lengths = self._active if active is not None else None
                return self._run_chunk(x, lengths)[:, 0]
            np.copyto(own, x, casting="same_kind")
            self._run_step(active is not None)
            return self._step_y.copy()

    def chunk(
        self,
        x: Float[ArrayLike, "B T I"],
        seq_lengths: Int[ArrayLike, " B"] | None = None,
    ) -> Float[np.ndarray, "B T S"]:
        """Run some steps of every stream.

        Args:
            x: input steps, `[B, T, I]`, numbers that are converted to `dtype`.
            seq_lengths: integers in 0..T, `[B]`, the number of steps that each stream
                has; None means T.

        Returns:
            The outputs of the last layer, `[B, T, S]`, zeros where a stream has no
            step.

        Raises:
            TypeError: `x` does not hold numbers, or `seq_lengths` no integers.
            ValueError: a shape or a length is wrong.
            RuntimeError: another thread is in a call of this session.
        """
        with self._alone():
            x = _checks.host_numbers("x", x, self.dtype)
            _checks.check_rank("x", x, "B", "T", "I")
            steps = x.shape[1]
            _checks.check_shape("x", x, B=self.batch, T=steps, I=self.spec.input_size)
            x = np.require(x, self.dtype, ("C", "ALIGNED"))
            lengths = None
            if seq_lengths is not None:
                lengths = _checks.host_seq_lengths(seq_lengths, self.batch, steps)
            return self._run_chunk(x, lengths)

    @property
    def state(self) -> Any:
        """The states of all streams: `h [L, B, S]`, or a tuple of several.

        Those of an LSTM are `(h, c [L, B, H])`, those of an sLSTM `(h, c, n, m)`.
        Reading copies them, and setting copies what is set.
        """
        with self._alone():
            return as_state([state.copy() for state in self._states])

    @state.setter
    def state(self, value: State) -> None:
        given = check_state(self.spec, value, "state")
        arrays = []
        for i, (a, own) in enumerate(zip(given, self._states, strict=True)):
            name = f"state[{i}]" if len(given) > 1 else "state"
            axes = zip("LBS" if i == 0 else "LBH", own.shape, strict=True)
            array = self._numbers(name, a, **dict(axes))
            arrays.append(array.astype(self.dtype, copy=False))
        with self._alone():
            wholly(lambda: self._write(arrays))

    def reset(self, streams: ArrayLike | None = None) -> None:
        """Begin streams anew: set their states to 0.

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
            wholly(lambda: self._write([0] * len(self._states), which))

    def _write(self, values: Sequence[Any], which: Any = slice(None)) -> None:
        """Set the states of some streams."""
        for state, value in zip(self._states, values, strict=True):
            state[:, which] = value

    @abstractmethod
    def _run_step(self, masked: bool) -> None:
        """Run one step from `_step_x` to `_step_y`, of `_active` streams if masked."""

    @abstractmethod
    def _run_chunk(self, x: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        """Run steps of checked inputs, and return their outputs."""

    def _numbers(self, name: str, value: Any, **dims: int) -> np.ndarray:
        """Return numbers as an array; check its shape."""
        array = _checks.host_numbers(name, value, self.dtype)
        _checks.check_shape(name, array, **dims)
        return array


def chosen_streams(streams: ArrayLike | None, batch: int) -> Any:
    """Return indices of streams, given by integers, by bools `[B]`, or None for all.

    Raises:
        TypeError, ValueError: they are neither.
        IndexError: there is no such stream.
    """
    if streams is None:
        return slice(None)
    _checks.check_unmasked("streams", streams)
    which = np.asarray(streams)
    if which.dtype == np.bool_:
        _checks.check_shape("streams", which, B=batch)
    else:
        which = _checks.check_integers("streams", streams)
        if which.ndim > 1:
            raise ValueError(
                "`streams` must be one index or have shape [streams], got "
                f"{list(which.shape)}"
            )
    return np.arange(batch)[which]


class _NativeStream(Stream):
    """A session that calls the native library on its own buffers."""

    backend = "cpu"

    def __init__(
        self, spec: RNNSpec, batch: int, weights: np.ndarray, packed: np.ndarray
    ) -> None:
        super().__init__(spec, batch, weights.dtype)
        # What the library reads has to live as long as the session.
        self._kept = weights, packed
        self._function, self._call = cpu.stream_call(
            spec, batch, weights, packed, self._states
        )
        self._call.steps = 1
        self._call.x, self._call.y = map(cpu.address, (self._step_x, self._step_y))
        self._step = ctypes.byref(self._call)
        self._lengths = cpu.address(self._active)

    def _run_step(self, masked: bool) -> None:
        self._call.seq_lengths = self._lengths if masked else 0
        cpu.raise_error(self._function(self._step))

    def _run_chunk(self, x: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        y = np.empty((*x.shape[:2], self.spec.output_size), self.dtype)
        call = type(self._call).from_buffer_copy(self._call)
        call.steps = x.shape[1]
        call.x, call.y = cpu.address(x), cpu.address(y)
        call.seq_lengths = 0 if lengths is None else cpu.address(lengths)
        cpu.raise_error(self._function(ctypes.byref(call)))
        return y


class _JittedStream(Stream):
    """A session that calls a jitted program, where the native library does not run."""

    def __init__(
        self, spec: RNNSpec, batch: int, weights: Any, backend: Backend | None
    ) -> None:
        super().__init__(spec, batch, np.dtype(weights.dtype))
        self.backend = backend or "xla"
        self._weights = weights
        self._run = _jitted(spec, backend)

    def _run_step(self, masked: bool) -> None:
        x, lengths = self._step_x[:, None], self._active if masked else None
        np.copyto(self._step_y, self._run_chunk(x, lengths)[:, 0])

    def _run_chunk(self, x: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        states = as_state(self._states)
        y, state = self._run(self._weights, x, states, seq_lengths=lengths)
        parts = state if isinstance(state, tuple) else (state,)
        new = [np.asarray(a) for a in parts]
        wholly(lambda: self._write(new))
        return np.array(y)


@ft.lru_cache(maxsize=64)
def _jitted(spec: RNNSpec, backend: Backend | None) -> Callable:
    """Return `rnn` for a spec, which all sessions share and compile once."""
    return jax.jit(ft.partial(rnn, spec, backend=backend))


def stream(
    spec: RNNSpec,
    weights: Float[ArrayLike, " num_params"] | PreparedWeights,
    batch: int,
    *,
    backend: Backend | None = None,
) -> Stream:
    """Open a session of the fused operator; see `ostinato.stream`."""
    check_spec(spec)
    if spec.bidirectional:
        raise ValueError(
            "`spec` must be unidirectional for `stream`, got bidirectional=True; a "
            "reverse direction needs the whole sequence, use `rnn`"
        )
    packed = None
    if isinstance(weights, PreparedWeights):
        weights, packed = weights
    weights = layout.as_flat(weights)
    if not _checks.is_concrete(weights):
        raise TypeError(
            "`weights` must not be traced, as they are under jit; use `rnn_step` there"
        )
    _checks.check_floating("weights", weights, _checks.FLOATS)
    layout.check_weights(weights, spec)
    batch = _checks.check_size("batch", batch)
    backends.check(backend, spec, weights.dtype)
    if backend in (None, "cpu") and not cpu.unsupported_reason(spec, weights.dtype):
        return _NativeStream(spec, batch, *_packed(spec, weights, packed))
    return _JittedStream(spec, batch, weights, backend)


def _packed(spec: RNNSpec, weights: Any, packed: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return weights on the host and packed; those given, if packed on this machine."""
    host = np.asarray(weights)
    if packed is not None:
        packed = np.ascontiguousarray(packed)
        if cpu.is_packed(spec, host.dtype, packed):
            return host, packed

    def pack() -> np.ndarray:
        with jax.default_device(jax.devices("cpu")[0]):
            # Unlike JAX, numpy asks for huge pages: large weights are read faster.
            return np.array(prepare(spec, jnp.asarray(host)).packed)

    return host, _compat.outside_of_traces(pack)
