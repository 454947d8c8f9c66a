"""Cells in numpy float64: one sequence, one step, one gate at a time.

Every function takes the parameters by name, and a state and an input of one sequence;
it returns the new state and the output. `net64.run` runs them over sequences. It shares
no code with the library.
"""

import numpy as np


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def blocks(a, count):
    size = len(a) // count
    return [a[k * size : (k + 1) * size] for k in range(count)]


def rnn(p, h, x, activation="tanh"):
    pre = p.w_ih @ x + p.b_ih + p.w_hh @ h + p.b_hh
    h = np.tanh(pre) if activation == "tanh" else np.maximum(pre, 0)
    return h, h


def _lstm_states(i, f, g, o, c, forget_bias):
    c = sigmoid(f + forget_bias) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def lstm(p, state, x, forget_bias=0.0):
    h, c = state
    parts = [
        blocks(p.w_ih, 4)[k] @ x
        + blocks(p.b_ih, 4)[k]
        + blocks(p.w_hh, 4)[k] @ h
        + blocks(p.b_hh, 4)[k]
        for k in range(4)
    ]
    h, c = _lstm_states(*parts, c, forget_bias)
    return (h, c), h


def lstmp(p, state, x, forget_bias=0.0):
    (u, c), _ = lstm(p, state, x, forget_bias)
    h = p.w_hr @ u
    return (h, c), h


def gru(p, h, x, reset_after=True):
    xr, xz, xn = blocks(p.w_ih @ x + p.b_ih, 3)
    wr, wz, wn = blocks(p.w_hh, 3)
    br, bz, bn = blocks(p.b_hh, 3)
    r, z = sigmoid(xr + wr @ h + br), sigmoid(xz + wz @ h + bz)
    h_candidate = wn @ (h if reset_after else r * h) + bn
    n = np.tanh(xn + (r * h_candidate if reset_after else h_candidate))
    h = (1 - z) * n + z * h
    return h, h


def peephole_lstm(p, state, x, forget_bias=0.0):
    h, c = state
    i, f, g, o = blocks(p.w_ih @ x + p.b_ih + p.w_hh @ h + p.b_hh, 4)
    i = sigmoid(i + p.p_i * c)
    f = sigmoid(f + p.p_f * c + forget_bias)
    c = f * c + i * np.tanh(g)
    h = sigmoid(o + p.p_o * c) * np.tanh(c)
    return (h, c), h


def _integrated(p, h, x):
    gx, gh = p.w_ih @ x + p.b_ih, p.w_hh @ h + p.b_hh
    return p.alpha * gh * gx + p.beta1 * gh + p.beta2 * gx + p.b


def milstm(p, state, x, forget_bias=0.0):
    h, c = state
    h, c = _lstm_states(*blocks(_integrated(p, h, x), 4), c, forget_bias)
    return (h, c), h


def _norm(a, scale, offset, epsilon):
    return scale * (a - a.mean()) / np.sqrt(a.var() + epsilon) + offset


def layer_norm_lstm(p, state, x, forget_bias=0.0, epsilon=1e-4):
    h, c = state
    pre = p.w_ih @ x + p.b_ih + p.w_hh @ h + p.b_hh
    pre = _norm(pre, p.scale, p.offset, epsilon)
    h, c = _lstm_states(*blocks(pre, 4), c, forget_bias)
    return (h, c), h


def layer_norm_milstm(p, state, x, forget_bias=0.0, epsilon=1e-4):
    h, c = state
    pre = _norm(_integrated(p, h, x), p.scale, p.offset, epsilon)
    h, c = _lstm_states(*blocks(pre, 4), c, forget_bias)
    return (h, c), h


def layer_norm_gru(p, h, x, epsilon=1e-4):
    size = len(h)
    gx, gh = p.w_ih @ x + p.b_ih, p.w_hh @ h + p.b_hh
    rz = (gx + gh)[: 2 * size]
    rz = sigmoid(_norm(rz, p.scale[: 2 * size], p.offset[: 2 * size], epsilon))
    r, z = rz[:size], rz[size:]
    n = gx[2 * size :] + r * gh[2 * size :]
    n = np.tanh(_norm(n, p.scale[2 * size :], p.offset[2 * size :], epsilon))
    h = (1 - z) * n + z * h
    return h, h


def ind_rnn(p, h, x, activation="relu"):
    pre = p.w_ih @ x + p.b_ih + p.w_hh * h
    h = np.tanh(pre) if activation == "tanh" else np.maximum(pre, 0)
    return h, h


def min_gru(p, h, x):
    z, n = blocks(p.w_ih @ x + p.b_ih, 2)
    h = (1 - sigmoid(z)) * h + sigmoid(z) * n
    return h, h


