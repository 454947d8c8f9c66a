"""The whole operator in numpy float64: one sequence, one step, one gate at a time.

The backward pass is written by hand. Every sequence runs alone at its true length, so
that no mask can be wrong in the same way as in the library. It shares no code with the
library, and is meant to be simple, not fast.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .loop64_steps import GATES, STEPS


@dataclass(frozen=True)
class Spec:
    """The specification of the operator, with the field names of `RNNSpec`."""

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0
    bias: str = "double"
    dropout: float = 0.0
    cell_clip: float | None = None
    clip_nan: bool = False
    reset_after: bool = True
    input_mode: str = "linear"
    num_heads: int = 1

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        return self.proj_size or self.hidden_size

    @property
    def width(self) -> int:
        return self.num_directions * self.output_size

    @property
    def cells(self) -> tuple[int, ...]:
        """Return the shape of all states of a sequence but h, () if there is none."""
        return {"lstm": (self.hidden_size,), "slstm": (3, self.hidden_size)}.get(
            self.mode, ()
        )


class Result(NamedTuple):
    y: np.ndarray
    h_n: np.ndarray
    c_n: np.ndarray | None


class Grads(NamedTuple):
    x: np.ndarray
    weights: np.ndarray
    h_0: np.ndarray
    c_0: np.ndarray | None


class Params(NamedTuple):
    """Parameters of one direction of one layer; None for those that the spec lacks."""

    w_ih: Any
    w_hh: Any
    w_hr: Any
    b_ih: Any
    b_hh: Any


# --- weights -------------------------------------------------------------------------


def shapes(spec: Spec) -> list[Params]:
    """Return the shapes of every pseudo-layer: forward 0, reverse 0, forward 1, ..."""
    rows, out = GATES[spec.mode] * spec.hidden_size, []
    for p in range(spec.num_layers * spec.num_directions):
        first = p < spec.num_directions
        columns = spec.input_size if first else spec.width
        skip = first and spec.input_mode == "skip"
        out.append(
            Params(
                w_ih=None if skip else (rows, columns),
                w_hh=(rows, spec.output_size // spec.num_heads),
                w_hr=(spec.proj_size, spec.hidden_size // spec.num_heads)
                if spec.proj_size
                else None,
                b_ih=(rows,) if spec.bias in ("double", "input") else None,
                b_hh=(rows,) if spec.bias in ("double", "recurrent") else None,
            )
        )
    return out


def num_params(spec: Spec) -> int:
    return sum(int(np.prod(s)) for p in shapes(spec) for s in p if s is not None)


def unpack(spec: Spec, flat) -> list[Params]:
    """Split the flat vector: all matrices of all pseudo-layers, then all biases."""
    flat = np.asarray(flat, np.float64)
    wanted = shapes(spec)
    found: list[dict] = [{} for _ in wanted]
    at = 0
    for names in (("w_ih", "w_hh", "w_hr"), ("b_ih", "b_hh")):
        for shape, arrays in zip(wanted, found, strict=True):
            for name in names:
                s = getattr(shape, name)
                size = 0 if s is None else int(np.prod(s))
                arrays[name] = None if s is None else flat[at : at + size].reshape(s)
                at += size
    assert at == flat.size, (at, flat.size)
    return [Params(**arrays) for arrays in found]


def with_zeros(spec: Spec, p: Params) -> Params:
    """Return the parameters with a column for every head, 0 outside of a row's own."""

    def spread(w, size):
        if w is None:
            return None
        wide = np.zeros((len(w), w.shape[1] * spec.num_heads))
        for row, values in enumerate(w):
            head = row % size // (size // spec.num_heads)
            wide[row, head * len(values) : (head + 1) * len(values)] = values
        return wide

    return p._replace(
        w_hh=spread(p.w_hh, spec.hidden_size), w_hr=spread(p.w_hr, spec.proj_size)
    )


