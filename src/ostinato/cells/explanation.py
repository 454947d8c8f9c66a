"""The function `explain`, which says how `recurrent_net` would run a cell."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from .. import _checks
from .._linear import cuda, lowering
from .._linear.call import Recurrence
from .._recurrent.explanation import with_defaults
from .._recurrent.protocol import Cell, overrides_step
from .._rnn import backends
from .._rnn import cuda as rnn_cuda
from .._rnn.backends import Explanation
from .._rnn.spec import RNNSpec
from . import fused
from .linear_base import LinearCell, stepping_reason
from .stack import Bidirectional, Stack
from .wrappers import whole_sequence_cell


def explain(cell: Cell, inputs: Any, **options: Any) -> Explanation:
    """Say whether one operator runs all steps of a cell, and why not.

    Of a cell that runs step by step, `ostinato.explain` says which loop runs it, with
    the native library, too; here that counts as `xla`.

    Args:
        cell: one layer; `ostinato.explain` takes a `Stack`, too.
        inputs: the inputs of the cell, or any object with their `dtype`.
        options: the other arguments of `recurrent_net`.

    Returns:
        `Explanation(backend, why, rejected)`: that of `ostinato.explain` for the
        operator, or `xla` with the reason why the cell runs step by step.

    Raises:
        TypeError: `cell` is not a cell, or is a `Stack`; `recurrent_net` has no such
            argument.
        ostinato.BackendError: `backend` cannot run a cell that runs whole sequences.
    """
    if not isinstance(cell, Cell) or isinstance(cell, Stack):
        raise TypeError(
            "`cell` must be a cell of one layer, got "
            f"{_checks.describe(cell)}; `ostinato.explain` takes a Stack"
        )
    told = explain_whole(cell, inputs, with_defaults(options))
    if not isinstance(told, str):
        return told
    why = "step by step, in a loop over time"
    return Explanation("xla", why, {"cuda": told, "cpu": told})


def explain_whole(
    cell: Cell, inputs: Any, options: dict[str, Any]
) -> Explanation | str:
    """Say what runs all steps of a cell at once, or why it runs step by step.

    Args:
        cell: the cell.
        inputs: its inputs, or any object with their `dtype`.
        options: all other arguments of `recurrent_net`.

    Raises:
        ostinato.BackendError: `backend` cannot run the cell.
    """
    cell = whole_sequence_cell(cell)
    options = options | {"recompute": options["recompute"] or ()}
    del options["outputs_with_grads"]
    if overrides_step(cell):
        return f"{type(cell).__name__} has a step of its own"
    if isinstance(cell, LinearCell):
        return stepping_reason(**options) or _explain_linear(cell, inputs, options)
    spec = _fused_spec(cell)
    if spec is None:
        return f"there is no fused operator for {type(cell).__name__}"
    reason = fused.unsupported_reason(**options)
    return reason or _explain_operator(spec, inputs, options["backend"])


def _explain_operator(spec: RNNSpec, inputs: Any, backend: str | None) -> Explanation:
    """Say what runs the fused operator, of which `backend` may be None or "cuda"."""
    if backend is None:
        return backends.explain(spec, inputs)
    dtype, place = np.dtype(inputs.dtype), backends.place_of(inputs)
    backends.choose(spec, dtype, place, backend, x=inputs)  # raises if it cannot
    return Explanation(backend, f"asked for, {rnn_cuda.describe(spec, inputs)}", {})


def _explain_linear(
    cell: LinearCell, inputs: Any, options: dict[str, Any]
) -> Explanation:
    """Say where a linear cell runs as one recurrence."""
    why = "one linear recurrence over all steps"
    dtype = jax.dtypes.canonicalize_dtype(inputs.dtype)
    state = jax.eval_shape(lambda: cell.initial_state(1, dtype))
    sizes = getattr(inputs, "shape", (1, 1, 1))[:2]
    b = jax.ShapeDtypeStruct((*sizes, *state.shape[1:]), state.dtype)
    named, platform = options["backend"], backends.place_of(inputs).platform
    call = Recurrence(time_major=options["time_major"], backend=named)
    asked = [name for name in lowering.KERNELS if named in (None, name)]
    rejected = {}
    for name in asked:
        reason = lowering.reason_against(name, call, b, platform, cuda.known_failure)
        if reason is None:
            on = (
                f" on {cuda.describe(call, b)}"
                if lowering.KERNELS[name] is cuda
                else ""
            )
            return Explanation(name, why + on, rejected)
        rejected[name] = reason
    if named is not None and named in rejected:
        raise lowering.cannot(named, rejected[named])
    return Explanation("xla", why, rejected)


def _fused_spec(cell: Any) -> Any:
    """Return the spec with which the fused operator runs the cell, or None."""
    if not isinstance(cell, Bidirectional):
        return getattr(cell, "spec", None)
    if not fused.have_same_spec(*cell.both):
        return None
    return dataclasses.replace(cell.both.forward.spec, bidirectional=True)
