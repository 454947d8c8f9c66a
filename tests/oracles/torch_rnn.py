"""The part of the operator that torch has, computed by torch in float64.

It has the interface of loop64, with four modes, layers, both directions, projection,
two biases or no bias, and packed sequences of length 1 or more. Import it after
``pytest.importorskip("torch")``.
"""

import numpy as np
import torch

from .loop64 import Grads, Result, Spec, shapes


def vjp(spec: Spec, weights, x, h_0, c_0=None, *, seq_lengths=None):
    """Run torch's module; return its result and a pullback to gradients."""
    lstm = spec.mode == "lstm"
    module = _module(spec)
    _fill(spec, module, np.asarray(weights, np.float64))
    inputs = [_leaf(a) for a in ((x, h_0, c_0) if lstm else (x, h_0))]
    given = inputs[0]
    steps = given.shape[1]
    if seq_lengths is not None:
        given = torch.nn.utils.rnn.pack_padded_sequence(
            given, torch.tensor(seq_lengths), batch_first=True, enforce_sorted=False
        )
    y, state = module(given, tuple(inputs[1:]) if lstm else inputs[1])
    if seq_lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(
            y, batch_first=True, total_length=steps
        )
    outputs = [y, *state] if lstm else [y, state]

    def pullback(dy=None, dh_n=None, dc_n=None) -> Grads:
        given = [dy, dh_n, dc_n][: len(outputs)]
        cts = [
            torch.zeros_like(o) if d is None else torch.tensor(np.asarray(d))
            for o, d in zip(outputs, given, strict=True)
        ]
        leaves = [*inputs, *module.parameters()]
        grads = torch.autograd.grad(
            outputs, leaves, cts, retain_graph=True, materialize_grads=True
        )
        grads = [g.numpy() for g in grads]
        names = [name for name, _ in module.named_parameters()]
        by_name = dict(zip(names, grads[len(inputs) :], strict=True))
        flat = np.concatenate([by_name[n].ravel() for n in _order(spec)])
        dx, dh_0, *dc_0 = grads[: len(inputs)]
        return Grads(dx, flat, dh_0, dc_0[0] if lstm else None)

    result = [o.detach().numpy() for o in outputs]
    return Result(result[0], result[1], result[2] if lstm else None), pullback


def _leaf(value):
    return torch.tensor(np.asarray(value, np.float64), requires_grad=True)


def _module(spec: Spec):
    assert spec.bias in ("double", "none") and spec.input_mode == "linear"
    assert spec.reset_after and spec.cell_clip is None
    options = dict(
        num_layers=spec.num_layers,
        bidirectional=spec.bidirectional,
        bias=spec.bias == "double",
        batch_first=True,
        dtype=torch.float64,
    )
    if spec.mode == "lstm":
        kind, options["proj_size"] = torch.nn.LSTM, spec.proj_size
    elif spec.mode == "gru":
        kind = torch.nn.GRU
    else:
        kind, options["nonlinearity"] = torch.nn.RNN, spec.mode.removeprefix("rnn_")
    return kind(spec.input_size, spec.hidden_size, **options)


def _order(spec: Spec) -> list[str]:
    """Return torch's parameter names in the order of the flat vector."""
    suffixes = [
        f"l{layer}{reverse}"
        for layer in range(spec.num_layers)
        for reverse in ("", "_reverse")[: spec.num_directions]
    ]
    matrices = ["weight_ih", "weight_hh"] + ["weight_hr"] * bool(spec.proj_size)
    biases = ["bias_ih", "bias_hh"] if spec.bias == "double" else []
    names = [f"{kind}_{s}" for s in suffixes for kind in matrices]
    return names + [f"{kind}_{s}" for s in suffixes for kind in biases]


def _fill(spec: Spec, module, flat) -> None:
    named, at = dict(module.named_parameters()), 0
    with torch.no_grad():
        for name in _order(spec):
            parameter = named[name]
            size = parameter.numel()
            value = torch.tensor(flat[at : at + size])
            parameter.copy_(value.reshape(parameter.shape))
            at += size
    assert at == flat.size == sum(p.numel() for p in named.values())
    assert len(named) == sum(s is not None for p in shapes(spec) for s in p)