def min_lstm(p, h, x):
    i, f, g = blocks(p.w_ih @ x + p.b_ih, 3)
    i, f = sigmoid(i), sigmoid(f)
    h = f / (f + i) * h + i / (f + i) * g
    return h, h


def rg_lru(p, h, x):
    heads, _, size = p.w_ih.shape
    r, i = np.zeros_like(h), np.zeros_like(h)
    for k in range(heads):
        at = slice(k * size, (k + 1) * size)
        pre = p.w_ih[k] @ x[at] + p.b_ih[2 * k * size : 2 * (k + 1) * size]
        r[at], i[at] = sigmoid(pre[:size]), sigmoid(pre[size:])
    a = sigmoid(p.decay) ** (8 * r)
    h = a * h + np.sqrt(1 - a**2) * i * x
    return h, h


def para_gru(p, h, x):
    xr, xz, xn = blocks(p.w_ih @ x + p.b_ih, 3)
    r, z = sigmoid(xr + p.w_hh[0] * h), sigmoid(xz + p.w_hh[1] * h)
    n = np.tanh(xn + p.w_hh[2] * (r * h))
    h = (1 - z) * h + z * n
    return h, h


def para_lstm(p, state, x):
    h, c = state
    xf, xg, xo = blocks(p.w_ih @ x + p.b_ih, 3)
    f = sigmoid(xf + p.w_hh[0] * h + p.p_f * c)
    c = f * c + (1 - f) * np.tanh(xg + p.w_hh[1] * h)
    h = sigmoid(xo + p.w_hh[2] * h + p.p_o * c) * np.tanh(c)
    return (h, c), h


def lru(p, h, x):
    factor = np.exp(-np.exp(p.nu) + 1j * np.exp(p.theta))
    h = factor * h + np.exp(p.gamma) * ((p.b_re + 1j * p.b_im) @ x)
    return h, ((p.c_re + 1j * p.c_im) @ h).real + p.d * x


def s5(p, h, x, discretization="zoh"):
    rate, step = p.lambda_re + 1j * p.lambda_im, np.exp(p.log_step)
    if discretization == "zoh":
        factor = np.exp(rate * step)
        scale = (factor - 1) / rate
    else:
        factor = (1 + step / 2 * rate) / (1 - step / 2 * rate)
        scale = step / (1 - step / 2 * rate)
    h = factor * h + scale * ((p.b_re + 1j * p.b_im) @ x)
    return h, 2 * ((p.c_re + 1j * p.c_im) @ h).real + p.d * x


def conv(w, a):
    """Cross-correlate `[R, F, *kernel]` with `[*grid, F]`, which is 0 outside."""
    kernel, grid = w.shape[2:], a.shape[:-1]
    out = np.zeros((*grid, w.shape[0]))
    for place in np.ndindex(*grid):
        for tap in np.ndindex(*kernel):
            at = tuple(
                p + k - (n - 1) // 2 for p, k, n in zip(place, tap, kernel, strict=True)
            )
            if all(0 <= p < n for p, n in zip(at, grid, strict=True)):
                out[place] += w[(slice(None), slice(None), *tap)] @ a[at]
    return out


def conv_lstm(p, state, x, forget_bias=0.0):
    h, c = state
    pre = conv(p.w_ih, x) + p.b_ih + conv(p.w_hh, h) + p.b_hh
    parts = [pre[..., rows] for rows in blocks(np.arange(pre.shape[-1]), 4)]
    h, c = _lstm_states(*parts, c, forget_bias)
    return (h, c), h


# -------------------------------------------------------------------------- attention


def attention(inner, kind, p, state, x, memory):
    """Run one step over `memory [M, E]`, which has no padding.

    Return the state `(cell, ctx, cov)` and `(output, weights)`.
    """
    cell, context, coverage = state
    cell, h = inner(p.cell, cell, np.concatenate([x, context]))
    query = h if p.w_query is None else p.w_query @ h + p.b_query
    if kind == "recurrent":
        query = query + p.w_context @ context + p.b_context
    energies = np.zeros(len(memory))
    for j, s in enumerate(memory):
        if kind == "dot":
            energies[j] = s @ query
            continue
        hidden = p.w_memory @ s + p.b_memory + query
        if kind == "soft_coverage":
            hidden = hidden + coverage[j] * (p.w_coverage @ s + p.b_coverage)
        energies[j] = p.v @ np.tanh(hidden)
    weights = np.exp(energies - energies.max(initial=-np.inf))
    weights = weights / weights.sum()
    context = np.zeros(len(context))
    for a, s in zip(weights, memory, strict=True):
        context = context + a * s
    if coverage is not None:
        coverage = coverage + weights
    return (cell, context, coverage), (np.concatenate([h, context]), weights)
