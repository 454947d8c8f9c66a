"""Explicit passes, for those who write their own gradients.

`rnn_forward` returns a reserve, from which `rnn_backward` computes gradients; the
functions in cell_passes.py do the same for one step. All functions are pure, and JAX
can differentiate them again.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._typing import Array, Float, Padding, State
from . import layout, primitive
from .arguments import Arguments, Given, check_arguments, make_arguments
from .call import Operands, Outputs, Residuals, RNNCall
from .masking import ValidSteps
from .output import RNNOutput, as_state, make_output
from .prepared import PreparedWeights
from .spec import RNNSpec, check_spec, state_names


@ft.partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands", "residuals", "valid", "reset_at_end"],
    meta_fields=["call", "padding", "single"],
)
@dataclasses.dataclass(frozen=True)
class RNNReserve:
    """The values of a forward pass that `rnn_backward` reads; an opaque pytree."""

    operands: Operands
    residuals: Residuals
    valid: ValidSteps | None
    reset_at_end: Array | None
    call: RNNCall
    padding: Padding
    single: bool


class RNNGrads(NamedTuple):
    """Gradients, each in the shape of the argument of the same name."""

    x: Float[Array, "*B T I"]
    weights: Float[Array, " num_params"]
    initial_state: State


def rnn_forward(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    x: Float[Array, "*B T I"],
    initial_state: State | None = None,
    *,
    padding: Padding = "zero",
    **options: Any,
) -> tuple[RNNOutput, RNNReserve]:
    """Run `rnn` and also return the reserve for `rnn_backward`.

    Args:
        spec: as in `rnn`.
        weights: as in `rnn`.
        x: as in `rnn`.
        initial_state: as in `rnn`.
        padding: as in `rnn`.
        **options: the other keywords of `rnn`. With `recompute=True` the reserve holds
            no gates.

    Returns:
        `(output, reserve)`: the result of `rnn`, and the reserve.

    Raises:
        TypeError, ValueError, ostinato.BackendError: as in `rnn`.

    Holds under the same transformations as `rnn`; gradients pass through the reserve
    too.
    """
    for name in options.keys() - _OPTIONS:
        raise TypeError(f"rnn_forward() got an unexpected keyword argument {name!r}")
    call, given = check_arguments(
        spec, weights, x, initial_state, padding=padding, **options
    )
    return _forward(dataclasses.replace(call, save=True), padding, given)


_OPTIONS = inspect.signature(check_arguments).parameters.keys() - {"names"}


@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _forward(
    call: RNNCall, padding: Padding, given: Given
) -> tuple[RNNOutput, RNNReserve]:
    arguments = make_arguments(call, given)
    operands = arguments.operands
    outputs, saved = primitive.run(call, operands)
    assert saved is not None
    reserve = RNNReserve(
        operands._replace(prepared=None),
        Residuals(outputs.y, saved),
        arguments.valid,
        arguments.reset_at_end,
        call,
        padding,
        arguments.single,
    )
    return make_output(arguments, outputs, padding), reserve


def rnn_backward(
    spec: RNNSpec,
    weights: Float[Array, " num_params"] | PreparedWeights,
    reserve: RNNReserve,
    dy: Float[Array, "*B T D*S"] | None,
    dstate: State | None = None,
) -> RNNGrads:
    """Pull cotangents of the outputs back to input, weights and initial state.

    Args:
        spec: the spec that the forward pass ran.
        weights: the weights that the forward pass ran, `[num_params]`.
        reserve: the reserve that `rnn_forward` returned.
        dy: cotangent of `y`, in its shape and dtype; None means zeros.
        dstate: cotangent of `state`: an array, or a tuple such as `(dh, dc)`; None:
            zeros.

    Returns:
        `RNNGrads(x, weights, initial_state)`; the last is present even if the initial
        state of the forward pass was None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape is wrong, or `spec` is not that of the reserve.

    Holds under the same transformations as `rnn`.
    """
    check_spec(spec)
    if not isinstance(reserve, RNNReserve):
        raise TypeError(
            "`reserve` must be what rnn_forward returned, got "
            f"{_checks.describe(reserve)}"
        )
    if spec != reserve.call.spec:
        raise ValueError(
            f"`spec` must be the reserve's, {reserve.call.spec}, got {spec}"
        )
    if isinstance(weights, PreparedWeights):
        weights = weights.weights
    weights = layout.as_flat(weights)
    layout.check_weights(weights, spec)
    _checks.check_same_dtype(**{"reserve": reserve.operands.x, "weights": weights})
    call, single = reserve.call, reserve.single
    operands = reserve.operands._replace(weights=weights)

    # The cotangents go back through the padding policy, then through the operator.
    def from_outputs(outputs: Outputs, h_0: Array) -> RNNOutput:
        at = operands._replace(states=(h_0, *operands.states[1:]))
        arguments = Arguments(call, at, single, reserve.valid, reserve.reset_at_end)
        return make_output(arguments, outputs, reserve.padding)

    given = Outputs(reserve.residuals.y, operands.states)
    zeros = jax.tree.map(jnp.zeros_like, given)  # on the devices where those are
    out, pull = jax.vjp(from_outputs, zeros, jnp.zeros_like(operands.states[0]))
    bar, dh_held = pull(_cotangents(spec, out, dy, dstate))
    grads = primitive.run_backward(call, operands, reserve.residuals, bar)

    dh, *others = grads.states
    dx, dstates = grads.x, [dh + dh_held, *others]
    valid = reserve.valid
    if valid is not None:  # the steps were gathered by a linear function of x
        _, scatter = jax.vjp(lambda x: valid.gather(x, call.time_axis), operands.x)
        (dx,) = scatter(dx)
    if single:
        dx = jnp.squeeze(dx, 1 - call.time_axis)
        dstates = [d[:, 0] for d in dstates]
    return RNNGrads(dx, grads.weights, as_state(dstates))


def _cotangents(spec: RNNSpec, out: RNNOutput, dy: Any, dstate: Any) -> RNNOutput:
    """Return `dy` and `dstate`, checked against the outputs `out`."""
    dy = _cotangent("dy", dy, out.y)
    names = state_names(spec)
    if not isinstance(out.state, tuple):
        return RNNOutput(dy, _cotangent("dstate", dstate, out.state))
    if dstate is None:
        dstate = (None,) * len(names)
    if not (isinstance(dstate, (tuple, list)) and len(dstate) == len(names)):
        wanted = ", ".join(f"d{name}" for name in names)
        raise TypeError(
            f"`dstate` must be ({wanted}) for mode {spec.mode!r}, got "
            f"{_checks.describe(dstate)}"
        )
    parts = zip(dstate, out.state, strict=True)
    return RNNOutput(
        dy, tuple(_cotangent(f"dstate[{i}]", d, s) for i, (d, s) in enumerate(parts))
    )


def _cotangent(name: str, value: Any, like: Array) -> Array:
    if value is None:
        return jnp.zeros_like(like)
    value = _checks.check_array(name, value)
    if value.shape != like.shape:
        raise ValueError(f"`{name}` must have shape {like.shape}, got {value.shape}")
    if value.dtype != like.dtype:
        raise TypeError(f"`{name}` must have dtype {like.dtype}, got {value.dtype}")
    return value
