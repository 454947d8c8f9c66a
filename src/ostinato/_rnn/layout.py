"""Weight shapes and the flat vector of weights. Their gates are listed in modes.py.

The flat vector has cuDNN's order. For every pseudo-layer (fwd0, rev0, fwd1, ...) come
`w_ih, w_hh (, w_hr)`; then for every pseudo-layer the biases that the spec keeps. Each
matrix is stored row by row, its rows grouped by gate.
"""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax

from .. import _checks
from .._typing import Array, Float
from .cell import LayerWeights
from .joining import Rows, join
from .modes import MODES
from .spec import RNNSpec, check_spec

_MATRICES = ("w_ih", "w_hh", "w_hr")
_BIASES = ("b_ih", "b_hh")


def param_shapes(spec: RNNSpec) -> list[LayerWeights]:
    """Return the weights' shapes of every pseudo-layer: fwd0, rev0, fwd1, ..."""
    check_spec(spec)
    rows = spec.num_gates * spec.hidden_size
    out = spec.output_size
    bias = (rows,)
    shapes = []
    for layer in range(spec.num_layers):
        inputs = spec.input_size if layer == 0 else spec.num_directions * out
        skip = layer == 0 and spec.input_mode == "skip"
        weights = LayerWeights(
            w_ih=None if skip else (rows, inputs),
            w_hh=(rows, out // spec.num_heads),
            b_ih=bias if spec.bias in ("double", "input") else None,
            b_hh=bias if spec.bias in ("double", "recurrent") else None,
            w_hr=(spec.proj_size, spec.hidden_size // spec.num_heads)
            if spec.proj_size
            else None,
        )
        shapes += [weights] * spec.num_directions
    return shapes


def gate_rows(spec: RNNSpec, gate: str) -> slice:
    """Return the slice of rows of a gate in `w_ih`, `w_hh` and the biases."""
    start = MODES[spec.mode].gates.index(gate) * spec.hidden_size
    return slice(start, start + spec.hidden_size)


def num_params(spec: RNNSpec) -> int:
    """Return the length of the flat weight vector of `spec`."""
    return sum(math.prod(shape) for _, _, shape in _tensors(spec))


def _tensors(spec: RNNSpec) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return `(pseudo-layer, field, shape)` of every tensor, in flat order."""
    shapes = param_shapes(spec)
    return [
        (p, name, getattr(layer, name))
        for names in (_MATRICES, _BIASES)
        for p, layer in enumerate(shapes)
        for name in names
        if getattr(layer, name) is not None
    ]


def as_flat(weights: Any, name: str = "weights") -> Array:
    """Return weights as an array; raise TypeError if they are those of layers."""
    if isinstance(weights, RNNSpec):
        raise TypeError(
            f"`{name}` must be the flat vector [num_params], got a spec; the spec is "
            "the first argument of what runs, and the last of what packs and unpacks"
        )
    layers = weights if isinstance(weights, (list, tuple)) else ()
    if any(isinstance(layer, LayerWeights) for layer in layers):
        raise TypeError(
            f"`{name}` must be the flat vector [num_params], got those of "
            f"{len(weights)} layers; ost.pack_weights(weights, spec) joins them"
        )
    return _checks.check_array(name, weights)


def check_weights(weights: Any, spec: RNNSpec, name: str = "weights") -> None:
    """Raise ValueError unless `weights` is the flat vector of `spec`."""
    want = num_params(spec)
    if tuple(weights.shape) != (want,):
        fields = ", ".join(
            f"{f}={getattr(spec, f)!r}"
            for f in (
                "mode",
                "input_size",
                "hidden_size",
                "num_layers",
                "bidirectional",
                "proj_size",
                "bias",
                "input_mode",
                "num_heads",
            )
        )
        raise ValueError(
            f"`{name}` must have shape [{want}], which follows from {fields}; "
            f"got {list(weights.shape)}"
        )


def unpack_weights(
    weights: Float[Array, " num_params"], spec: RNNSpec
) -> list[LayerWeights]:
    """Split the flat vector into one `LayerWeights` per pseudo-layer.

    Args:
        weights: `[num_params]`, any dtype.
        spec: the network.

    Returns:
        `num_layers * num_directions` items in the order fwd0, rev0, fwd1, ...; each
        field an array shaped as `param_shapes` says, or None.

    Raises:
        ValueError: the vector has a wrong length; the message says which is wanted.

    Holds under every JAX transformation.
    """
    weights = as_flat(weights)
    check_weights(weights, spec)
    return _unpack(weights, spec)


@ft.partial(jax.jit, static_argnums=1, inline=True)
def _unpack(weights: Array, spec: RNNSpec) -> list[LayerWeights]:
    fields: list[dict[str, Array]] = [{} for _ in param_shapes(spec)]
    offset = 0
    for p, name, shape in _tensors(spec):
        size = math.prod(shape)
        fields[p][name] = weights[offset : offset + size].reshape(shape)
        offset += size
    return [LayerWeights(**{**_ABSENT, **f}) for f in fields]


_ABSENT = dict.fromkeys(LayerWeights._fields)


def pack_weights(
    layers: Sequence[LayerWeights], spec: RNNSpec
) -> Float[Array, " num_params"]:
    """Join per-layer weights into the flat vector; the inverse of `unpack_weights`.

    Args:
        layers: one `LayerWeights` per pseudo-layer, shaped as `param_shapes` says.
        spec: the network.

    Returns:
        `[num_params]` in the dtype of the tensors.

    Raises:
        TypeError: `layers` is no list of `LayerWeights`, or the tensors' dtypes differ.
        ValueError: a tensor is missing, is not part of the spec, or has a wrong shape.

    Holds under every JAX transformation.
    """
    shapes = param_shapes(spec)
    if not isinstance(layers, Sequence) or not all(
        isinstance(layer, LayerWeights) for layer in layers
    ):
        raise TypeError(
            "`layers` must be a list of LayerWeights, one for each pseudo-layer, got "
            f"{_checks.describe(layers)}"
        )
    if len(layers) != len(shapes):
        raise ValueError(
            f"`layers` must have num_layers * num_directions = {len(shapes)} items, "
            f"got {len(layers)}"
        )
    named = {}
    for p, (layer, want) in enumerate(zip(layers, shapes, strict=True)):
        for name in LayerWeights._fields:
            value, shape = getattr(layer, name), getattr(want, name)
            label = f"layers[{p}].{name}"
            if (value is None) != (shape is None):
                wanted = "None" if shape is None else f"an array of shape {shape}"
                got = "None" if value is None else _checks.describe(value)
                raise ValueError(f"`{label}` must be {wanted} for {spec}, got {got}")
            if value is None:
                continue
            if not isinstance(value, Rows):
                value = _checks.check_array(label, value)
            if value.shape != shape:
                raise ValueError(
                    f"`{label}` must have shape {shape}, got {value.shape}"
                )
            named[p, name] = value
    _checks.check_same_dtype(**{f"layers[{p}].{n}": v for (p, n), v in named.items()})
    return join([named[p, n] for p, n, _ in _tensors(spec)])
