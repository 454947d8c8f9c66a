"""One step of every mode in numpy float64, forward and backward, for `loop64`."""

import numpy as np

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "gru": 3, "lstm": 4, "slstm": 4}


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


STEPS = {
    "rnn_relu": (_elman, _elman_back),
    "rnn_tanh": (_elman, _elman_back),
    "lstm": (_lstm, _lstm_back),
    "gru": (_gru, _gru_back),
    "slstm": (_slstm, _slstm_back),
}
