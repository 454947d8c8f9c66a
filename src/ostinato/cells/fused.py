"""Whole sequences of the standard cells on the fused operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks
from .._recurrent.loop import Steps, in_segments
from .._recurrent.net import finish, time_first
from .._recurrent.protocol import RecurrentOutput, SequenceOptions
from .._rnn.api import rnn
from .._rnn.cell import LayerWeights
from .._rnn.layout import pack_weights
from .._typing import Array


def refusal(
    *,
    seq_lengths: Any,
    reverse: bool,
    recompute: Any,
    return_all_states: bool,
    window: int,
    **others: Any,
) -> str | None:
    """Why the fused operator would not compute what was asked for; None if it would.

    Takes the fields of `SequenceOptions`; `others` do not matter.
    """
    if recompute is not True and not {*recompute} <= {"gates"}:
        return "the fused operator can run nothing again but `gates`"
    if window != 1:
        return "the fused operator sees one past state, not a `window` of them"
    if return_all_states:
        return "the fused operator does not return the states of every step"
    if reverse and seq_lengths is not None:
        return "the fused operator runs no reversed rows of different lengths"
    return None


def refuses(options: SequenceOptions) -> bool:
    """Whether `refusal` has a reason."""
    return refusal(**options._asdict()) is not None


def run(
    cell: Any,
    params: LayerWeights,
    inputs: Any,
    initial_states: Any,
    options: SequenceOptions,
) -> RecurrentOutput:
    """`rnn` over one layer, with the options' meaning; `refusal` was asked before."""
    weights = pack_weights([_with_forget_bias(cell, params)], cell.spec)

    def layer(x: Array, states: Any, time_axis: int, **rows: Any) -> tuple[Any, Array]:
        if options.reverse:
            x = jnp.flip(x, time_axis)
        y, states = rnn(
            cell.spec,
            weights,
            x,
            jax.tree.map(lambda a: a[None], states),
            time_major=time_axis == 0,
            recompute=bool(options.recompute),
            **rows,
        )
        if options.reverse:
            y = jnp.flip(y, time_axis)
        return jax.tree.map(lambda a: a[0], states), y

    if options.segment_length is not None and options.length:

        def segment(states: Any, steps: Steps) -> tuple[Any, Array]:
            lengths = None
            if steps.valid is not None:
                lengths = jnp.sum(steps.valid, axis=0, dtype=jnp.int32)
            rows = {"seq_lengths": lengths, "resets": steps.reset}
            return layer(steps.inputs, states, 0, **rows)

        steps, size = time_first(inputs, options), options.segment_length
        states, y = in_segments(
            segment, initial_states, steps, size, options.reverse, None
        )
        return finish(states, y, None, options)
    states, y = layer(
        inputs,
        initial_states,
        0 if options.time_major else 1,
        seq_lengths=options.seq_lengths,
        resets=options.resets,
        padding=options.padding,
    )
    return RecurrentOutput(_without_empty_rows(y, options), states)


def alike(*cells: Any) -> bool:
    """Whether the cells are one network to the fused operator."""
    specs = [getattr(cell, "spec", None) for cell in cells]
    return specs[0] is not None and all(spec == specs[0] for spec in specs)


def run_both(
    cells: Any, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
) -> RecurrentOutput:
    """`rnn` over one bidirectional layer; `alike` and `refusal` were asked before."""
    layers = [
        _with_forget_bias(cell, cell.prepare(p))
        for cell, p in zip(cells, params, strict=True)
    ]
    spec = dataclasses.replace(cells[0].spec, bidirectional=True)
    y, states = rnn(
        spec,
        pack_weights(layers, spec),
        _checks.check_array("inputs", inputs),
        jax.tree.map(lambda *parts: jnp.stack(parts), *initial_states),
        seq_lengths=options.seq_lengths,
        padding=options.padding,
        time_major=options.time_major,
        recompute=bool(options.recompute),
    )
    states = type(initial_states)(
        *(jax.tree.map(lambda a, n=n: a[n], states) for n in range(2))
    )
    return RecurrentOutput(_without_empty_rows(y, options), states)


def _without_empty_rows(y: Array, options: SequenceOptions) -> Array:
    """Zeros for rows of length 0, which have no output to hold; `rnn` holds `h_0`."""
    if options.seq_lengths is None or options.padding != "hold":
        return y
    time_axis = 0 if options.time_major else 1
    empty = jnp.expand_dims(options.seq_lengths == 0, (time_axis, 2))
    return jnp.where(empty, jnp.zeros((), y.dtype), y)


def _with_forget_bias(cell: Any, params: LayerWeights) -> LayerWeights:
    bias = getattr(cell, "forget_bias", 0.0)
    if not bias:
        return params
    forget = slice(cell.hidden_size, 2 * cell.hidden_size)
    return params._replace(b_ih=params.b_ih.at[forget].add(bias))