def without_zeros(spec: Spec, p: Params) -> Params:
    """Return the inverse of `with_zeros`."""

    def own(w, size):
        if w is None:
            return None
        parts = np.split(w, spec.num_heads, axis=1)
        each = size // spec.num_heads
        return np.stack([parts[m % size // each][m] for m in range(len(w))])

    return p._replace(
        w_hh=own(p.w_hh, spec.hidden_size), w_hr=own(p.w_hr, spec.proj_size)
    )


def pack(layers: list[Params]) -> np.ndarray:
    parts = [a for p in layers for a in (p.w_ih, p.w_hh, p.w_hr)]
    parts += [a for p in layers for a in (p.b_ih, p.b_hh)]
    return np.concatenate([a.ravel() for a in parts if a is not None] or [np.zeros(0)])


# --- one sequence --------------------------------------------------------------------


def _run(spec, p, xs, h, c, resets, reverse):
    """Run one direction over one sequence; also return tapes for `_run_back`."""
    step = STEPS[spec.mode][0]
    ys, tapes = np.zeros((len(xs), spec.output_size)), {}
    order = range(len(xs))
    for t in reversed(order) if reverse else order:
        if resets[t]:
            h, c = np.zeros_like(h), np.zeros_like(c)
        h, c, tapes[t] = step(spec, p, xs[t], h, c)
        ys[t] = h
    return ys, h, c, tapes


def _run_back(spec, p, tapes, dys, dh, dc, resets, reverse, dp):
    step_back = STEPS[spec.mode][1]
    order = range(len(dys))
    dxs = [None] * len(dys)
    for t in order if reverse else reversed(order):
        dxs[t], dh, dc = step_back(spec, p, tapes[t], dh + dys[t], dc, dp)
        if resets[t]:
            dh, dc = np.zeros_like(dh), np.zeros_like(dc)
    return dxs, dh, dc


# --- the operator --------------------------------------------------------------------


def vjp(
    spec: Spec,
    weights,
    x,
    h_0=None,
    c_0=None,
    *,
    seq_lengths=None,
    resets=None,
    dropout_masks=None,
    padding="zero",
):
    """Run the operator; return its result and a function from cotangents to gradients.

    ``x [B, T, I]``; ``c_0 [L*D, B, H]``, of an sLSTM ``[L*D, B, 3, H]`` with the states
    c, n, m; ``dropout_masks``: one bool array ``[B, T, F]`` for every layer
    except the last, True where dropout keeps the element. The function is
    ``pullback(dy, dh_n, dc_n)``; each cotangent may be None.
    """
    x = np.asarray(x, np.float64)
    batch, steps = x.shape[:2]
    dirs, pseudo = spec.num_directions, spec.num_layers * spec.num_directions
    params = [with_zeros(spec, p) for p in unpack(spec, weights)]
    h_0 = _state(h_0, (pseudo, batch, spec.output_size))
    c_0 = _state(c_0, (pseudo, batch, *spec.cells))
    resets = np.zeros((batch, steps), bool) if resets is None else np.asarray(resets)
    ragged = seq_lengths is not None
    lengths = [int(n) for n in seq_lengths] if ragged else [steps] * batch

    y = np.zeros((batch, steps, spec.width))
    h_n, c_n = np.zeros_like(h_0), np.zeros_like(c_0)
    all_tapes = []
    for b, n in enumerate(lengths):
        out, tapes = x[b, :n], []
        for layer in range(spec.num_layers):
            layer_in, halves = out, []
            if layer > 0:
                layer_in = out * _scale(spec, dropout_masks, layer - 1, b, n)
            for rev in range(dirs):
                p = layer * dirs + rev
                ys, h_n[p, b], c_n[p, b], tape = _run(
                    spec, params[p], layer_in, h_0[p, b], c_0[p, b], resets[b], rev
                )
                halves.append(ys)
                tapes.append(tape)
            out = np.concatenate(halves, axis=1)
        y[b, :n] = out
        if padding == "hold" and n > 0:
            y[b, n:] = y[b, n - 1]
        elif padding == "hold":
            y[b] = h_0[pseudo - dirs :, b].ravel()
        elif padding == "drop" and n < steps:
            h_n[:, b] = 0.0
            c_n[:, b] = 0.0
        all_tapes.append(tapes)

    def pullback(dy=None, dh_n=None, dc_n=None) -> Grads:
        dy = _state(dy, y.shape)
        dh_n, dc_n = _state(dh_n, h_0.shape), _state(dc_n, c_0.shape)
        dx, dh_0, dc_0 = np.zeros_like(x), np.zeros_like(h_0), np.zeros_like(c_0)
        zeros = unpack(spec, np.zeros(num_params(spec)))
        dparams = [with_zeros(spec, p) for p in zeros]
        for b, n in enumerate(lengths):
            dlayer = dy[b, :n].copy()
            dh, dc = dh_n[:, b].copy(), dc_n[:, b].copy()
            if padding == "hold" and n > 0:
                dlayer[n - 1] += dy[b, n:].sum(0)
            elif padding == "hold":
                past = dy[b].sum(0).reshape(dirs, spec.output_size)
                dh[pseudo - dirs :] += past  # y is h_0 there, and so is h_n
            elif padding == "drop" and n < steps:
                dh[:], dc[:] = 0.0, 0.0
            for layer in reversed(range(spec.num_layers)):
                dbelow = 0.0
                for rev in range(dirs):
                    p = layer * dirs + rev
                    part = slice(rev * spec.output_size, (rev + 1) * spec.output_size)
                    dxs, dh_0[p, b], dc_0[p, b] = _run_back(
                        spec,
                        params[p],
                        all_tapes[b][p],
                        dlayer[:, part],
                        dh[p],
                        dc[p],
                        resets[b],
                        rev,
                        dparams[p],
                    )
                    width = spec.width if layer else spec.input_size
                    dbelow = dbelow + np.reshape(dxs, (n, width)).astype(np.float64)
                dlayer = dbelow
                if layer > 0:
                    dlayer = dlayer * _scale(spec, dropout_masks, layer - 1, b, n)
            dx[b, :n] = dlayer
        dweights = pack([without_zeros(spec, p) for p in dparams])
        return Grads(dx, dweights, dh_0, dc_0 if spec.cells else None)

    return Result(y, h_n, c_n if spec.cells else None), pullback


def forward(*args, **kwargs) -> Result:
    return vjp(*args, **kwargs)[0]


def _state(value, shape):
    """Return a float64 copy, which must have this shape; zeros for None."""
    if value is None:
        return np.zeros(shape)
    value = np.array(value, np.float64)
    assert value.shape == shape, (value.shape, shape)
    return value


def _scale(spec, dropout_masks, layer, b, length):
    """Return the factors of dropout after `layer` for sequence `b`; 1 without masks."""
    if dropout_masks is None or spec.dropout == 0.0:
        return 1.0
    if spec.dropout == 1.0:
        return 0.0
    return np.asarray(dropout_masks[layer])[b, :length] / (1.0 - spec.dropout)
