"""The function `stream` for networks, cells and step functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from .. import _checks
from .._recurrent.arguments import check_state_dtype
from .._recurrent.protocol import Cell
from .._rnn import streaming
from .._rnn.spec import RNNSpec
from .._rnn.streaming import Stream
from .base import params_dtype
from .sessions import StepStream


def stream(
    spec: RNNSpec | Cell | Callable,
    weights: Any,
    batch: int,
    *,
    inputs: Any = None,
    initial_states: Any = None,
    backend: Literal["cpu", "xla"] | None = None,
) -> Stream | StepStream:
    """Open a session that runs a network one step or one chunk at a time, for serving.

    On a CPU with the native library a step is one call of it on buffers of numpy,
    without a dispatch of JAX. Where it does not run the network, a session calls a
    jitted program; its `backend` says which, and of a cell or a step function `why`.

    Args:
        spec: a spec, unidirectional; or a cell or a step function, as for
            `recurrent_net`. Dropout of a spec does not act.
        weights: of a spec, the flat vector `[num_params]` or the result of `prepare`,
            whose memory all sessions share that are opened with it; of a cell or a step
            function its parameters, which are read once: what does not change from step
            to step is computed here. Leaves that are not arrays stay as they are.
        batch: the number of streams that advance together, B.
        inputs: of a cell or a step function, one step of inputs, leaves `[B, ...]`,
            arrays or their shapes and dtypes. None means `[B, input_size]` for a cell
            that has an `input_size`, and else no inputs.
        initial_states: of a step function, leaves `[B, ...]`; a cell has its own.
        backend: None takes the native library wherever it runs the network, also on
            machines with an accelerator.

    Returns:
        A `Stream` for a spec, whose numbers are those of `rnn_step`, with prepared
        weights the same bits; else a `StepStream`, whose numbers are those of one step
        of `recurrent_net`, and those of the step itself up to rounding, because sums
        have another order. Its `t` counts the steps since it was opened, up to
        2^31 - 1, where it stays.

    Raises:
        TypeError: an argument has the wrong type, or `weights` are traced; a spec with
            `inputs` or `initial_states`, or a step function without the latter.
        ValueError: the spec is bidirectional, shapes do not match, or `batch` is less
            than 1.
        NotImplementedError: `backend="cpu"`, and the native loop cannot run the step;
            the message says why.
        ostinato.BackendError: `backend` cannot run the spec; the message says why.

    Between calls, states have the dtype of the weights. In bfloat16 the cell state of
    an LSTM, and `c`, `n` and `m` of an sLSTM, are float32 within a call and rounded
    after it: steps and chunks are equal up to that, and step by step the sum `n` of an
    sLSTM stops growing at 256. Serve long streams of an LSTM in float32 or in chunks,
    and those of an sLSTM in float32.

    Sessions work outside of `jit` and other transformations; inside of them there are
    `rnn_step`, and a step or a cell itself.

    Examples:
        >>> import jax, numpy as np
        >>> import ostinato as ost
        >>> spec = ost.RNNSpec("gru", input_size=3, hidden_size=4)
        >>> weights = ost.init_weights(jax.random.key(0), spec)
        >>> session = ost.stream(spec, weights, batch=2)
        >>> session.step(np.ones((2, 3), np.float32)).shape
        (2, 4)
        >>> session.reset([1])
        >>> session.chunk(np.ones((2, 10, 3), np.float32)).shape
        (2, 10, 4)
        >>> session.state.shape
        (1, 2, 4)
        >>> cell = ost.cells.LayerNormLSTM(3, 4)
        >>> session = ost.stream(cell, cell.init(jax.random.key(0)), batch=2)
        >>> session.step(np.ones((2, 3))).shape
        (2, 4)
    """
    if isinstance(spec, RNNSpec):
        if inputs is not None or initial_states is not None:
            raise TypeError(
                "`inputs` and `initial_states` are for cells and step functions; an "
                "RNNSpec has its own, and a session its `state`"
            )
        return streaming.stream(spec, weights, batch, backend=backend)
    if isinstance(spec, type):
        raise TypeError(
            "`spec` must be an RNNSpec, a cell or a step function, got the class "
            f"{spec.__name__}; make a cell of it"
        )
    if not callable(spec):
        raise TypeError(
            "`spec` must be an RNNSpec, a cell or a step function, got "
            f"{_checks.describe(spec)}"
        )
    batch = _checks.check_size("batch", batch)
    if backend is not None:
        _checks.check_choice("backend", backend, ("cpu", "xla"))
    leaves = jax.tree.leaves((weights, initial_states))
    if not all(map(_checks.is_concrete, leaves)):
        raise TypeError(
            "`weights` and `initial_states` must not be traced, as they are under jit; "
            "call the step itself there"
        )
    return StepStream(
        spec,
        weights,
        batch,
        _inputs(spec, weights, batch, inputs),
        _states(spec, weights, batch, initial_states),
        backend,
    )


def _inputs(network: Any, weights: Any, batch: int, inputs: Any) -> Any:
    """Return shapes and dtypes of the inputs of a step."""
    size = getattr(network, "input_size", None)
    if inputs is None and isinstance(network, Cell) and isinstance(size, int):
        return jax.ShapeDtypeStruct((batch, size), params_dtype(weights))

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if shape[:1] != (batch,):
            raise ValueError(
                f"`inputs{keystr(path)}` must have shape [B, ...] with B = {batch}, "
                f"got {list(shape)}"
            )
        return jax.ShapeDtypeStruct(shape, dtype)

    return tree_map_with_path(one, inputs)


def _states(network: Any, weights: Any, batch: int, states: Any) -> Any:
    """Return the initial states."""
    if states is None:
        if not isinstance(network, Cell):
            hint = ""
            if isinstance(getattr(network, "spec", None), RNNSpec):
                hint = (
                    "; for a layer, give ost.stream the `spec` and `weights` of its "
                    "freeze()"
                )
            raise TypeError(f"`initial_states` must be given for a step function{hint}")
        states = network.initial_state(batch, params_dtype(weights))
    states = jax.tree.map(jnp.asarray, states)
    for path, leaf in tree_flatten_with_path(states)[0]:
        name = f"initial_states{keystr(path)}"
        if leaf.shape[:1] != (batch,):
            raise ValueError(
                f"`{name}` must have shape [B, ...] with B = {batch}, got "
                f"{list(leaf.shape)}"
            )
        check_state_dtype(name, leaf)
    return states
