"""The reference implementation: every mode on every platform, through `lax.scan`.

It has three functions, one for each primitive: `forward`, `tangent` (linear in the
tangents) and `backward`. All are plain JAX, so that JAX can differentiate them by its
own rules for second derivatives, which fused implementations do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .._padding import is_step
from .._typing import Array
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .cell import States
from .layout import pack_weights, unpack_weights
from .spec import cell_class
from .xla_layer import (
    Layer,
    LayerGradients,
    LayerOutput,
    LayerPrimal,
    StepMasks,
    keep_where,
)


def run_by_scans(
    operands: Operands,
    layers: list[Layer],
    x: Array,
    initials: list[States],
    masks: StepMasks,
) -> tuple[Array, list[LayerOutput]]:
    """Run all directions of a layer; return their joined outputs, and all results.

    Args:
        operands: of the call, for lengths.
        layers: the directions.
        x: the layer's input, time-major, with zeros in the padding.
        initials: the initial states of each direction.
        masks: the masks of the steps.
    """
    outs = [
        layer.forward(x, initial, masks)
        for layer, initial in zip(layers, initials, strict=True)
    ]
    return _join([out.h for out in outs]), outs


def forward(
    call: RNNCall, operands: Operands, run_layer: Callable = run_by_scans
) -> tuple[Outputs, Saved | None]:
    """Run the network; return its outputs, and `Saved` only if the call saves.

    A backend may run layers in its own way, by a `run_layer` like `run_by_scans`.
    """
    masks = _step_masks(call, operands)
    x = _clean_input(call, operands, masks)
    hidden, outs = [], []
    for index, layers in enumerate(_layers(call, operands.weights)):
        x = _apply_dropout(call, x, operands.dropout_masks, index)
        states = _layer_states(call, operands.states, index)
        x, new = run_layer(operands, layers, x, states, masks)
        hidden.append(x)
        outs += new
    outputs = Outputs(_from_time_major(call, x), _stack([out.final for out in outs]))
    if not call.save:
        return outputs, None
    saved = Saved(
        hidden=tuple(hidden[:-1]),
        gates=tuple(out.gates for out in outs) if call.saves_gates else (),
        states=tuple(out.states for out in outs),
    )
    return outputs, saved


def tangent(
    call: RNNCall, operands: Operands, residuals: Residuals, dot: Differentiable
) -> Outputs:
    """Return the tangents of the outputs, linear in the operands' tangents `dot`."""
    masks = _step_masks(call, operands)
    dweights = [None] * (call.spec.num_layers * call.spec.num_directions)
    if dot.weights is not None:
        dweights = unpack_weights(dot.weights, call.spec)
    dx: Any = None
    if dot.x is not None:
        dx = keep_where(masks.valid, _to_time_major(call, dot.x))
    dstates = tuple(
        jnp.zeros_like(state) if tangent is None else tangent
        for state, tangent in zip(operands.states, dot.states, strict=True)
    )
    dfinal = []
    primals = iter(_primals(call, operands, residuals, masks))
    changes = iter(dweights)
    for index, layers in enumerate(_layers(call, operands.weights)):
        if dx is not None:
            dx = _apply_dropout(call, dx, operands.dropout_masks, index)
        outs = [
            layer.tangent(next(primals), next(changes), dx, dinitial)
            for layer, dinitial in zip(
                layers, _layer_states(call, dstates, index), strict=True
            )
        ]
        dx = _join([dh for dh, _ in outs])
        dfinal += [final for _, final in outs]
    return Outputs(_from_time_major(call, dx), _stack(dfinal))


def backward_by_scans(
    operands: Operands,
    layers: list[Layer],
    primals: list[LayerPrimal],
    dh: Array,
    dfinals: list[States],
    need_x: bool,
    need_weights: bool,
) -> list[LayerGradients]:
    """Return the gradients of all directions of a layer.

    Args:
        operands: of the call, for lengths.
        layers: the directions.
        primals: the values of the forward pass, of each direction.
        dh: the cotangents of the joined outputs, time-major, with zeros in the padding.
        dfinals: those of the final states of each direction.
        need_x: whether the gradients of inputs are wanted.
        need_weights: whether those of weights are.
    """
    halves = jnp.split(dh, len(layers), axis=-1)
    return [
        layer.backward(primal, half, dfinal, need_x, need_weights)
        for layer, primal, half, dfinal in zip(
            layers, primals, halves, dfinals, strict=True
        )
    ]


