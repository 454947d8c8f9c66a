"""Runs of the standard cells over whole sequences on the fused operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _padding
from .._recurrent.loop import LoopInputs, run_in_segments
from .._recurrent.net import make_loop_inputs, make_output
from .._recurrent.protocol import RecurrentOutput, SequenceOptions, overrides_step
from .._rnn.accumulation import widen
from .._rnn.api import rnn
from .._rnn.cell import LayerWeights
from .._rnn.layout import gate_rows, pack_weights
from .._rnn.output import as_state
from .._typing import Array, Padding
from .base import check_inputs


def unsupported_reason(
    *,
    seq_lengths: Any,
    reverse: bool,
    recompute: Any,
    return_all_states: bool,
    window: int,
    resets: Any = None,
    time_major: bool = False,
    padding: str = "hold",
    segment_length: Any = None,
    length: Any = None,
    batch: Any = None,
    backend: str | None = None,
    **unknown: Any,
) -> str | None:
    """Return why the fused operator cannot compute a call; None if it can.

    The arguments are the fields of `SequenceOptions`. The operator supports every value
    of those with a default here.
    """
    if backend not in (None, "cuda"):  # which has kernels of the operator alone
        return "`backend` asks for a loop over the step"
    if recompute is not True and not {*recompute} <= {"gates"}:
        return "the fused operator recomputes nothing but `gates`"
    if window != 1:
        return "the fused operator sees one past state, not a `window` of them"
    if return_all_states:
        return "the fused operator does not return the states of every step"
    if reverse and seq_lengths is not None:
        return "the fused operator does not reverse sequences of different lengths"
    if unknown:
        return f"the fused operator does not know the option `{next(iter(unknown))}`"
    return None


def supports(options: SequenceOptions) -> bool:
    """Return whether the fused operator can compute a call with these options."""
    return unsupported_reason(**options._asdict()) is None


def run(
    cell: Any,
    params: LayerWeights,
    inputs: Any,
    initial_states: Any,
    options: SequenceOptions,
) -> RecurrentOutput:
    """Run `rnn` over one layer with options that `supports` accepts."""
    weights = pack_weights([_with_forget_bias(cell, params)], cell.spec)

    def layer(
        x: Array, states: Any, time_axis: int, **others: Any
    ) -> tuple[Any, Array]:
        if options.reverse:
            x = jnp.flip(x, time_axis)
        y, states = rnn(
            cell.spec,
            weights,
            x,
            jax.tree.map(lambda a: a[None], states),
            time_major=time_axis == 0,
            recompute=bool(options.recompute),
            backend="cuda" if options.backend == "cuda" else None,
            **others,
        )
        if options.reverse:
            y = jnp.flip(y, time_axis)
        return jax.tree.map(lambda a: a[0], states), y

    if options.segment_length is not None and options.length:

        def segment(states: Any, steps: LoopInputs) -> tuple[Any, Array]:
            lengths = None
            if steps.valid is not None:
                lengths = jnp.sum(steps.valid, axis=0, dtype=jnp.int32)
            return layer(
                steps.inputs, states, 0, seq_lengths=lengths, resets=steps.reset
            )

        steps, size = make_loop_inputs(inputs, options), options.segment_length
        states, y = run_in_segments(
            segment, initial_states, steps, size, options.reverse, None
        )
        return make_output(states, y, None, options)
    states, y = layer(
        inputs,
        initial_states,
        0 if options.time_major else 1,
        seq_lengths=options.seq_lengths,
        resets=options.resets,
        padding=_padding_of_rnn(options),
    )
    return RecurrentOutput(_hold(y, options), states)


def have_same_spec(*cells: Any) -> bool:
    """Return whether the fused operator runs all cells with the same spec."""
    specs = [
        None if overrides_step(cell) else getattr(cell, "spec", None) for cell in cells
    ]
    return specs[0] is not None and all(spec == specs[0] for spec in specs)


def run_both(
    cells: Any, params: Any, inputs: Any, initial_states: Any, options: SequenceOptions
) -> RecurrentOutput:
    """Run `rnn` over one bidirectional layer; see `have_same_spec` and `supports`."""
    layers, first = [], []
    for cell, p, states in zip(cells, params, initial_states, strict=True):
        layer = cell.prepare(p)
        inputs = check_inputs(inputs, cell.input_size, params=layer.w_ih)
        first.append(cell.unpack(states, options.batch, layer))
        layers.append(_with_forget_bias(cell, layer))
    spec = dataclasses.replace(cells[0].spec, bidirectional=True)
    y, states = rnn(
        spec,
        pack_weights(layers, spec),
        inputs,
        as_state([jnp.stack(parts) for parts in zip(*first, strict=True)]),
        seq_lengths=options.seq_lengths,
        padding=_padding_of_rnn(options),
        time_major=options.time_major,
        recompute=bool(options.recompute),
        backend="cuda" if options.backend == "cuda" else None,
    )
    states = type(initial_states)(
        *(jax.tree.map(lambda a, n=n: a[n], states) for n in range(2))
    )
    return RecurrentOutput(_hold(y, options), states)


def _padding_of_rnn(options: SequenceOptions) -> Padding:
    """Return the policy for `rnn`, whose "hold" fills empty sequences with `h_0`."""
    return "zero" if options.padding == "hold" else options.padding


def _hold(y: Array, options: SequenceOptions) -> Array:
    if options.seq_lengths is None or options.padding != "hold":
        return y
    return _padding.hold(y, options.seq_lengths, 0 if options.time_major else 1)


def _with_forget_bias(cell: Any, params: LayerWeights) -> LayerWeights:
    """Return weights whose two biases add up to those of a cell and its constant.

    Of 16 bits, the second one has what the first has no digits for.
    """
    constant = getattr(cell, "forget_bias", 0.0)
    if not constant:
        return params
    rows, dtype = gate_rows(cell.spec, "f"), params.b_ih.dtype
    total = widen(params.b_ih[rows]) + widen(params.b_hh[rows]) + constant
    info = jnp.finfo(dtype)
    first = lax.reduce_precision(total, info.nexp, info.nmant)
    rest = jnp.where(jnp.isfinite(first), total - first, 0)  # inf - inf is NaN
    return params._replace(
        b_ih=params.b_ih.at[rows].set(first.astype(dtype)),
        b_hh=params.b_hh.at[rows].set(rest.astype(dtype)),
    )
