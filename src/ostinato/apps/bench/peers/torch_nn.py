"""torch.nn: the sequence modules, and the cells for streaming."""

from typing import Any

import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

import ostinato as ost

from ..problem import Data, Problem
from .contender import Contender, Unsupported, results

_NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN"}
_FIELDS = ("w_ih", "w_hh", "b_ih", "b_hh")


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender.

    Raises:
        Unsupported: the problem is a compilation.
    """
    torch.set_num_threads(threads)
    if problem.kind == "compile":
        raise Unsupported("torch compiles nothing here")
    return (_step if problem.kind == "step" else _sequence)(problem, data)


def _step(problem: Problem, data: Data) -> Contender:
    cell = getattr(torch.nn, f"{_NAMES[problem.mode]}Cell")
    cell = cell(problem.input_size, problem.hidden_size, dtype=_dtype(problem))
    _fill([[getattr(cell, f"{kind}h") for kind in _CELL]], data)
    x_t, state = _tensors(problem, data.x[0]), _tensors(problem, data.state)
    state = tuple(a[0] for a in state) if problem.mode == "lstm" else state[0]

    @torch.inference_mode()
    def call():
        return cell(x_t, state)

    def translated(new):
        new = _arrays(new)
        h = new[0] if problem.mode == "lstm" else new
        layered = tuple(a[None] for a in new) if problem.mode == "lstm" else new[None]
        return results(problem, data, h, layered)

    return Contender(call, translated)


_CELL = ("weight_i", "weight_h", "bias_i", "bias_h")


def _sequence(problem: Problem, data: Data) -> Contender:
    module = getattr(torch.nn, _NAMES[problem.mode])(
        problem.input_size,
        problem.hidden_size,
        num_layers=problem.num_layers,
        bidirectional=problem.bidirectional,
        dtype=_dtype(problem),
    )
    _fill(module.all_weights, data)
    x, dy, state = (_tensors(problem, a) for a in (data.x, data.dy, data.state))
    sizes = None
    if problem.ragged:
        lengths = torch.tensor(data.lengths)
        x, sizes, *_ = pack_padded_sequence(x, lengths)
        dy = pack_padded_sequence(dy, lengths).data

    def padded(rows):
        if sizes is None:
            return _arrays(rows)
        rows = PackedSequence(rows, sizes)
        return _arrays(pad_packed_sequence(rows, total_length=problem.steps)[0])

    def forward():
        y, last = module(x if sizes is None else PackedSequence(x, sizes), state)
        return (y if sizes is None else y.data), last

    @torch.inference_mode()
    def infer():
        return forward()

    leaves = [x, *(state if problem.mode == "lstm" else [state])]
    parameters = [a for tensors in module.all_weights for a in tensors]

    def train():
        y, last = forward()
        return y, last, torch.autograd.grad(y, [*leaves, *parameters], dy)

    def translated(returned):
        y, last, *grads = returned
        if grads:
            dx, *rest = grads[0]
            dstate = tuple(_arrays(rest[: len(leaves) - 1]))
            flat = iter(_arrays(rest[len(leaves) - 1 :]))
            layers = [
                ost.LayerWeights(*(next(flat) for _ in _FIELDS), w_hr=None)
                for _ in data.layers
            ]
            grads = [(layers, padded(dx), dstate)]
        return results(problem, data, padded(y), _arrays(last), *grads)

    if problem.kind == "infer":
        return Contender(infer, translated)
    for leaf in leaves:
        leaf.requires_grad_()
    return Contender(train, translated)


def _dtype(problem: Problem) -> torch.dtype:
    return getattr(torch, problem.dtype)


def _fill(modules: Any, data: Data) -> None:
    with torch.no_grad():
        for tensors, layer in zip(modules, data.layers, strict=True):
            for tensor, field in zip(tensors, _FIELDS, strict=True):
                tensor.copy_(torch.tensor(getattr(layer, field)))


def _tensors(problem: Problem, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_tensors(problem, a) for a in value)
    return torch.tensor(value, dtype=_dtype(problem))


def _arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float().numpy()
    return tuple(_arrays(a) for a in value)
