"""Weight initialisers."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from .. import _checks
from .._typing import Array, Float
from .accumulation import accumulation_dtype
from .cell import LayerWeights
from .layout import gate_rows, pack_weights, param_shapes
from .modes import MODES
from .spec import RNNSpec, check_spec

Scheme = Literal["uniform", "glorot_orthogonal", "xlstm"]


def init_weights(
    key: Array,
    spec: RNNSpec,
    dtype: Any = jnp.float32,
    scheme: Scheme = "uniform",
    forget_bias: float | None = None,
) -> Float[Array, " num_params"]:
    """Draw a flat weight vector for `spec`.

    Args:
        key: a PRNG key.
        spec: the network.
        dtype: a floating dtype.
        scheme: `"uniform"` draws everything from U(-k, k), k = hidden_size ** -0.5
            (PyTorch, `jax.experimental.rnn`); with several heads k = (units of a head)
            ** -0.5 for `w_hh` and `w_hr`. `"glorot_orthogonal"` draws each gate's
            block of `w_ih` from Glorot's uniform law, makes each gate's block of
            `w_hh`, and `w_hr`, orthogonal, those of every head for themselves, and sets
            biases to 0. `"xlstm"`, for an sLSTM only, is that of its authors: `w_ih`
            and `w_hr` from a normal law of variance 2 / 5 / columns, `w_hh` and biases
            0, except those of the forget gate: 5 - 12 (j / (d - 1)) ** (0.3 + 1.3
            depth) for unit j of the d units of a head, where depth goes from 0 in the
            first layer to 1 in the last.
        forget_bias: LSTM and sLSTM only; the value of the forget gates' bias, `b_ih +
            b_hh`; None leaves it as the scheme draws it.

    Returns:
        `[num_params]`, in the order that `unpack_weights` reads.

    Raises:
        TypeError: `key` is not a PRNG key, `dtype` is not floating, or `forget_bias` is
            no number.
        ValueError: an unknown scheme, one for another mode, or `forget_bias` that is
            not finite, or for a spec without one.

    References:
        Glorot and Bengio (2010); Saxe et al. (2014), arXiv:1312.6120; for the forget
        bias Jozefowicz et al. (2015). `"xlstm"`: Beck et al. (2024), arXiv:2405.04517,
        and the package `xlstm` 2.0.6 (`powerlaw_blockdependent`).
    """
    key = _checks.check_key(key)
    check_spec(spec)
    _checks.check_choice("scheme", scheme, get_args(Scheme))
    dtype = _checks.check_float_dtype(dtype)
    if scheme == "xlstm" and spec.mode != "slstm":
        raise ValueError(f"`scheme='xlstm'` needs mode 'slstm', got {spec.mode!r}")
    has_bias = "f" in MODES[spec.mode].gates and spec.bias != "none"
    if forget_bias is not None and not has_bias:
        raise ValueError(
            "`forget_bias` needs mode 'lstm' or 'slstm' with a bias, got "
            f"mode={spec.mode!r}, bias={spec.bias!r}"
        )
    if forget_bias is not None and _checks.is_concrete(forget_bias):
        forget_bias = _checks.check_finite("forget_bias", forget_bias)
    shapes = param_shapes(spec)
    keys = jax.random.split(key, (len(shapes), len(LayerWeights._fields)))
    layers = []
    for layer_keys, layer_shapes in zip(keys, shapes, strict=True):
        drawn = {
            name: None if shape is None else _draw(scheme, name, k, shape, spec, dtype)
            for k, name, shape in zip(
                layer_keys, LayerWeights._fields, layer_shapes, strict=True
            )
        }
        layers.append(LayerWeights(**drawn))
    if scheme == "xlstm" and spec.bias != "none":
        layers = [
            _set_forget_bias(layer, spec, _spread_forget_bias(spec, p, dtype))
            for p, layer in enumerate(layers)
        ]
    if forget_bias is not None:
        layers = [_set_forget_bias(layer, spec, forget_bias) for layer in layers]
    return pack_weights(layers, spec)


def _draw(
    scheme: Scheme, name: str, key: Array, shape: tuple, spec: RNNSpec, dtype: Any
) -> Array:
    if scheme == "uniform":
        heads = spec.num_heads if name in ("w_hh", "w_hr") else 1
        bound = (spec.hidden_size // heads) ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)
    if name in ("b_ih", "b_hh") or (scheme == "xlstm" and name == "w_hh"):
        return jnp.zeros(shape, dtype)
    if scheme == "xlstm":
        return jax.random.normal(key, shape, dtype) * (2 / 5 / shape[1]) ** 0.5
    blocks = 1 if name == "w_hr" else spec.num_gates
    if name == "w_ih":
        draw = jax.nn.initializers.glorot_uniform(in_axis=-1, out_axis=-2)
    else:
        draw, blocks = _orthogonal, blocks * spec.num_heads
    rows = shape[0] // blocks
    # The QR factorisation behind `orthogonal` does not take 16-bit floats.
    wide = accumulation_dtype(dtype)
    block_keys = jax.random.split(key, blocks)
    parts = [draw(k, (rows, shape[1]), wide) for k in block_keys]
    return jnp.concatenate(parts).astype(dtype)


def _orthogonal(key: Array, shape: tuple, dtype: Any) -> Array:
    """Draw an orthogonal matrix; under `vmap`, one after another.

    LAPACK's factorisations of a batch wait in JAX's CPU threads for work of the same
    threads, so that several at once never end where threads are few (JAX 0.10.2).
    """
    draw = jax.nn.initializers.orthogonal()
    one = jax.custom_batching.sequential_vmap(lambda key: draw(key, shape, dtype))
    return one(key)


def _spread_forget_bias(spec: RNNSpec, pseudo_layer: int, dtype: Any) -> Array:
    """Return the biases of the scheme `"xlstm"`, the same ones for every head."""
    depth = pseudo_layer // spec.num_directions / max(spec.num_layers - 1, 1)
    units = spec.hidden_size // spec.num_heads
    place = jnp.arange(units) / max(units - 1, 1)
    bias = 5 - 12 * place ** (0.3 + 1.3 * depth)
    return jnp.tile(bias, spec.num_heads).astype(dtype)


def _set_forget_bias(layer: LayerWeights, spec: RNNSpec, value: Any) -> LayerWeights:
    rows = gate_rows(spec, "f")
    if layer.b_ih is None:
        return layer._replace(b_hh=layer.b_hh.at[rows].set(value))
    layer = layer._replace(b_ih=layer.b_ih.at[rows].set(value))
    if layer.b_hh is not None:
        layer = layer._replace(b_hh=layer.b_hh.at[rows].set(0.0))
    return layer
