"""The code that all exporters share: what a target can express, and where biases go."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .. import LayerWeights, RNNSpec, _checks, unpack_weights
from .._rnn.spec import check_spec
from .._typing import Array, Float
from ..store import flat_weights

_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_HINT = "save it with `ostinato.save`"


def require(spec: RNNSpec, target: str, *, hint: str = _HINT, **fields: Any) -> None:
    """Raise ValueError unless `spec` has these values in these fields.

    It must also have one head, and a mode that other libraries know.

    Args:
        spec: the network.
        target: what it is to become, for the message, such as `"a layer of torch"`.
        hint: what to do with another mode, for the message.
        fields: names and values that the target takes for granted.
    """
    check_spec(spec)
    if spec.mode not in _MODES:
        raise ValueError(
            f"`spec` must have mode {' or '.join(map(repr, _MODES))} for {target}, got "
            f"{spec.mode!r}; {hint}"
        )
    for name, value in {"num_heads": 1, **fields}.items():
        if getattr(spec, name) != value:
            raise ValueError(
                f"`spec` must have {name}={value!r} for {target}, got "
                f"{getattr(spec, name)!r}"
            )


def pseudo_layers(
    spec: RNNSpec, weights: Float[Array, " num_params"], traced: bool = False
) -> list[LayerWeights]:
    """Return the weights of all pseudo-layers.

    Args:
        spec: the network.
        weights: its flat vector, or a prepared one.
        traced: whether weights without values will do.

    Raises:
        TypeError: `weights` is no array of floats, or traced.
        ValueError: `weights` is not the flat vector of `spec`.
    """
    return unpack_weights(flat_weights("weights", weights, spec, traced), spec)


def pseudo_layer(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    layer: int = 0,
    reverse: bool = False,
    traced: bool = False,
) -> LayerWeights:
    """Return the weights of one direction of one layer.

    Raises:
        TypeError, ValueError: as `pseudo_layers`.
        ValueError: the network has no such layer or direction.
    """
    layer = _checks.check_size("layer", layer, 0)
    if layer >= spec.num_layers:
        raise ValueError(
            f"`layer` must be less than num_layers={spec.num_layers}, got {layer}"
        )
    reverse = _checks.check_bool("reverse", reverse)
    if reverse and not spec.bidirectional:
        raise ValueError("`reverse` must be False for a spec with bidirectional=False")
    layers = pseudo_layers(spec, weights, traced)
    return layers[layer * spec.num_directions + reverse]


def join_biases(
    spec: RNNSpec, layer: LayerWeights, target: str, fold: bool
) -> tuple[Array | None, Array | None]:
    """Return one bias for the sums of products, and one inside a GRU's candidate.

    The equations add the input and the recurrent bias, except in the candidate of a
    GRU with `reset_after=True`, where `r` scales the recurrent one.

    Args:
        spec: the network.
        layer: weights of one of its pseudo-layers.
        target: what they are to become, for the message.
        fold: whether two vectors may become their sum.

    Returns:
        `(b [G*H], b_n [H])`; None where the spec has no such bias. The rows of `b` for
        the candidate hold only `b_ih` where there is a `b_n`.

    Raises:
        TypeError: `fold` is no bool.
        ValueError: both vectors have values other than 0, and `fold` is False.
    """
    fold = _checks.check_bool("fold", fold)
    b, b_hh, b_n = layer.b_ih, layer.b_hh, None
    if b_hh is not None and spec.mode == "gru" and spec.reset_after:
        hidden = spec.hidden_size
        b_hh, b_n = b_hh[: 2 * hidden], b_hh[2 * hidden :]
        b_hh = jnp.concatenate([b_hh, jnp.zeros_like(b_n)])
    if b is None or b_hh is None:
        return (b_hh if b is None else b), b_n
    if is_zero(b_hh):
        return b, b_n
    if is_zero(b):
        return b_hh, b_n
    if not fold:
        raise ValueError(
            f"`weights` must not have values in both b_ih and b_hh for {target}, which "
            "has one bias; fold=True exports their sum"
        )
    return b + b_hh, b_n


def refuse_candidate_bias(b_n: Array | None, target: str, elsewhere: str) -> None:
    """Raise ValueError where a GRU's recurrent candidate bias would be lost."""
    if b_n is not None and not is_zero(b_n):
        raise ValueError(
            f"`weights` must have 0 in the rows of gate n of b_hh for {target}, which "
            f"has no bias there, and fold=True cannot move it; {elsewhere}"
        )


def is_zero(a: Array) -> bool:
    """Return whether all values are known to be 0; traced ones are not."""
    return _checks.is_concrete(a) and not bool(jnp.any(a != 0))
