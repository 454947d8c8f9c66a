"""From the results of the operator to the output of `rnn`: padding and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .. import _padding
from .._padding import select
from .._typing import Array, Float, Padding
from .arguments import Arguments
from .call import Operands, Outputs, RNNCall


class RNNOutput(NamedTuple):
    """The last layer's outputs `y`, and `state`.

    The state is `h`, `(h, c)` for an LSTM, and `(h, c, n, m)` for an sLSTM.
    """

    y: Float[Array, "*B T D*S"]
    state: Any


def make_output(arguments: Arguments, outputs: Outputs, padding: Padding) -> RNNOutput:
    """Apply the padding policy, and remove the batch axis of a single sequence."""
    call, operands, single = arguments[:3]
    if arguments.valid is None:
        y, states = _pad(call, operands, outputs, padding)
    else:
        y, states = _spread(arguments, outputs, padding)
    if single:
        y, states = jnp.squeeze(y, 1 - call.time_axis), [s[:, 0] for s in states]
    return RNNOutput(y, as_state(states))


def as_state(states: Sequence[Any]) -> Any:
    """Return the state as users see it: one array, or a tuple of several."""
    return states[0] if len(states) == 1 else tuple(states)


def _pad(
    call: RNNCall, operands: Operands, outputs: Outputs, padding: Padding
) -> Outputs:
    """Apply the padding policy to results that are 0 past the end; linear in them."""
    lengths = operands.seq_lengths
    if lengths is None or padding == "zero":
        return outputs
    if padding == "drop":
        steps, _ = call.sizes(operands)
        return outputs._replace(
            states=_padding.drop(outputs.states, lengths, steps, batch_axis=1)
        )
    held = _padding.hold(
        outputs.y, lengths, call.time_axis, _initial_output(call, operands)
    )
    return outputs._replace(y=held)


def _spread(arguments: Arguments, outputs: Outputs, padding: Padding) -> Outputs:
    """Return the results of valid steps at their places, and the final states."""
    call, operands, _, valid, reset_at_end = arguments
    assert valid is not None
    held = _initial_output(call, operands) if padding == "hold" else None
    y, states = valid.spread(outputs.y, call.time_axis, held), outputs.states
    if reset_at_end is not None:
        states = select(~reset_at_end[None], states)
    return Outputs(y, states)


def _initial_output(call: RNNCall, operands: Operands) -> Array:
    """Return what the last layer holds before any step, `[B, D*S]`."""
    directions = call.spec.num_directions
    return jnp.concatenate(list(operands.states[0][-directions:]), axis=-1)
