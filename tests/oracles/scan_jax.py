"""The operator as one plain ``lax.scan`` per layer and direction, step by step.

JAX itself can differentiate it any number of times and in any mode; tests compare the
library's own rules with these derivatives. It is batch-major, with padding "zero". It
shares no code with the library, and test_oracles.py compares it with loop64.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .loop64 import GATES, Params, Result, Spec, shapes


def run(
    spec: Spec,
    weights,
    x,
    h_0,
    c_0=None,
    *,
    seq_lengths=None,
    resets=None,
    dropout_masks=None,
) -> Result:
    """Run the operator; the arguments are those of `loop64.vjp`."""
    batch, steps = x.shape[:2]
    dirs = spec.num_directions
    if seq_lengths is None:
        seq_lengths = jnp.full(batch, steps)
    time = jnp.arange(steps, dtype=seq_lengths.dtype)
    valid = (time[:, None] < seq_lengths[None, :])[..., None]  # [T, B, 1]
    cut = jnp.zeros_like(valid)
    if resets is not None:
        cut = jnp.swapaxes(resets, 0, 1)[..., None]
    out = jnp.where(valid, jnp.swapaxes(x, 0, 1), 0.0)
    c_0 = h_0 if c_0 is None else c_0  # carried along unused if there is no cell state
    last = []
    for layer in range(spec.num_layers):
        if layer > 0 and dropout_masks is not None:
            mask = jnp.swapaxes(dropout_masks[layer - 1], 0, 1)
            out = jnp.where(mask, out / (1.0 - spec.dropout), 0.0)
        halves = []
        for d in range(dirs):
            p = layer * dirs + d
            params = _unpack(spec, weights)[p]

            def step(state, inputs, params=params):
                x_t, valid_t, cut_t = inputs
                held = tuple(_where(cut_t, jnp.zeros_like(s), s) for s in state)
                new = _cell(spec, params, x_t, *held)
                state = tuple(
                    _where(valid_t, n, s) for n, s in zip(new, state, strict=True)
                )
                return state, jnp.where(valid_t, new[0], 0.0)

            # The reverse direction runs through the padding first, without effect.
            state, ys = lax.scan(
                step, (h_0[p], c_0[p]), (out, valid, cut), reverse=d == 1
            )
            last.append(state)
            halves.append(ys)
        out = jnp.concatenate(halves, -1)
    h_n, c_n = (jnp.stack(s) for s in zip(*last, strict=True))
    return Result(jnp.swapaxes(out, 0, 1), h_n, c_n if spec.cells else None)


def _where(mask, a, b):
    """Choose rows by a mask `[B, 1]`; arrays may have further axes in between."""
    return jnp.where(mask if a.ndim == 2 else jnp.expand_dims(mask, 1), a, b)


def _unpack(spec: Spec, flat) -> list[Params]:
    wanted = shapes(spec)
    found = [dict.fromkeys(Params._fields) for _ in wanted]
    for names in (("w_ih", "w_hh", "w_hr"), ("b_ih", "b_hh")):
        for shape, arrays in zip(wanted, found, strict=True):
            for name in names:
                s = getattr(shape, name)
                if s is not None:
                    size = s[0] * (s[1] if len(s) == 2 else 1)
                    arrays[name], flat = flat[:size].reshape(s), flat[size:]
    return [Params(**arrays) for arrays in found]


def _affine(v, w, b, gates):
    out = jnp.tile(v, (1, gates)) if w is None else v @ w.T
    return out if b is None else out + jnp.broadcast_to(b, out.shape)


def _dense(spec: Spec, w, gates):
    """Return the matrix whose columns are those of all heads, most of them 0."""
    k = spec.num_heads
    if k == 1:
        return w
    parts = w.reshape(gates, k, -1, w.shape[1])  # [gates, heads, units, columns]
    zero = jnp.zeros_like(parts[:, 0])
    rows = [
        jnp.concatenate([parts[:, i] if i == j else zero for j in range(k)], -1)
        for i in range(k)
    ]
    return jnp.stack(rows, 1).reshape(w.shape[0], -1)


def _cell(spec: Spec, p: Params, x, h, c):
    gates = GATES[spec.mode]
    p = p._replace(w_hh=_dense(spec, p.w_hh, gates))
    gx, gh = _affine(x, p.w_ih, p.b_ih, gates), _affine(h, p.w_hh, p.b_hh, gates)
    if spec.mode == "rnn_tanh":
        return jnp.tanh(gx + gh), c
    if spec.mode == "rnn_relu":
        return jax.nn.relu(gx + gh), c
    if spec.mode == "gru":
        x_r, x_z, x_n = jnp.split(gx, 3, -1)
        h_r, h_z, h_candidate = jnp.split(gh, 3, -1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        if spec.reset_after:
            n = jnp.tanh(x_n + r * h_candidate)
        else:
            rows = slice(2 * spec.hidden_size, None)
            b_n = None if p.b_hh is None else p.b_hh[rows]
            h_candidate = _affine(r * h, p.w_hh[rows], b_n, 1)
            n = jnp.tanh(x_n + h_candidate)
        return n + z * (h - n), c
    i, f, g, o = jnp.split(gx + gh, 4, -1)
    if spec.mode == "slstm":
        c, n, m = c[:, 0], c[:, 1], c[:, 2]
        log_f = m - jnp.logaddexp(0.0, -f)
        m = jnp.where(n == 0, i, jnp.maximum(i, log_f))
        i, f = jnp.exp(i - m), jnp.exp(jnp.where(log_f > m, 0.0, log_f - m))
        c, n = f * c + i * jnp.tanh(g), f * n + i
        return jax.nn.sigmoid(o) * c / n, jnp.stack([c, n, m], 1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    if spec.cell_clip is not None:
        inside = jnp.abs(c) < spec.cell_clip
        c = jnp.where(inside, c, jnp.sign(c) * spec.cell_clip)
    m = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (m if p.w_hr is None else m @ p.w_hr.T), c
