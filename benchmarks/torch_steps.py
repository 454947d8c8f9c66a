"""The networks of `steps.py` as PyTorch's users write them: a loop over a step.

Every function is `step(params, states, x_t, memory) -> (states, output_t)`, with the
parameters of the network in JAX as tensors; `memory` is what `prepare` returns.
"""

from collections.abc import Callable
from typing import Any

import torch

LAYER_NORM_EPSILON = 1e-4


def _leaky(params: Any, h: Any, x: Any, memory: Any) -> Any:
    w_ih, w_hh, b, leak = params
    h = (1 - leak) * h + leak * torch.tanh(x @ w_ih.T + h @ w_hh.T + b)
    return h, h


def _products(params: Any, h: Any, x: Any) -> tuple[Any, Any]:
    linear = torch.nn.functional.linear
    return linear(x, params.w_ih, params.b_ih), linear(h, params.w_hh, params.b_hh)


def _lstm_unit(pre: Any, c: Any) -> Any:
    i, f, g, o = pre.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def _lstm(params: Any, states: Any, x: Any, memory: Any) -> Any:
    h, c = states
    gx, gh = _products(params, h, x)
    return _lstm_unit(gx + gh, c)


def _gru(params: Any, h: Any, x: Any, memory: Any) -> Any:
    gx, gh = _products(params, h, x)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = gx.chunk(3, -1), gh.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    h = (1 - z) * n + z * h
    return h, h


def _mi_lstm(params: Any, states: Any, x: Any, memory: Any) -> Any:
    h, c = states
    gx, gh = _products(params, h, x)
    pre = params.alpha * gh * gx + params.beta1 * gh + params.beta2 * gx + params.b
    return _lstm_unit(pre, c)


def _peephole(params: Any, states: Any, x: Any, memory: Any) -> Any:
    h, c = states
    gx, gh = _products(params, h, x)
    i, f, g, o = (gx + gh).chunk(4, -1)
    i, f = torch.sigmoid(i + params.p_i * c), torch.sigmoid(f + params.p_f * c)
    c = f * c + i * torch.tanh(g)
    h = torch.sigmoid(o + params.p_o * c) * torch.tanh(c)
    return (h, c), h


def _layer_norm(params: Any, states: Any, x: Any, memory: Any) -> Any:
    h, c = states
    gx, gh = _products(params, h, x)
    pre = gx + gh
    pre = torch.nn.functional.layer_norm(
        pre, pre.shape[-1:], params.scale, params.offset, LAYER_NORM_EPSILON
    )
    return _lstm_unit(pre, c)


def _attention(params: Any, states: Any, x: Any, memory: Any) -> Any:
    inner, context, _ = states
    inner, h = _lstm(params.cell, inner, torch.cat([x, context], -1), None)
    entries, keys = memory
    query = torch.nn.functional.linear(h, params.w_query, params.b_query)
    energies = torch.tanh(keys + query[:, None]) @ params.v
    weights = torch.softmax(energies, -1)
    context = torch.bmm(weights[:, None], entries)[:, 0]
    return (inner, context, None), torch.cat([h, context], -1)


STEPS: dict[str, Callable] = {
    "leaky tanh RNN": _leaky,
    "LSTM": _lstm,
    "GRU": _gru,
    "MI-LSTM": _mi_lstm,
    "peephole LSTM": _peephole,
    "layer norm LSTM": _layer_norm,
    "attention LSTM": _attention,
}


def prepare(params: Any, memory: Any) -> Any:
    """Return a memory and its keys, as attention reads them; otherwise None."""
    if not hasattr(params, "w_memory"):
        return None
    linear = torch.nn.functional.linear
    return memory, linear(memory, params.w_memory, params.b_memory)


def run(step: Callable, params: Any, states: Any, x: Any, memory: Any) -> torch.Tensor:
    """Run the loop, time first."""
    ready, outputs = prepare(params, memory), []
    for x_t in x:
        states, y = step(params, states, x_t, ready)
        outputs.append(y)
    return torch.stack(outputs)
