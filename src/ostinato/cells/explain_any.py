"""The function `explain` for networks, cells and step functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .. import _checks
from .._recurrent.explanation import explain_loop, trace_call, with_defaults
from .._recurrent.net import recurrent_net
from .._recurrent.protocol import Cell
from .._rnn import backends
from .._rnn.backends import Explanation
from .._rnn.spec import RNNSpec
from . import explanation
from .stack import Bidirectional, BothDirections, Stack
from .wrappers import whole_sequence_cell


def explain(
    network: RNNSpec | Cell | Callable,
    x: Any,
    initial_states: Any = None,
    *,
    params: Any = None,
    **options: Any,
) -> Explanation:
    """Say which backend runs a network, and why.

    Derivatives of a network take the same backend, with exceptions that run on xla:
    tangents (`jvp`), anything that is differentiated twice, and gradients where `why`
    says so. Exported functions (`jax.export`) run on xla too, so that any machine can
    run them.

    Args:
        network: an `RNNSpec`, as for `rnn`; or a cell or a step function, as for
            `recurrent_net`.
        x: the inputs, or any object with their `shape` and `dtype`; for a spec the
            dtype is enough. They are taken to be where JAX puts new arrays.
        initial_states: of a step function, as for `recurrent_net`, () if it has none; a
            cell has its own.
        params: of a step function, as for `recurrent_net`; a cell has its own.
        options: the other arguments of `recurrent_net`, for a cell or a function.

    Returns:
        `Explanation(backend, why, rejected)`: of a loop over a step function on the
        cpu, how many operations a step has and what is stored for the gradient; of one
        on xla, the operation that the cpu loop lacks, and its line. Of a `Stack`, or of
        a `Bidirectional` cell whose directions run one after the other, the
        explanations of its cells in `why`, and all of their backends in `backend`.

    Raises:
        TypeError: `network` is none of these, `x` has no shape or no dtype, or a step
            function has no `initial_states`.
        ostinato.BackendError: no backend can run the spec here.
        Exception: what `recurrent_net` raises for the arguments, such as a
            `NotImplementedError` of a named backend that cannot run the step.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> def step(w, h, x, t):
        ...     h = jnp.tanh(x + h @ w)
        ...     return h, h
        >>> x, h_0, w = jnp.ones((8, 100, 4)), jnp.zeros((8, 4)), jnp.eye(4)
        >>> told = ost.explain(step, x, h_0, params=w)
        >>> told.backend in ("cpu", "xla")
        True
    """
    if isinstance(network, RNNSpec):
        if options or initial_states is not None or params is not None:
            raise TypeError("an RNNSpec has no further arguments; see ostinato.rnn")
        return backends.explain(network, x)
    if not callable(network):
        raise TypeError(
            "`network` must be an RNNSpec, a cell or a step function, got "
            f"{_checks.describe(network)}"
        )
    options = with_defaults(options)
    if isinstance(network, Cell):
        batch, dtype = _batch_and_dtype(x, options["time_major"])
        if initial_states is None:
            initial_states = network.initial_state(batch, dtype)
        if params is None:
            init = lambda key: network.init(key, dtype)  # noqa: E731
            params = jax.eval_shape(init, jax.random.key(0))
    elif initial_states is None:
        raise TypeError(
            "`initial_states` must be given for a step function, () if it has none"
        )

    def call(x: Any, states: Any, params: Any) -> Any:
        return recurrent_net(network, x, states, params=params, **options)

    trace_call(call, x, initial_states, params)  # raises what it raises
    return _explain_steps(network, x, initial_states, params, options)


def _batch_and_dtype(x: Any, time_major: bool) -> tuple[Any, Any]:
    """Return the number of sequences of the inputs of a cell, and their dtype."""
    first = next(iter(jax.tree.leaves(x)), None)
    shape, dtype = getattr(first, "shape", ()), getattr(first, "dtype", None)
    if len(shape) < 2 or dtype is None:
        order = "[T, B, ...]" if time_major else "[B, T, ...]"
        raise TypeError(
            f"`x` must be inputs {order}, or objects with their `shape` and `dtype`, "
            f"got {_checks.describe(x)}"
        )
    return shape[1 if time_major else 0], jax.dtypes.canonicalize_dtype(dtype)


def _explain_steps(
    network: Cell | Callable, x: Any, states: Any, params: Any, options: dict[str, Any]
) -> Explanation:
    """Explain a cell or a step function, with all options of `recurrent_net`."""
    if isinstance(network, Cell):
        told = explanation.explain_whole(network, x, options)
        if not isinstance(told, str):
            return told
        calls = _calls_of_cells(whole_sequence_cell(network), x, options)
        if calls:
            told = {
                name: _explain_steps(cell, inputs, states[n], params[n], own)
                for n, (name, cell, inputs, own) in enumerate(calls)
            }
            return _combined(told)
    return explain_loop(network, x, states, params, options)


def _calls_of_cells(cell: Cell, x: Any, options: dict[str, Any]) -> list[tuple]:
    """Return name, cell, inputs and options of the cells that run one after another.

    None do for one layer in one direction, nor for a `Stack` all of whose layers run at
    each step.
    """
    if isinstance(cell, Bidirectional):
        backward = options | {"reverse": True}
        return [
            (name, each, x, own)
            for name, each, own in zip(
                BothDirections._fields, cell.both, (options, backward), strict=True
            )
        ]
    if not isinstance(cell, Stack) or not cell.runs_layers(
        options["recompute"], options["segment_length"], options["window"]
    ):
        return []
    widths = [cell.input_size, *(below.output_size for below in cell.cells[:-1])]
    return [
        (
            f"cells[{n}]",
            each,
            jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype),
            options,
        )
        for n, (each, width) in enumerate(zip(cell.cells, widths, strict=True))
    ]


def _combined(told: dict[str, Explanation]) -> Explanation:
    """Join the explanations of cells that run one after the other."""
    taken = dict.fromkeys(each.backend for each in told.values())
    lines = (f"{name}: {each}".replace("\n", "\n  ") for name, each in told.items())
    rejected: dict[str, dict[str, list[str]]] = {}  # backend, reason, cells
    for name, each in told.items():
        for backend, reason in each.rejected.items():
            rejected.setdefault(backend, {}).setdefault(reason, []).append(name)
    return CellsExplanation(
        " and ".join(taken),
        "\n".join(["cell after cell", *lines]),
        {
            backend: "; ".join(f"{', '.join(names)}: {r}" for r, names in said.items())
            for backend, said in rejected.items()
        },
    )


class CellsExplanation(Explanation):
    """What runs each of several cells; their reasons are in its text."""

    def __str__(self) -> str:
        return f"{self.backend}: {self.why}"
