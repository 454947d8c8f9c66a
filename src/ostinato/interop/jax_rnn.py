"""Replacement for `jax.experimental.rnn`: the same functions, on every platform.

    - from jax.experimental import rnn
    + from ostinato.interop import jax_rnn as rnn

Names, signatures and the flat weight vector are the same. What differs: the functions
run on CPU and TPU too, in float32, float64, bfloat16 and float16; sequences of length 0
return their initial state; `vmap`, forward mode and derivatives of any order work. The
primitives of cuDNN, `rnn_fwd_p` and `rnn_bwd_p`, and their shape rules have no
counterpart.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import (
    LayerWeights,
    RNNSpec,
    init_weights,
    num_params,
    pack_weights,
    rnn,
    rnn_backward,
    rnn_forward,
    unpack_weights,
)
from .._typing import Array

__all__ = [
    "get_num_params_in_lstm",
    "init_lstm_weight",
    "lstm",
    "lstm_bwd",
    "lstm_fwd",
    "lstm_ref",
    "swap_lstm_gates",
    "unpack_lstm_weights",
]


PRNGKeyArray = Any
sigmoid = jax.nn.sigmoid
tanh = jax.nn.tanh


def _spec(
    input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> RNNSpec:
    return RNNSpec("lstm", input_size, hidden_size, num_layers, bool(bidirectional))


def get_num_params_in_lstm(
    input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> int:
    """Return the length of the flat weight vector."""
    return num_params(_spec(input_size, hidden_size, num_layers, bidirectional))


def init_lstm_weight(
    rng: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
) -> Array:
    """Draw flat float32 weights from U(-k, k), k = hidden_size ** -0.5.

    The distribution is that of `jax.experimental.rnn`, but the drawn numbers differ.
    """
    return init_weights(rng, _spec(input_size, hidden_size, num_layers, bidirectional))


def unpack_lstm_weights(
    weights: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
) -> tuple[dict[int, Array], dict[int, Array], dict[int, Array], dict[int, Array]]:
    """Return `(W_ih, W_hh, b_ih, b_hh)`, each a dict from pseudo-layer to array.

    Rows are grouped by gate in the order i, f, g, o; see `ostinato.unpack_weights`.
    """
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)
    layers = list(enumerate(unpack_weights(weights, spec)))
    return (
        {p: layer.w_ih for p, layer in layers},
        {p: layer.w_hh for p, layer in layers},
        {p: layer.b_ih for p, layer in layers},
        {p: layer.b_hh for p, layer in layers},
    )


def swap_lstm_gates(
    weights: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
) -> Array:
    """Reorder the gates of flat weights from i, f, g, o to i, f, o, g, or back."""
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)

    def swap(a: Array | None) -> Array | None:
        if a is None:
            return None
        i, f, g, o = jnp.split(a, 4, axis=0)
        return jnp.concatenate([i, f, o, g], axis=0)

    layers = unpack_weights(jnp.asarray(weights), spec)
    return pack_weights([LayerWeights(*map(swap, layer)) for layer in layers], spec)


def lstm(
    x: Array,
    h_0: Array,
    c_0: Array,
    weights: Array,
    seq_lengths: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    precision: Any = None,
) -> tuple[Array, Array, Array]:
    """Run a stacked LSTM over a padded batch of sequences.

    Args:
        x: `[B, T, I]`.
        h_0: `[L*D, B, H]`.
        c_0: `[L*D, B, H]`.
        weights: flat, `[get_num_params_in_lstm(...)]`.
        seq_lengths: integers `[B]`, each in 0..T.
        input_size: I.
        hidden_size: H.
        num_layers: L.
        dropout: 0 or False; this signature has no key to draw a mask from.
        bidirectional: True for D = 2, False for D = 1.
        precision: of the products, a `jax.lax.Precision`.

    Returns:
        `y [B, T, D*H]`, 0 past each sequence's end, and `h_n`, `c_n`, `[L*D, B, H]`.

    Raises:
        NotImplementedError: `dropout` is not 0.
        TypeError, ValueError: as `ostinato.rnn`.

    Holds under the same transformations as `ostinato.rnn`; under `jax.jit` the
    arguments from `input_size` on are static.
    """
    _check_dropout(dropout)
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)
    y, (h_n, c_n) = rnn(
        spec,
        weights,
        x,
        (h_0, c_0),
        seq_lengths=seq_lengths,
        precision=precision,
    )
    return y, h_n, c_n


def lstm_fwd(
    x: Array,
    h_0: Array,
    c_0: Array,
    w: Array,
    seq_lengths: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    precision: Any,
) -> tuple[tuple[Array, Array, Array], tuple[Any, ...]]:
    """Run `lstm` and keep what `lstm_bwd` needs: a pair for `jax.custom_vjp.defvjp`.

    Args:
        x: as for `lstm`, as are all others; `w` is its `weights`.
        h_0: as for `lstm`.
        c_0: as for `lstm`.
        w: flat weights.
        seq_lengths: as for `lstm`.
        input_size: I.
        hidden_size: H.
        num_layers: L.
        dropout: 0 or False.
        bidirectional: whether D is 2.
        precision: of the products, or None.

    Returns:
        `(y, h_n, c_n)`, and `(x, h_0, c_0, w, seq_lengths, y, reserve)`. The reserve is
        a pytree; in `jax.experimental.rnn` it is cuDNN's, an array.

    Raises:
        NotImplementedError: `dropout` is not 0.
        TypeError, ValueError: as `ostinato.rnn`.

    Holds under the transformations of `ostinato.rnn`; under `jax.jit` the arguments
    from `input_size` on are static.
    """
    _check_dropout(dropout)
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)
    (y, (h_n, c_n)), reserve = rnn_forward(
        spec, w, x, (h_0, c_0), seq_lengths=seq_lengths, precision=precision
    )
    return (y, h_n, c_n), (x, h_0, c_0, w, seq_lengths, y, reserve)


def lstm_bwd(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    precision: Any,
    residuals: tuple[Any, ...],
    gradients: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array, Array, Array]:
    """Pull the cotangents of `lstm_fwd`'s outputs back to its arguments.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        dropout: 0 or False.
        bidirectional: whether D is 2.
        precision: of the products; that of `lstm_fwd` holds.
        residuals: the second result of `lstm_fwd`.
        gradients: cotangents of `y`, `h_n` and `c_n`.

    Returns:
        Cotangents of `x`, `h_0`, `c_0`, `w`, and zeros for `seq_lengths`.

    Raises:
        NotImplementedError: `dropout` is not 0.
        TypeError, ValueError: as `ostinato.rnn_backward`.

    Holds under the transformations of `ostinato.rnn_backward`.
    """
    _check_dropout(dropout)
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)
    *_, w, seq_lengths, _, reserve = residuals
    dy, *dstate = gradients
    dx, dw, (dh_0, dc_0) = rnn_backward(spec, w, reserve, dy, tuple(dstate))
    return dx, dh_0, dc_0, dw, jnp.zeros_like(seq_lengths)


def lstm_ref(
    x: Array,
    h_0: Array,
    c_0: Array,
    W_ih: dict[int, Array],
    W_hh: dict[int, Array],
    b_ih: dict[int, Array],
    b_hh: dict[int, Array],
    seq_lengths: Array,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[Array, Array, Array]:
    """Run `lstm` on unpacked weights and the reference backend, `xla`.

    Arguments and results are those of `lstm`; `W_ih`, `W_hh`, `b_ih`, `b_hh` are dicts
    from pseudo-layer to array, as `unpack_lstm_weights` returns them.
    """
    _check_dropout(dropout)
    spec = _spec(input_size, hidden_size, num_layers, bidirectional)
    layers = [
        LayerWeights(W_ih[p], W_hh[p], b_ih[p], b_hh[p], None)
        for p in range(spec.num_layers * spec.num_directions)
    ]
    weights = pack_weights(layers, spec)
    y, (h_n, c_n) = rnn(
        spec, weights, x, (h_0, c_0), seq_lengths=seq_lengths, backend="xla"
    )
    return y, h_n, c_n


def _check_dropout(dropout: float) -> None:
    if dropout != 0:
        raise NotImplementedError(
            f"`dropout` must be 0 here, got {dropout}: this signature has no key to "
            "draw a mask from; use ostinato.rnn with RNNSpec(dropout=...) and key="
        )
