"""The function `explain`, which says how `recurrent_net` would run a cell."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .. import _checks
from .._linear import cpu, cuda
from .._linear.call import Recurrence
from .._recurrent.protocol import Cell
from .._rnn import backends
from .._rnn.backends import Explanation
from . import fused
from .linear_base import LinearCell
from .stack import Bidirectional, Stack
from .wrappers import Dropout


def explain(
    cell: Cell,
    inputs: Any,
    *,
    seq_lengths: Any = None,
    reverse: bool = False,
    recompute: Any = (),
    segment_length: Any = None,
    return_all_states: bool = False,
    window: int = 1,
) -> Explanation:
    """Say whether `recurrent_net` runs the cell on the fused operator, and why not.

    Args:
        cell: one layer; a `Stack` runs layer after layer, so ask for each.
        inputs: the inputs of the cell, or any object with their `dtype`.
        seq_lengths: as for `recurrent_net`. Its arguments that are missing here do not
            matter.
        reverse: as for `recurrent_net`.
        recompute: as for `recurrent_net`.
        segment_length: as for `recurrent_net`.
        return_all_states: as for `recurrent_net`.
        window: as for `recurrent_net`.

    Returns:
        `Explanation(backend, why, rejected)`: that of `ostinato.explain` for the fused
        operator, or `xla`, with the reason why the cell runs there step by step.

    Raises:
        TypeError: `cell` is not a cell, or is a `Stack`.
    """
    if not isinstance(cell, Cell) or isinstance(cell, Stack):
        raise TypeError(
            "`cell` must be a cell of one layer, got "
            f"{_checks.describe(cell)}; of a Stack, explain each of its `cells`"
        )
    if isinstance(cell, LinearCell):
        return _explain_linear(cell, inputs, window, segment_length)
    spec = _fused_spec(cell)
    if spec is None:
        reason = f"there is no fused operator for {type(cell).__name__}"
    else:
        reason = fused.unsupported_reason(
            seq_lengths=seq_lengths,
            reverse=reverse,
            recompute=recompute,
            segment_length=segment_length,
            return_all_states=return_all_states,
            window=window,
        )
        if reason is None:
            return backends.explain(spec, inputs)
    rejected = {"cuda": reason, "cpu": reason}
    return Explanation("xla", "step by step, in a loop over time", rejected)


def _explain_linear(
    cell: LinearCell, inputs: Any, window: int, segment_length: Any
) -> Explanation:
    """Say whether a linear cell runs as one recurrence, and where."""
    if window != 1 or segment_length is not None:
        reason = "one linear recurrence has neither a `window` nor segments"
        why = "step by step, in a loop over time"
        return Explanation("xla", why, {"cuda": reason, "cpu": reason})
    why = "one linear recurrence over all steps"
    rejected = {}
    state = jax.eval_shape(lambda: cell.initial_state(1, inputs.dtype))
    sizes = getattr(inputs, "shape", (1, 1, 1))[:2]
    b = jax.ShapeDtypeStruct((*sizes, *state.shape[1:]), state.dtype)
    call, platform = Recurrence(), backends.place_of(inputs).platform
    for name, kernels in (("cuda", cuda), ("cpu", cpu)):
        reason = kernels.unsupported_reason(call, b)
        if reason is None and platform != name:
            reason = f"it runs on the {name}, and `inputs` is on the {platform}"
        if reason is None and kernels is cuda:
            reason = cuda.unmeasured_reason() or cuda.known_failure(call, b)
        if reason is None and kernels is cuda:
            why += f" on {cuda.describe(call, b)}"
        if reason is None:
            return Explanation(name, why, rejected)
        rejected[name] = reason
    return Explanation("xla", why, rejected)


def _fused_spec(cell: Any) -> Any:
    """Return the spec with which the fused operator runs the cell, or None."""
    if isinstance(cell, Dropout) and cell.masks is None:
        return _fused_spec(cell.cell)
    if isinstance(cell, Bidirectional):
        same_spec = fused.have_same_spec(*cell.both)
        spec = _fused_spec(cell.forward)
        return dataclasses.replace(spec, bidirectional=True) if same_spec else None
    return getattr(cell, "spec", None)
