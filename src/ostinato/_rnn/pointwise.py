"""The elementwise equations of one step: forward, tangent and backward.

The equations themselves and their sources are those of `ostinato.cells.RNN`, `LSTM`,
`LSTMP` and `GRU`; those of the sLSTM are in Beck et al. (2024), arXiv:2405.04517. Every
function works on arrays of one dtype and of any leading shape, with the units on the
last axis. `pre` are preactivations. `gx` and `gh` are the input and the recurrent
product with their biases added; `h_candidate` is the block of `gh` that belongs to the
candidate `n` of a GRU. Backward functions return cotangents of preactivations, which
are also the cotangents of the products in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array

if TYPE_CHECKING:  # spec.py imports the table of modes, which imports this file
    from .spec import RNNSpec


def _split(a: Array, blocks: int) -> list[Array]:
    return jnp.split(a, blocks, axis=-1)


def _same(a: Array) -> Array:
    return a


def _join(*blocks: Array) -> Array:
    return jnp.concatenate(blocks, axis=-1)


def _d_sigmoid(s: Array) -> Array:
    return s * (1 - s)


def _d_tanh(t: Array) -> Array:
    return 1 - t * t


# ------------------------------------------------------------------------ plain RNN


def rnn(pre: Array, spec: RNNSpec) -> Array:
    """Return `h = act(pre)`."""
    return jax.nn.relu(pre) if spec.mode == "rnn_relu" else jnp.tanh(pre)


def rnn_slope(h: Array, spec: RNNSpec) -> Array:
    """Return `dh / dpre`, which follows from `h`, for tangent and backward."""
    return (h > 0).astype(h.dtype) if spec.mode == "rnn_relu" else _d_tanh(h)


# ----------------------------------------------------------------------------- LSTM


def lstm(pre: Array, c_prev: Array, spec: RNNSpec) -> tuple[Array, Array, Array]:
    """Return `(gates, c, u)`: `c` is clipped, `u = o tanh(c)` is not projected."""
    *ifg, o = _split(pre, 4)
    gates, c = lstm_cell_state(ifg, c_prev)
    c, o = _clip(c, spec), jax.nn.sigmoid(o)
    return _join(*gates, o), c, o * jnp.tanh(c)


def lstm_cell_state(
    pre: Sequence[Array], c_prev: Array, mark: Callable[[Array], Array] = _same
) -> tuple[list[Array], Array]:
    """Return the gates `i f g`, and the new cell state before it is clipped.

    `pre` holds the preactivations of these gates; `mark` is applied to each gate.
    """
    i, f, g = pre
    i, f, g = mark(jax.nn.sigmoid(i)), mark(jax.nn.sigmoid(f)), mark(jnp.tanh(g))
    return [i, f, g], f * c_prev + i * g


def _clip(c: Array, spec: RNNSpec) -> Array:
    if spec.cell_clip is None:
        return c
    clipped = jnp.clip(c, -spec.cell_clip, spec.cell_clip)
    if spec.clip_nan:
        return jnp.where(jnp.isnan(c), spec.cell_clip, clipped)
    return clipped


def _unclipped(dc: Array, c: Array, spec: RNNSpec) -> Array:
    """Convert a (co)tangent of `c` to one of the value before clipping, or back."""
    if spec.cell_clip is None:
        return dc
    return jnp.where(jnp.abs(c) < spec.cell_clip, dc, 0)


def lstm_output(gates: Array, c: Array) -> Array:
    """Return `u = o tanh(c)` from the saved gates."""
    return _split(gates, 4)[3] * jnp.tanh(c)


def lstm_tangent(
    gates: Array, c_prev: Array, c: Array, dpre: Array, dc_prev: Array, spec: RNNSpec
) -> tuple[Array, Array]:
    """Return tangents `(dc, du)`."""
    i, f, g, o = _split(gates, 4)
    di, df, dg, do = _split(dpre, 4)
    dc = f * dc_prev + _d_sigmoid(f) * df * c_prev
    dc = dc + _d_sigmoid(i) * di * g + i * _d_tanh(g) * dg
    dc = _unclipped(dc, c, spec)
    tanh_c = jnp.tanh(c)
    return dc, _d_sigmoid(o) * do * tanh_c + o * _d_tanh(tanh_c) * dc


def lstm_backward(
    gates: Array, c_prev: Array, c: Array, du: Array, dc: Array, spec: RNNSpec
) -> tuple[Array, Array]:
    """Return cotangents `(dpre, dc_prev)`."""
    i, f, g, o = _split(gates, 4)
    tanh_c = jnp.tanh(c)
    dc = dc + du * o * _d_tanh(tanh_c)

    def cut(a: Array) -> Array:  # applied last, so that no 0 * NaN survives a clip
        return _unclipped(a, c, spec)

    dpre = _join(
        cut(dc * g * _d_sigmoid(i)),
        cut(dc * c_prev * _d_sigmoid(f)),
        cut(dc * i * _d_tanh(g)),
        du * tanh_c * _d_sigmoid(o),
    )
    return dpre, cut(dc * f)


# ---------------------------------------------------------------------------- sLSTM


class SLSTMGates(NamedTuple):
    """The blocks that a step of an sLSTM saves.

    Attributes:
        i: `exp(i - m)`, at most 1.
        f: `exp(logsigmoid(f) + m_prev - m)`, at most 1.
        z: `tanh(z)`.
        o: `sigmoid(o)`.
        slope: `sigmoid(-f)`, the slope of `logsigmoid(f)`.
    """

    i: Array
    f: Array
    z: Array
    o: Array
    slope: Array


def slstm(pre: Array, cells: Sequence[Array]) -> tuple[Array, tuple, Array]:
    """Return `(gates, (c, n, m), u)`, of which `u = o c / n` is not projected.

    `m` is the logarithm of the scale of `c` and `n`. Where `n` was 0 there is nothing
    to scale, and `m` is that of the input alone.
    """
    (i, f, z, o), (c, n, m_prev) = _split(pre, 4), cells
    log_f = jax.nn.log_sigmoid(f) + m_prev
    m = jnp.where((n == 0) | (i >= log_f), i, log_f)
    gates = SLSTMGates(
        jnp.exp(i - m),
        jnp.exp(jnp.minimum(log_f - m, 0)),
        jnp.tanh(z),
        jax.nn.sigmoid(o),
        jax.nn.sigmoid(-f),
    )
    c, n = gates.f * c + gates.i * gates.z, gates.f * n + gates.i
    return _join(*gates), (c, n, m), gates.o * c / n


def _read_slstm(gates: Array, cells: Sequence[Array]) -> tuple:
    """Return the gates, `1 / n` and `c / n`; where no step has run, n is 0."""
    (c, n), read = cells[:2], SLSTMGates(*_split(gates, 5))
    scale = 1 / jnp.where(n == 0, 1, n)
    return read, scale, c * scale


def slstm_output(gates: Array, cells: Sequence[Array]) -> Array:
    """Return `u = o c / n` from the saved gates and the states after the step."""
    read, _, ratio = _read_slstm(gates, cells)
    return read.o * ratio


def _slstm_branches(gates: SLSTMGates, n_prev: Array) -> tuple[Array, Array]:
    """Return where `m` follows the input gate, and where the gate `f` is constant."""
    first = n_prev == 0
    return first | (gates.i >= gates.f), first & (gates.f == 1)


def slstm_tangent(
    gates: Array,
    before: Sequence[Array],
    after: Sequence[Array],
    dpre: Array,
    dbefore: Sequence[Array],
) -> tuple[tuple, Array]:
    """Return tangents `((dc, dn, dm), du)`; the states are `(c, n, m)`."""
    read, scale, ratio = _read_slstm(gates, after)
    (di, df, dz, do), (dc, dn, dm), (c, n, _) = _split(dpre, 4), dbefore, before
    follows_i, constant = _slstm_branches(read, n)
    dlog_f = read.slope * df + dm
    dm = jnp.where(follows_i, di, dlog_f)
    di = read.i * (di - dm)
    df = jnp.where(constant, 0, read.f * (dlog_f - dm))
    dc = read.f * dc + df * c + di * read.z + read.i * _d_tanh(read.z) * dz
    dn = read.f * dn + df * n + di
    du = _d_sigmoid(read.o) * do * ratio + read.o * scale * (dc - ratio * dn)
    return (dc, dn, dm), du


def slstm_backward(
    gates: Array,
    before: Sequence[Array],
    after: Sequence[Array],
    du: Array,
    dafter: Sequence[Array],
) -> tuple[Array, tuple]:
    """Return cotangents `(dpre, (dc, dn, dm))` of the states before the step."""
    read, scale, ratio = _read_slstm(gates, after)
    (dc, dn, dm), (c, n, _) = dafter, before
    dratio = du * read.o * scale
    dc, dn = dc + dratio, dn - dratio * ratio
    follows_i, constant = _slstm_branches(read, n)
    di = (dc * read.z + dn) * read.i
    df = jnp.where(constant, 0, (dc * c + dn * n) * read.f)
    dm = dm - di - df
    di, df = jnp.where(follows_i, di + dm, di), jnp.where(follows_i, df, df + dm)
    dpre = _join(
        di,
        df * read.slope,
        dc * read.i * _d_tanh(read.z),
        du * ratio * _d_sigmoid(read.o),
    )
    return dpre, (dc * read.f, dn * read.f, df)


# ------------------------------------------------------------------------------ GRU


def gru_after(gx: Array, gh: Array, h_prev: Array) -> tuple[Array, Array]:
    """Return `(r z n h_candidate, h)` of a GRU with reset after the product."""
    (rx, zx, nx), (rh, zh, h_candidate) = _split(gx, 3), _split(gh, 3)
    r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
    n = jnp.tanh(nx + r * h_candidate)
    return _join(r, z, n, h_candidate), gru_output(z, n, h_prev)


def gru_output(z: Array, n: Array, h_prev: Array) -> Array:
    """Return `h = (1 - z) n + z h_prev`."""
    return n + z * (h_prev - n)


def gru_after_tangent(
    gates: Array, h_prev: Array, dgx: Array, dgh: Array, dh_prev: Array
) -> Array:
    """Return the tangent `dh`."""
    r, z, n, h_candidate = _split(gates, 4)
    (drx, dzx, dnx), (drh, dzh, dh_candidate) = _split(dgx, 3), _split(dgh, 3)
    dr, dz = _d_sigmoid(r) * (drx + drh), _d_sigmoid(z) * (dzx + dzh)
    dn = _d_tanh(n) * (dnx + dr * h_candidate + r * dh_candidate)
    return (1 - z) * dn + dz * (h_prev - n) + z * dh_prev


def gru_after_backward(
    gates: Array, h_prev: Array, dh: Array
) -> tuple[Array, Array, Array]:
    """Return cotangents `(dgx, dh_candidate, dh_prev)`.

    The first two blocks of `dgh` equal those of `dgx`; the last one is `dh_candidate`.
    `dh_prev` does not include the path through the recurrent product.
    """
    r, z, n, h_candidate = _split(gates, 4)
    dn = dh * (1 - z) * _d_tanh(n)
    dz = dh * (h_prev - n) * _d_sigmoid(z)
    dr = dn * h_candidate * _d_sigmoid(r)
    return _join(dr, dz, dn), dn * r, dh * z


def gru_before_gates(gx: Array, gh: Array) -> tuple[Array, Array]:
    """Return the gates `(r, z)` of a GRU with reset before the product."""
    r, z = _split(jax.nn.sigmoid(gx + gh), 2)
    return r, z


def gru_before(z: Array, n_pre: Array, h_prev: Array) -> tuple[Array, Array]:
    """Return `(n, h)`; `n_pre` includes `h_candidate = w_hn @ (r h_prev) + b_hn`."""
    n = jnp.tanh(n_pre)
    return n, gru_output(z, n, h_prev)


def gru_before_tangent(
    gates: Array, h_prev: Array, dz: Array, dn_pre: Array, dh_prev: Array
) -> Array:
    """Return the tangent `dh`.

    `dz` is the tangent of the gate `z`, `dn_pre` that of the preactivation of `n`.
    """
    _, z, n = _split(gates, 3)
    return (1 - z) * _d_tanh(n) * dn_pre + dz * (h_prev - n) + z * dh_prev


def gru_before_rz_tangent(gates: Array, drz_pre: Array) -> tuple[Array, Array]:
    """Return the tangents `(dr, dz)` of the gates from `drz_pre`."""
    r, z, _ = _split(gates, 3)
    dr, dz = _split(drz_pre, 2)
    return _d_sigmoid(r) * dr, _d_sigmoid(z) * dz


def gru_before_backward(gates: Array, h_prev: Array, dh: Array) -> tuple[Array, Array]:
    """Return cotangents `(dz_pre, dn_pre)`."""
    _, z, n = _split(gates, 3)
    return dh * (h_prev - n) * _d_sigmoid(z), dh * (1 - z) * _d_tanh(n)


def gru_before_reset_backward(
    gates: Array, h_prev: Array, dh: Array, drh: Array
) -> tuple[Array, Array]:
    """Return `(dr_pre, dh_prev)`, given `drh`, the cotangent of `r h_prev`."""
    r, z, _ = _split(gates, 3)
    return drh * h_prev * _d_sigmoid(r), dh * z + drh * r
