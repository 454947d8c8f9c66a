"""The reference backend: every mode on every platform, through `lax.scan`.

Three functions, one for each primitive: `forward`, `tangent` (linear in the tangents)
and `backward`. All are plain JAX, so that what the fused forms do not cover (second
derivatives) is JAX's own differentiation of these.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._typing import Array
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .layout import pack_weights, unpack_weights
from .xla_cell import make_cell
from .xla_layer import Layer, LayerPrimal, Steps, keep_where


def forward(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """Run the network; see `Outputs` and `Saved` for what comes back."""
    steps = _steps(call, operands)
    x = _clean_input(call, operands, steps)
    h_ns, c_ns, hidden, gates, cells = [], [], [], [], []
    for index, layers in enumerate(_layers(call, operands.weights)):
        x = _drop(call, x, operands.keep, index)
        outs = [
            layer.forward(x, h_0, c_0, steps)
            for layer, (h_0, c_0) in zip(
                layers, _states(call, operands.h_0, operands.c_0, index), strict=True
            )
        ]
        x = _join([out.h for out in outs])
        hidden.append(x)
        h_ns += [out.h_n for out in outs]
        c_ns += [out.c_n for out in outs]
        gates += [out.gates for out in outs]
        cells += [out.cells for out in outs]
    lstm = call.spec.mode == "lstm"
    outputs = Outputs(
        y=_from_time_major(call, x),
        h_n=jnp.stack(h_ns),
        c_n=jnp.stack(c_ns) if lstm else None,
    )
    if not call.save:
        return outputs, None
    saved = Saved(
        hidden=tuple(hidden[:-1]),
        gates=tuple(gates) if call.saves_gates else (),
        cells=tuple(cells) if lstm else (),
    )
    return outputs, saved


def tangent(
    call: RNNCall, operands: Operands, residuals: Residuals, dot: Differentiable
) -> Outputs:
    """Tangents of the outputs, linear in `dot`, the tangents of the operands."""
    steps = _steps(call, operands)
    spec = call.spec
    dweights = [None] * len(_pseudo_layers(call))
    if dot.weights is not None:
        dweights = unpack_weights(dot.weights, spec)
    dx: Any = None
    if dot.x is not None:
        dx = keep_where(steps.valid, _to_time_major(call, dot.x))
    dh_0 = jnp.zeros_like(operands.h_0) if dot.h_0 is None else dot.h_0
    dc_0 = dot.c_0
    if dc_0 is None and operands.c_0 is not None:
        dc_0 = jnp.zeros_like(operands.c_0)
    dh_ns, dc_ns = [], []
    primals = _primals(call, operands, residuals, steps)
    for index, layers in enumerate(_layers(call, operands.weights)):
        if dx is not None:
            dx = _drop(call, dx, operands.keep, index)
        outs = []
        dstates = _states(call, dh_0, dc_0, index)
        for d, (layer, dstate) in enumerate(zip(layers, dstates, strict=True)):
            p = index * spec.num_directions + d
            dh, dc = dstate
            outs.append(layer.tangent(primals[p], dweights[p], dx, dh, dc))
        dx = _join([dh for dh, _, _ in outs])
        dh_ns += [dh_n for _, dh_n, _ in outs]
        dc_ns += [dc_n for _, _, dc_n in outs]
    return Outputs(
        y=_from_time_major(call, dx),
        h_n=jnp.stack(dh_ns),
        c_n=jnp.stack(dc_ns) if spec.mode == "lstm" else None,
    )


def backward(
    call: RNNCall,
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Differentiable:
    """Gradients of the operands that `wrt` (bools) asks for; `bar`: cotangents."""
    steps = _steps(call, operands)
    spec = call.spec
    dh = keep_where(steps.valid, _to_time_major(call, bar.y))
    primals = _primals(call, operands, residuals, steps)
    gradients: list[Any] = [None] * len(primals)
    all_layers = _layers(call, operands.weights)
    for index in reversed(range(spec.num_layers)):
        need_x = wrt.x or index > 0
        layers = all_layers[index]
        halves = jnp.split(dh, len(layers), axis=-1)
        bars = _states(call, bar.h_n, bar.c_n, index)
        dxs = []
        for d, layer in enumerate(layers):
            p = index * spec.num_directions + d
            dh_n, dc_n = bars[d]
            gradients[p] = layer.backward(
                primals[p], halves[d], dh_n, dc_n, need_x, wrt.weights
            )
            dxs.append(gradients[p].x)
        if need_x:
            dh = sum(dxs[1:], dxs[0]).astype(operands.x.dtype)
            dh = _drop(call, dh, operands.keep, index)
    return Differentiable(
        weights=pack_weights([g.weights for g in gradients], spec)
        if wrt.weights
        else None,
        x=_from_time_major(call, dh) if wrt.x else None,
        h_0=jnp.stack([g.h_0 for g in gradients]) if wrt.h_0 else None,
        c_0=jnp.stack([g.c_0 for g in gradients]) if wrt.c_0 else None,
    )


def _layers(call: RNNCall, weights: Array) -> list[list[Layer]]:
    """`[layer][direction]`."""
    flat = unpack_weights(weights, call.spec)
    directions = call.spec.num_directions
    layers = [
        Layer(make_cell(call, w), reverse=bool(p % directions))
        for p, w in enumerate(flat)
    ]
    return [layers[i : i + directions] for i in range(0, len(layers), directions)]


def _pseudo_layers(call: RNNCall) -> range:
    return range(call.spec.num_layers * call.spec.num_directions)


def _states(call: RNNCall, h: Array, c: Array | None, layer: int) -> list[tuple]:
    """`(h, c)` of every direction of `layer`, from arrays `[L*D, B, ...]`."""
    directions = call.spec.num_directions
    rows = range(layer * directions, (layer + 1) * directions)
    return [(h[p], None if c is None else c[p]) for p in rows]


def _primals(
    call: RNNCall, operands: Operands, residuals: Residuals, steps: Steps
) -> list[LayerPrimal]:
    """One `LayerPrimal` per pseudo-layer, from what the forward pass saved."""
    directions, saved = call.spec.num_directions, residuals.saved
    hidden = [*saved.hidden, _to_time_major(call, residuals.y)]
    x, primals = _clean_input(call, operands, steps), []
    for index in range(call.spec.num_layers):
        x = _drop(call, x, operands.keep, index)
        hs = jnp.split(hidden[index], directions, axis=-1)
        states = _states(call, operands.h_0, operands.c_0, index)
        for d, (h, (h_0, c_0)) in enumerate(zip(hs, states, strict=True)):
            p = index * directions + d
            gates = saved.gates[p] if saved.gates else None
            cells = saved.cells[p] if saved.cells else None
            primals.append(LayerPrimal(x, h_0, c_0, h, gates, cells, steps))
        x = hidden[index]
    return primals


def _steps(call: RNNCall, operands: Operands) -> Steps:
    valid = reset = None
    if operands.seq_lengths is not None:
        time = lax.broadcasted_iota(jnp.int32, call.sizes(operands), 0)
        valid = (time < operands.seq_lengths[None, :])[..., None]
    if operands.resets is not None:
        reset = _to_time_major(call, operands.resets)[..., None]
        reset = reset if valid is None else reset & valid
    return Steps(valid, reset)


def _clean_input(call: RNNCall, operands: Operands, steps: Steps) -> Array:
    """The input time-major, with zeros for whatever stands in the padding."""
    return keep_where(steps.valid, _to_time_major(call, operands.x))


def _drop(call: RNNCall, x: Array, keep: tuple, layer: int) -> Array:
    """Dropout before `layer`; the same lines serve values, tangents and cotangents."""
    if not keep or layer == 0:
        return x
    return keep_where(_to_time_major(call, keep[layer - 1]), x * call.dropout_scale)


def _join(directions: list[Array]) -> Array:
    return directions[0] if len(directions) == 1 else jnp.concatenate(directions, -1)


def _to_time_major(call: RNNCall, a: Array) -> Array:
    return a if call.time_major else jnp.swapaxes(a, 0, 1)


_from_time_major = _to_time_major  # a swap undoes itself