def backward(
    call: RNNCall,
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
    run_layer: Callable = backward_by_scans,
) -> Differentiable:
    """Return the gradients that `wrt` asks for, from the outputs' cotangents `bar`.

    A backend may run layers in its own way, by a `run_layer` like `backward_by_scans`.
    """
    masks = _step_masks(call, operands)
    spec = call.spec
    dh = keep_where(masks.valid, _to_time_major(call, bar.y))
    primals = _primals(call, operands, residuals, masks)
    gradients: list[Any] = [None] * len(primals)
    all_layers = _layers(call, operands.weights)
    for index in reversed(range(spec.num_layers)):
        need_x = wrt.x or index > 0
        layers = all_layers[index]
        dfinals = _layer_states(call, bar.states, index)
        own = slice(index * len(layers), (index + 1) * len(layers))
        gradients[own] = run_layer(
            operands, layers, primals[own], dh, dfinals, need_x, wrt.weights
        )
        dxs = [each.x for each in gradients[own]]
        if need_x:
            total: Any = sum(dxs[1:], dxs[0])
            dh = total.astype(operands.x.dtype)
            dh = _apply_dropout(call, dh, operands.dropout_masks, index)
    dstates = zip(_stack([g.initial for g in gradients]), wrt.states, strict=True)
    dweights = None
    if wrt.weights:
        dweights = pack_weights([g.weights for g in gradients], spec)
    return Differentiable(
        weights=dweights,
        x=_from_time_major(call, dh) if wrt.x else None,
        states=tuple(d if asked else None for d, asked in dstates),
    )


def _layers(call: RNNCall, weights: Array) -> list[list[Layer]]:
    """Return all layers as `[layer][direction]`."""
    flat, cell = unpack_weights(weights, call.spec), cell_class(call.spec)
    directions = call.spec.num_directions
    layers = [
        Layer(cell(call, w), reverse=bool(p % directions)) for p, w in enumerate(flat)
    ]
    return [layers[i : i + directions] for i in range(0, len(layers), directions)]


def _layer_states(call: RNNCall, states: States, layer: int) -> list[States]:
    """Return the states of every direction of `layer`, from arrays `[L*D, B, ...]`."""
    directions = call.spec.num_directions
    pseudo_layers = range(layer * directions, (layer + 1) * directions)
    return [tuple(state[p] for state in states) for p in pseudo_layers]


def _stack(states: list[States]) -> States:
    """Stack the states of all pseudo-layers to arrays `[L*D, B, ...]`."""
    return tuple(map(jnp.stack, zip(*states, strict=True)))


def _primals(
    call: RNNCall, operands: Operands, residuals: Residuals, masks: StepMasks
) -> list[LayerPrimal]:
    """Return one `LayerPrimal` per pseudo-layer, from the saved arrays."""
    directions, saved = call.spec.num_directions, residuals.saved
    hidden = [*saved.hidden, _to_time_major(call, residuals.y)]
    x, primals = _clean_input(call, operands, masks), []
    for index in range(call.spec.num_layers):
        x = _apply_dropout(call, x, operands.dropout_masks, index)
        hs = jnp.split(hidden[index], directions, axis=-1)
        initials = _layer_states(call, operands.states, index)
        for d, (h, initial) in enumerate(zip(hs, initials, strict=True)):
            p = index * directions + d
            gates = saved.gates[p] if saved.gates else None
            states = (h, *saved.states[p])
            primals.append(LayerPrimal(x, initial, states, gates, masks))
        x = hidden[index]
    return primals


def _step_masks(call: RNNCall, operands: Operands) -> StepMasks:
    valid = reset = None
    if operands.seq_lengths is not None:
        steps, _ = call.sizes(operands)
        valid = is_step(operands.seq_lengths, steps, 0)[..., None]
    if operands.resets is not None:
        reset = _to_time_major(call, operands.resets)[..., None]
        reset = reset if valid is None else reset & valid
    return StepMasks(valid, reset)


def _clean_input(call: RNNCall, operands: Operands, masks: StepMasks) -> Array:
    """Return the input time-major, with zeros in the padding."""
    return keep_where(masks.valid, _to_time_major(call, operands.x))


def _apply_dropout(call: RNNCall, x: Array, masks: tuple, layer: int) -> Array:
    """Drop and scale inputs of `layer`; linear, for values, tangents and cotangents."""
    if not masks or layer == 0:
        return x
    return keep_where(_to_time_major(call, masks[layer - 1]), x * call.dropout_scale)


def _join(directions: list[Array]) -> Array:
    return directions[0] if len(directions) == 1 else jnp.concatenate(directions, -1)


def _to_time_major(call: RNNCall, a: Array) -> Array:
    return a if call.time_major else jnp.swapaxes(a, 0, 1)


_from_time_major = _to_time_major  # a swap is its own inverse
