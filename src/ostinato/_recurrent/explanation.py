"""What runs the loop over the steps of a cell or a function, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._rnn.backends import Explanation, place_of
from .._step import description
from .._step.refusal import NAMED
from .._step.scan import PreparedLoop, RunsAsScan
from .arguments import check_arguments
from .net import make_loop_inputs, recurrent_net
from .stepping import StepLoop

_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(recurrent_net).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "params"
}
_ARRAYS = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct


def trace_call(call: Callable, inputs: Any, states: Any, params: Any) -> None:
    """Trace `call(inputs, states, params)`; parameters that are no arrays stay so.

    All may be arrays, or their shapes and dtypes.
    """
    arrays = jax.tree.map(lambda a: a if isinstance(a, _ARRAYS) else None, params)

    def trace(inputs: Any, states: Any, arrays: Any) -> tuple:
        given = jax.tree.map(lambda own, a: own if a is None else a, params, arrays)
        call(inputs, states, given)
        return ()

    jax.eval_shape(trace, inputs, states, arrays)


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return all options of `recurrent_net`; raise TypeError for others."""
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"recurrent_net has no argument {', '.join(sorted(unknown))}")
    return _DEFAULTS | options


class LoopExplanation(Explanation):
    """The loop that runs a step function, and why.

    As text, it is what the native loop or the kernel runs, or what keeps them from
    running the step.
    """

    def __str__(self) -> str:
        if self.backend in NAMED:
            return f"{self.backend} loop: {self.why}"
        reasons = "; ".join(self.rejected.values())
        return f"{self.backend}: {reasons}\n{self.why}"


def explain_loop(
    step: Any, inputs: Any, initial_states: Any, params: Any, options: dict[str, Any]
) -> Explanation:
    """Say what runs the loop of `recurrent_net(step, inputs, ...)`, and why.

    Args:
        step: the step function or the cell.
        inputs: as for `recurrent_net`, or of their shapes and dtypes.
        initial_states: as for `recurrent_net`, or of their shapes and dtypes.
        params: as for `recurrent_net`, or of their shapes and dtypes.
        options: the other arguments of `recurrent_net`, of `with_defaults`.
    """
    options = dict(options)
    outputs_with_grads = options.pop("outputs_with_grads")
    found: list[tuple[PreparedLoop, StepLoop]] = []

    def prepare_loop(inputs: Any, states: Any, params: Any) -> None:
        inputs, states, checked = check_arguments(step, inputs, states, **options)
        loop = StepLoop(step, params, checked, outputs_with_grads)
        found.append((loop.prepare(states, make_loop_inputs(inputs, checked)), loop))

    try:
        trace_call(prepare_loop, inputs, initial_states, params)
    except RunsAsScan as reason:
        why = "the loop runs as `lax.scan` of the step"
        return LoopExplanation("xla", why, {"cpu": str(reason)})
    prepared, loop = found[0]
    chosen = loop.options
    static = prepared.loop(
        chosen.length,
        chosen.length,
        chosen.reverse,
        loop.policy,
        chosen.seq_lengths is not None,
        chosen.backend,
    )
    platform = place_of(jax.tree.leaves((inputs, initial_states))[0]).platform
    why = "step by step, products of inputs before the loop and of gradients after it"
    if platform == "cuda":
        told, reason = description.describe_on_gpus(static, prepared.origins)
        if reason is not None:
            return LoopExplanation("xla", why, {"cuda": reason})
        return LoopExplanation("cuda", told, {})
    if platform != "cpu":
        return LoopExplanation("xla", why, {"cpu": f"the arrays are on {platform}"})
    told, reason = description.describe(static, prepared.origins)
    if reason is not None:
        return LoopExplanation("xla", why, {"cpu": reason})
    return LoopExplanation("cpu", told, {})
