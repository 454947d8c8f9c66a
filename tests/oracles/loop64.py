"""The whole operator in numpy float64: one sequence, one step, one gate at a time.

The backward pass is written by hand. Every sequence runs alone at its true length, so
that no mask can be wrong in the same way as in the library. It shares no code with the
library, and is meant to be simple, not fast.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "gru": 3, "lstm": 4, "slstm": 4}


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


# --- one step ------------------------------------------------------------------------


def _sigmoid(v):
    return 0.5 * (1.0 + np.tanh(0.5 * v))  # does not overflow


def _dot(w, v):
    return v if w is None else w @ v


def _plus(v, b):
    return v if b is None else v + b


def _input_gates(spec, p, x):
    """Return [gates * H] from the input; without `w_ih`, every gate reads x itself."""
    gx = np.tile(x, GATES[spec.mode]) if p.w_ih is None else p.w_ih @ x
    return _plus(gx, p.b_ih)


def _lstm(spec, p, x, h, c):
    a = _plus(_input_gates(spec, p, x) + p.w_hh @ h, p.b_hh)
    a_i, a_f, a_g, a_o = np.split(a, 4)
    i, f, g, o = _sigmoid(a_i), _sigmoid(a_f), np.tanh(a_g), _sigmoid(a_o)
    raw = f * c + i * g
    new, is_open = raw, np.full(raw.shape, True)
    if spec.cell_clip is not None:
        new = np.clip(raw, -spec.cell_clip, spec.cell_clip)
        is_open = np.abs(raw) < spec.cell_clip  # False for NaN, as for large values
        if spec.clip_nan:
            new = np.where(np.isnan(raw), spec.cell_clip, new)
    m = o * np.tanh(new)
    return _dot(p.w_hr, m), new, (x, h, c, i, f, g, o, is_open, new, m)


def _lstm_back(spec, p, tape, dh, dc, dp):
    x, h, c, i, f, g, o, is_open, new, m = tape
    dm = dh
    if p.w_hr is not None:
        dp.w_hr[:] += np.outer(dh, m)
        dm = p.w_hr.T @ dh
    draw = dc + dm * o * (1 - np.tanh(new) ** 2)
    da_i = np.where(is_open, draw * g * i * (1 - i), 0.0)
    da_f = np.where(is_open, draw * c * f * (1 - f), 0.0)
    da_g = np.where(is_open, draw * i * (1 - g * g), 0.0)
    da_o = dm * np.tanh(new) * o * (1 - o)
    da = np.concatenate([da_i, da_f, da_g, da_o])
    dc_prev = np.where(is_open, draw * f, 0.0)
    return *_gates_back(spec, p, x, h, da, da, dp), dc_prev


def _slstm(spec, p, x, h, cells):
    a_i, a_f, a_z, a_o = np.split(
        _plus(_input_gates(spec, p, x) + p.w_hh @ h, p.b_hh), 4
    )
    c, n, m = cells
    log_f = m + np.minimum(a_f, 0) - np.log1p(np.exp(-np.abs(a_f)))
    new_m = np.where(n == 0, a_i, np.maximum(a_i, log_f))
    i, f = np.exp(a_i - new_m), np.minimum(1.0, np.exp(np.minimum(log_f - new_m, 9)))
    z, o = np.tanh(a_z), _sigmoid(a_o)
    new_c, new_n = f * c + i * z, f * n + i
    u = o * new_c / new_n
    tape = (x, h, cells, a_i, a_f, log_f, i, f, z, o, new_c, new_n, u)
    return _dot(p.w_hr, u), np.stack([new_c, new_n, new_m]), tape


def _slstm_back(spec, p, tape, dh, dcells, dp):
    x, h, (c, n, m), a_i, a_f, log_f, i, f, z, o, new_c, new_n, u = tape
    dc, dn, dm = dcells
    du = dh
    if p.w_hr is not None:
        dp.w_hr[:] += np.outer(dh, u)
        du = p.w_hr.T @ dh
    da_o = du * new_c / new_n * o * (1 - o)
    dc = dc + du * o / new_n
    dn = dn - du * o * new_c / new_n**2
    da_z = dc * i * (1 - z * z)
    d_exp_i = (dc * z + dn) * i
    d_exp_f = np.where((n == 0) & (log_f >= a_i), 0.0, (dc * c + dn * n) * f)
    dm = dm - d_exp_i - d_exp_f
    by_input = (n == 0) | (a_i > log_f)
    da_i = d_exp_i + np.where(by_input, dm, 0.0)
    dlog_f = d_exp_f + np.where(by_input, 0.0, dm)
    da = np.concatenate([da_i, dlog_f * _sigmoid(-a_f), da_z, da_o])
    return *_gates_back(spec, p, x, h, da, da, dp), np.stack([dc * f, dn * f, dlog_f])


def _gru(spec, p, x, h, c):
    size = spec.hidden_size
    gx = _input_gates(spec, p, x)
    gh = _plus(p.w_hh @ h, p.b_hh)
    r = _sigmoid(gx[:size] + gh[:size])
    z = _sigmoid(gx[size : 2 * size] + gh[size : 2 * size])
    if spec.reset_after:
        h_candidate = gh[2 * size :]
        n = np.tanh(gx[2 * size :] + r * h_candidate)
    else:
        h_candidate = _plus(p.w_hh[2 * size :] @ (r * h), _last(p.b_hh, size))
        n = np.tanh(gx[2 * size :] + h_candidate)
    return (1 - z) * n + z * h, c, (x, h, r, z, n, h_candidate)


def _last(b, size):
    return None if b is None else b[2 * size :]


def _gru_back(spec, p, tape, dh, dc, dp):
    x, h, r, z, n, h_candidate = tape
    size = spec.hidden_size
    da_n = dh * (1 - z) * (1 - n * n)
    da_z = dh * (h - n) * z * (1 - z)
    if spec.reset_after:
        da_r = da_n * h_candidate * r * (1 - r)
        dgx = np.concatenate([da_r, da_z, da_n])
        dgh = np.concatenate([da_r, da_z, da_n * r])
        dx, dh_prev = _gates_back(spec, p, x, h, dgx, dgh, dp)
        return dx, dh_prev + dh * z, dc
    drh = p.w_hh[2 * size :].T @ da_n  # the cotangent of r * h
    da_r = drh * h * r * (1 - r)
    dgx = np.concatenate([da_r, da_z, da_n])
    dgh = np.concatenate([da_r, da_z, np.zeros(size)])
    dx, dh_prev = _gates_back(spec, p, x, h, dgx, dgh, dp)
    dp.w_hh[2 * size :] += np.outer(da_n, r * h)
    if p.b_hh is not None:
        dp.b_hh[2 * size :] += da_n
    return dx, dh_prev + dh * z + drh * r, dc


def _elman(spec, p, x, h, c):
    a = _plus(_input_gates(spec, p, x) + p.w_hh @ h, p.b_hh)
    new = np.tanh(a) if spec.mode == "rnn_tanh" else np.maximum(a, 0.0)
    return new, c, (x, h, a, new)


def _elman_back(spec, p, tape, dh, dc, dp):
    x, h, a, new = tape
    da = dh * (1 - new * new) if spec.mode == "rnn_tanh" else dh * (a > 0)
    return *_gates_back(spec, p, x, h, da, da, dp), dc


def _gates_back(spec, p, x, h, dgx, dgh, dp):
    """Differentiate ``w_ih x + b_ih`` and ``w_hh h + b_hh``; return dx, dh."""
    if p.w_ih is None:
        dx = dgx.reshape(GATES[spec.mode], -1).sum(0)
    else:
        dp.w_ih[:] += np.outer(dgx, x)
        dx = p.w_ih.T @ dgx
    dp.w_hh[:] += np.outer(dgh, h)
    if p.b_ih is not None:
        dp.b_ih[:] += dgx
    if p.b_hh is not None:
        dp.b_hh[:] += dgh
    return dx, p.w_hh.T @ dgh


STEP = {
    "lstm": (_lstm, _lstm_back),
    "gru": (_gru, _gru_back),
    "slstm": (_slstm, _slstm_back),
}


# --- one sequence --------------------------------------------------------------------


def _run(spec, p, xs, h, c, resets, reverse):
    """Run one direction over one sequence; also return tapes for `_run_back`."""
    step = STEP.get(spec.mode, (_elman, _elman_back))[0]
    ys, tapes = np.zeros((len(xs), spec.output_size)), {}
    order = range(len(xs))
    for t in reversed(order) if reverse else order:
        if resets[t]:
            h, c = np.zeros_like(h), np.zeros_like(c)
        h, c, tapes[t] = step(spec, p, xs[t], h, c)
        ys[t] = h
    return ys, h, c, tapes


def _run_back(spec, p, tapes, dys, dh, dc, resets, reverse, dp):
    step_back = STEP.get(spec.mode, (_elman, _elman_back))[1]
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
