"""One step of each cell as three functions: inference, forward and backward.

Shapes throughout: `x [B, I]`, states `[B, H]`, `w_ih [G*H, I]`, `w_hh [G*H, H]`, biases
`[G*H]`, rows by gate: LSTM `i f g o`, GRU `r z n`. All arrays share one dtype. All
functions are pure and hold under every JAX transformation. Equations and papers:
`ostinato.cells`. For whole sequences use `rnn_forward` and `rnn_backward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .. import _checks
from .._typing import Array, Float
from . import pointwise
from .accumulation import wide_product, widen
from .spec import RNNSpec

_LSTM = RNNSpec("lstm", 1, 1)  # pointwise.lstm reads only `cell_clip` of it: None


class GRUReserve(NamedTuple):
    """The gates `r z n` and `uh = w_hn @ h + b_hn`, each `[B, H]`, and the inputs.

    The code elsewhere calls `uh` `h_candidate`.
    """

    r: Float[Array, "B H"]
    z: Float[Array, "B H"]
    n: Float[Array, "B H"]
    uh: Float[Array, "B H"]
    x: Float[Array, "B I"]
    h: Float[Array, "B H"]


class LSTMReserve(NamedTuple):
    """The gates `i f g o` and the new cell state, each `[B, H]`, and the inputs."""

    i: Float[Array, "B H"]
    f: Float[Array, "B H"]
    g: Float[Array, "B H"]
    o: Float[Array, "B H"]
    c_next: Float[Array, "B H"]
    x: Float[Array, "B I"]
    h: Float[Array, "B H"]
    c: Float[Array, "B H"]


class RNNCellReserve(NamedTuple):
    """The new state `[B, H]` and the inputs."""

    h_next: Float[Array, "B H"]
    x: Float[Array, "B I"]
    h: Float[Array, "B H"]


class GRUCellGrads(NamedTuple):
    """Gradients, each in the shape of the argument of the same name."""

    x: Float[Array, "B I"]
    h: Float[Array, "B H"]
    w_ih: Float[Array, "3H I"]
    w_hh: Float[Array, "3H H"]
    b_ih: Float[Array, " 3H"]
    b_hh: Float[Array, " 3H"]


class LSTMCellGrads(NamedTuple):
    """Gradients, each in the shape of the argument of the same name."""

    x: Float[Array, "B I"]
    h: Float[Array, "B H"]
    c: Float[Array, "B H"]
    w_ih: Float[Array, "4H I"]
    w_hh: Float[Array, "4H H"]
    b_ih: Float[Array, " 4H"]
    b_hh: Float[Array, " 4H"]


class RNNCellGrads(NamedTuple):
    """Gradients, each in the shape of the argument of the same name."""

    x: Float[Array, "B I"]
    h: Float[Array, "B H"]
    w_ih: Float[Array, "H I"]
    w_hh: Float[Array, "H H"]
    b_ih: Float[Array, " H"]
    b_hh: Float[Array, " H"]


# ------------------------------------------------------------------------------- GRU


def gru_cell_inference(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    w_ih: Float[Array, "3H I"],
    w_hh: Float[Array, "3H H"],
    b_ih: Float[Array, " 3H"],
    b_hh: Float[Array, " 3H"],
) -> Float[Array, "B H"]:
    """Run one GRU step that applies `r` after the recurrent product.

    Args:
        x: input, `[B, I]`.
        h: state before the step, `[B, H]`.
        w_ih: `[3H, I]`.
        w_hh: `[3H, H]`.
        b_ih: `[3H]`.
        b_hh: `[3H]`.

    Returns:
        `h_next [B, H]`.

    Raises:
        TypeError: the dtypes differ or are not floating.
        ValueError: shapes disagree.

    Equations: `ostinato.cells.GRU`.
    """
    return gru_cell_forward(x, h, w_ih, w_hh, b_ih, b_hh)[0]


def gru_cell_forward(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    w_ih: Float[Array, "3H I"],
    w_hh: Float[Array, "3H H"],
    b_ih: Float[Array, " 3H"],
    b_hh: Float[Array, " 3H"],
) -> tuple[Float[Array, "B H"], GRUReserve]:
    """Run `gru_cell_inference`, and keep what its backward pass reads.

    Args, Raises: as `gru_cell_inference`.

    Returns:
        `(h_next, reserve)`; `gru_cell_backward` takes the reserve.
    """
    x, w_ih, w_hh, b_ih, b_hh, h = _checked(3, x, w_ih, w_hh, b_ih, b_hh, h=h)
    gx, gh = _affine(x, w_ih, b_ih), _affine(h, w_hh, b_hh)
    gates, h_next = pointwise.gru_after(gx, gh, widen(h))
    r, z, n, h_candidate = _narrow(x, *jnp.split(gates, 4, axis=-1))
    return h_next.astype(x.dtype), GRUReserve(r, z, n, h_candidate, x, h)


def gru_cell_backward(
    dh_next: Float[Array, "B H"],
    reserve: GRUReserve,
    w_ih: Float[Array, "3H I"],
    w_hh: Float[Array, "3H H"],
) -> GRUCellGrads:
    """Pull the cotangent of `h_next` back to all arguments of the step.

    Args:
        dh_next: the cotangent of `h_next`, `[B, H]`.
        reserve: as `gru_cell_forward` returned it.
        w_ih: as the forward pass had it, `[3H, I]`.
        w_hh: as the forward pass had it, `[3H, H]`.

    Returns:
        `GRUCellGrads`: the gradients of `x`, the states, the weights and the biases.

    Raises:
        TypeError: the dtypes differ, or `reserve` is none.
        ValueError: shapes disagree.
    """
    reserve, w_ih, w_hh, dh_next = _checked_backward(
        3, GRUReserve, reserve, w_ih, w_hh, dh_next=dh_next
    )
    x, h = reserve.x, reserve.h
    gates = jnp.concatenate([widen(a) for a in reserve[:4]], axis=-1)
    dgx, dh_candidate, dh = pointwise.gru_after_backward(
        gates, widen(h), widen(dh_next)
    )
    dgh = jnp.concatenate([dgx[:, : 2 * h.shape[1]], dh_candidate], axis=-1)
    return GRUCellGrads(*_gradients(x, h, w_ih, w_hh, dgx, dgh, dh))


# ------------------------------------------------------------------------------ LSTM


def lstm_cell_inference(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    c: Float[Array, "B H"],
    w_ih: Float[Array, "4H I"],
    w_hh: Float[Array, "4H H"],
    b_ih: Float[Array, " 4H"],
    b_hh: Float[Array, " 4H"],
) -> tuple[Float[Array, "B H"], Float[Array, "B H"]]:
    """Run one LSTM step.

    Args:
        x: input, `[B, I]`.
        h: hidden state before the step, `[B, H]`.
        c: cell state before the step, `[B, H]`.
        w_ih: `[4H, I]`.
        w_hh: `[4H, H]`.
        b_ih: `[4H]`.
        b_hh: `[4H]`.

    Returns:
        `(h_next, c_next)`, each `[B, H]`.

    Raises:
        TypeError: the dtypes differ or are not floating.
        ValueError: shapes disagree.

    Equations: `ostinato.cells.LSTM`.
    """
    return lstm_cell_forward(x, h, c, w_ih, w_hh, b_ih, b_hh)[0]


def lstm_cell_forward(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    c: Float[Array, "B H"],
    w_ih: Float[Array, "4H I"],
    w_hh: Float[Array, "4H H"],
    b_ih: Float[Array, " 4H"],
    b_hh: Float[Array, " 4H"],
) -> tuple[tuple[Float[Array, "B H"], Float[Array, "B H"]], LSTMReserve]:
    """Run `lstm_cell_inference`, and keep what its backward pass reads.

    Args, Raises: as `lstm_cell_inference`.

    Returns:
        `((h_next, c_next), reserve)`; `lstm_cell_backward` takes the reserve.
    """
    x, w_ih, w_hh, b_ih, b_hh, h, c = _checked(4, x, w_ih, w_hh, b_ih, b_hh, h=h, c=c)
    pre = _affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh)
    gates, c_next, h_next = pointwise.lstm(pre, widen(c), _LSTM)
    c_next, h_next = _narrow(x, c_next, h_next)
    i, f, g, o = _narrow(x, *jnp.split(gates, 4, axis=-1))
    return (h_next, c_next), LSTMReserve(i, f, g, o, c_next, x, h, c)


def lstm_cell_backward(
    dh_next: Float[Array, "B H"],
    dc_next: Float[Array, "B H"],
    reserve: LSTMReserve,
    w_ih: Float[Array, "4H I"],
    w_hh: Float[Array, "4H H"],
) -> LSTMCellGrads:
    """Pull cotangents of `h_next` and `c_next` back to all arguments of the step.

    Args:
        dh_next: the cotangent of `h_next`, `[B, H]`.
        dc_next: the cotangent of `c_next`, `[B, H]`.
        reserve: as `lstm_cell_forward` returned it.
        w_ih: as the forward pass had it, `[4H, I]`.
        w_hh: as the forward pass had it, `[4H, H]`.

    Returns:
        `LSTMCellGrads`: the gradients of `x`, the states, the weights and the biases.

    Raises:
        TypeError: the dtypes differ, or `reserve` is none.
        ValueError: shapes disagree.
    """
    reserve, w_ih, w_hh, dh_next, dc_next = _checked_backward(
        4, LSTMReserve, reserve, w_ih, w_hh, dh_next=dh_next, dc_next=dc_next
    )
    x, h, c = reserve.x, reserve.h, reserve.c
    gates = jnp.concatenate([widen(a) for a in reserve[:4]], axis=-1)
    dpre, dc = pointwise.lstm_backward(
        gates,
        widen(c),
        widen(reserve.c_next),
        widen(dh_next),
        widen(dc_next),
        _LSTM,
    )
    dx, dh, *dweights = _gradients(x, h, w_ih, w_hh, dpre, dpre, None)
    return LSTMCellGrads(dx, dh, dc.astype(x.dtype), *dweights)


# ------------------------------------------------------------------------- plain RNN


def rnn_cell_inference(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    w_ih: Float[Array, "H I"],
    w_hh: Float[Array, "H H"],
    b_ih: Float[Array, " H"],
    b_hh: Float[Array, " H"],
    activation: str = "tanh",
) -> Float[Array, "B H"]:
    """Run one plain RNN step: `h_next = act(w_ih x + b_ih + w_hh h + b_hh)`.

    Args:
        x: input, `[B, I]`.
        h: state before the step, `[B, H]`.
        w_ih: `[H, I]`.
        w_hh: `[H, H]`.
        b_ih: `[H]`.
        b_hh: `[H]`.
        activation: `"tanh"` or `"relu"`.

    Returns:
        `h_next [B, H]`.

    Raises:
        TypeError: the dtypes differ or are not floating.
        ValueError: shapes disagree, or the activation is unknown.
    """
    return rnn_cell_forward(x, h, w_ih, w_hh, b_ih, b_hh, activation)[0]


def rnn_cell_forward(
    x: Float[Array, "B I"],
    h: Float[Array, "B H"],
    w_ih: Float[Array, "H I"],
    w_hh: Float[Array, "H H"],
    b_ih: Float[Array, " H"],
    b_hh: Float[Array, " H"],
    activation: str = "tanh",
) -> tuple[Float[Array, "B H"], RNNCellReserve]:
    """Run `rnn_cell_inference`, and keep what its backward pass reads.

    Args, Raises: as `rnn_cell_inference`.

    Returns:
        `(h_next, reserve)`; `rnn_cell_backward` takes the reserve.
    """
    spec = _spec_of(activation)
    x, w_ih, w_hh, b_ih, b_hh, h = _checked(1, x, w_ih, w_hh, b_ih, b_hh, h=h)
    h_next = pointwise.rnn(_affine(x, w_ih, b_ih) + _affine(h, w_hh, b_hh), spec)
    h_next = h_next.astype(x.dtype)
    return h_next, RNNCellReserve(h_next, x, h)


def rnn_cell_backward(
    dh_next: Float[Array, "B H"],
    reserve: RNNCellReserve,
    w_ih: Float[Array, "H I"],
    w_hh: Float[Array, "H H"],
    activation: str = "tanh",
) -> RNNCellGrads:
    """Pull the cotangent of `h_next` back to all arguments of the step.

    Args:
        dh_next: the cotangent of `h_next`, `[B, H]`.
        reserve: as `rnn_cell_forward` returned it.
        w_ih: as the forward pass had it, `[H, I]`.
        w_hh: as the forward pass had it, `[H, H]`.
        activation: that of the forward pass.

    Returns:
        `RNNCellGrads`: the gradients of `x`, the states, the weights and the biases.

    Raises:
        TypeError: the dtypes differ, or `reserve` is none.
        ValueError: shapes disagree, or the activation is unknown.
    """
    spec = _spec_of(activation)
    reserve, w_ih, w_hh, dh_next = _checked_backward(
        1, RNNCellReserve, reserve, w_ih, w_hh, dh_next=dh_next
    )
    slope = pointwise.rnn_slope(widen(reserve.h_next), spec)
    dpre = widen(dh_next) * slope
    return RNNCellGrads(*_gradients(reserve.x, reserve.h, w_ih, w_hh, dpre, dpre, None))


# ---------------------------------------------------------------------------- shared


def _spec_of(activation: str) -> RNNSpec:
    _checks.check_choice("activation", activation, ("tanh", "relu"))
    return RNNSpec(f"rnn_{activation}", 1, 1)  # type: ignore[arg-type]


def _checked(
    gates: int, x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, **states: Any
) -> list[Array]:
    """Return all arguments of a forward pass in their order, as arrays of JAX."""
    given = dict(x=x, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh, **states)
    arrays = {name: _checks.check_array(name, a) for name, a in given.items()}
    x, h = arrays["x"], arrays["h"]
    _checks.check_floating("x", x, _checks.FLOATS)
    _checks.check_same_dtype(**arrays)
    _checks.check_rank("x", x, "B", "I")
    _checks.check_rank("h", h, "B", "H")
    (batch, inputs), hidden = x.shape, h.shape[1]
    for name in states:
        _checks.check_shape(name, arrays[name], B=batch, H=hidden)
    _check_matrices(gates, inputs, hidden, arrays["w_ih"], arrays["w_hh"])
    for name in ("b_ih", "b_hh"):
        _checks.check_shape(name, arrays[name], **{f"{gates}H": gates * hidden})
    return [*arrays.values()]


def _checked_backward(
    gates: int, kind: type, reserve: Any, w_ih: Any, w_hh: Any, **cotangents: Any
) -> list[Any]:
    """Return all arguments of a backward pass in their order, as arrays of JAX."""
    if not isinstance(reserve, kind):
        raise TypeError(
            f"`reserve` must be the {kind.__name__} that the forward pass returned, "
            f"got {_checks.describe(reserve)}"
        )
    kept = {f"reserve.{name}": a for name, a in reserve._asdict().items()}
    arrays = {**kept, "w_ih": w_ih, "w_hh": w_hh, **cotangents}
    arrays = {name: _checks.check_array(name, a) for name, a in arrays.items()}
    x, h = arrays["reserve.x"], arrays["reserve.h"]
    _checks.check_rank("reserve.x", x, "B", "I")
    _checks.check_rank("reserve.h", h, "B", "H")
    _checks.check_floating("reserve.x", x, _checks.FLOATS)
    _checks.check_same_dtype(**arrays)
    (batch, hidden), inputs = h.shape, x.shape[1]
    _checks.check_shape("reserve.x", x, B=batch, I=inputs)
    for name in [*kept, *cotangents]:
        if name != "reserve.x":
            _checks.check_shape(name, arrays[name], B=batch, H=hidden)
    _check_matrices(gates, inputs, hidden, arrays["w_ih"], arrays["w_hh"])
    checked = [*arrays.values()]
    return [kind(*checked[: len(kept)]), *checked[len(kept) :]]


def _check_matrices(
    gates: int, inputs: int, hidden: int, w_ih: Array, w_hh: Array
) -> None:
    rows = {f"{gates}H": gates * hidden}
    _checks.check_shape("w_ih", w_ih, **rows, I=inputs)
    _checks.check_shape("w_hh", w_hh, **rows, H=hidden)


def _narrow(like: Array, *arrays: Array) -> list[Array]:
    return [a.astype(like.dtype) for a in arrays]


def _affine(a: Array, w: Array, b: Array) -> Array:
    return wide_product(a, w, (1, 1)) + widen(b)[None]


def _gradients(
    x: Array,
    h: Array,
    w_ih: Array,
    w_hh: Array,
    dgx: Array,
    dgh: Array,
    dh: Array | None,
) -> list[Array]:
    """Return `dx, dh, dw_ih, dw_hh, db_ih, db_hh`.

    `dgx` and `dgh` are the cotangents of the two products; `dh` is the part of that of
    `h` that does not pass through a product, or None.
    """
    gx, gh = _narrow(x, dgx, dgh)
    through = wide_product(gh, w_hh, (1, 0))
    return _narrow(
        x,
        wide_product(gx, w_ih, (1, 0)),
        through if dh is None else dh + through,
        wide_product(gx, x, (0, 0)),
        wide_product(gh, h, (0, 0)),
        jnp.sum(dgx, axis=0),
        jnp.sum(dgh, axis=0),
    )
