"""Conversion of LSTM weights from and to Caffe2: by gate, by blob, as a flat vector.

Caffe2 orders the gates `i f o g`, ostinato `i f g o`. The names by gate are those of
`InitFromLSTMParams`: `{"input": {...}, "recurrent": {...}}` with `input_gate`,
`forget_gate`, `output_gate` and `cell`, each with `_w` and `_b`. In both libraries
`forget_bias` is not a parameter: here it is a field of `ostinato.cells.LSTM`.

    from ostinato import cells
    from ostinato.interop import caffe2

    params = caffe2.params_from_gates(gates)
    cell = cells.LSTM(input_size, hidden_size, forget_bias=1.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .. import LayerWeights, RNNSpec, _checks, pack_weights
from .._typing import Array
from .exported import pseudo_layers
from .imported import as_array, reorder_gates

__all__ = [
    "blobs_from_params",
    "gates_from_params",
    "gates_from_weights",
    "params_from_blobs",
    "params_from_gates",
    "weights_from_gates",
]

_GATES = ("input_gate", "forget_gate", "cell", "output_gate")  # i f g o
_GATES_BY_BLOB = ("input_gate", "forget_gate", "output_gate", "cell")  # i f o g
_FIELDS = {"input": ("w_ih", "b_ih"), "recurrent": ("w_hh", "b_hh")}
_BLOBS = {"input": "i2h", "recurrent": "gates_t"}

Gates = Mapping[str, Mapping[str, Any]]
"""`{"input": {"input_gate_w": ..., ...}, "recurrent": {...}}`."""


def params_from_gates(gates: Gates) -> LayerWeights:
    """Return the parameters of `ostinato.cells.LSTM` for arrays by gate.

    Args:
        gates: `{"input": ..., "recurrent": ...}`, each with `input_gate_w`,
            `forget_gate_w`, `output_gate_w` and `cell_w`, `[H, I]` or `[H, H]`, and
            the biases `[H]` with `_b` in place of `_w`. All have the same dtype.

    Returns:
        `LayerWeights(w_ih [4H, I], w_hh [4H, H], b_ih [4H], b_hh [4H], None)`.

    Raises:
        TypeError: dtypes differ, or a value is not an array of floats.
        ValueError: a name is missing or unknown, or a shape does not fit.

    Holds under every JAX transformation.
    """
    return _params_from_gates("gates", gates)


def _params_from_gates(argument: str, gates: Gates) -> LayerWeights:
    _check_names(argument, gates, _FIELDS)
    fields, found = {}, {}
    for part, (w, b) in _FIELDS.items():
        arrays = gates[part]
        names = [f"{gate}_{kind}" for kind in "wb" for gate in _GATES]
        _check_names(f"{argument}[{part!r}]", arrays, names)
        for name in names:
            label = f"{argument}[{part!r}][{name!r}]"
            found[label] = as_array(label, arrays[name])
            _checks.check_rank(label, found[label], *("H" if name[-1] == "b" else "HI"))
        for field, kind in ((w, "w"), (b, "b")):
            fields[field] = [
                found[f"{argument}[{part!r}]['{gate}_{kind}']"] for gate in _GATES
            ]
    _checks.check_same_dtype(**found)
    _check_gate_shapes(argument, found)
    return LayerWeights(**{f: jnp.concatenate(a) for f, a in fields.items()}, w_hr=None)


def gates_from_params(params: LayerWeights) -> dict[str, dict[str, Array]]:
    """Return the arrays by gate of parameters; the inverse of `params_from_gates`.

    Raises:
        TypeError: `params` is not a `LayerWeights` of arrays of floats.
        ValueError: `params` are not those of an LSTM with both biases and without a
            projection, or a shape does not fit.

    Holds under every JAX transformation.
    """
    params = _check_params("params", params)
    return {
        part: {
            f"{gate}_{kind}": block
            for field, kind in ((w, "w"), (b, "b"))
            for gate, block in zip(
                _GATES, jnp.split(getattr(params, field), 4), strict=True
            )
        }
        for part, (w, b) in _FIELDS.items()
    }


def params_from_blobs(blobs: Mapping[str, Any], scope: str = "") -> LayerWeights:
    """Return the parameters of `ostinato.cells.LSTM` for the blobs of Caffe2's LSTM.

    Args:
        blobs: arrays by blob name: `i2h_w [4H, I]`, `i2h_b [4H]`, `gates_t_w [4H, H]`
            and `gates_t_b [4H]`, with the rows in Caffe2's gate order `i f o g`; other
            names are ignored.
        scope: the prefix of the names, as in `scope + "/i2h_w"`.

    Raises:
        TypeError: `blobs` is no mapping, `scope` no string, dtypes differ, or a value
            is not an array of floats.
        ValueError: a blob is missing, or a shape does not fit.

    Holds under every JAX transformation.
    """
    if not isinstance(blobs, Mapping):
        raise TypeError(f"`blobs` must be a mapping, got {_checks.describe(blobs)}")
    found, labels = {}, {}
    for part, fields in _FIELDS.items():
        for field, kind in zip(fields, "wb", strict=True):
            name = _scoped(scope, f"{_BLOBS[part]}_{kind}")
            if name not in blobs:
                there = ", ".join(map(repr, blobs)) or "none"
                raise ValueError(f"`blobs` must hold {name!r}, got {there}")
            labels[field] = f"blobs[{name!r}]"
            array = as_array(labels[field], blobs[name])
            if array.ndim != (2 if kind == "w" else 1) or array.shape[0] % 4:
                rows = "[4H, ...]" if kind == "w" else "[4H]"
                raise ValueError(
                    f"`{labels[field]}` must have shape {rows}, got {list(array.shape)}"
                )
            found[field] = array
    _check_fields(labels, found)
    order = " ".join(_GATES_BY_BLOB), " ".join(_GATES)
    fields = {field: reorder_gates(a, *order) for field, a in found.items()}
    return LayerWeights(**fields, w_hr=None)


def blobs_from_params(params: LayerWeights, scope: str = "") -> dict[str, Array]:
    """Return the blobs of Caffe2's LSTM; the inverse of `params_from_blobs`.

    Raises:
        TypeError: `params` is not a `LayerWeights` of arrays of floats.
        ValueError: `params` are not those of an LSTM with both biases and without a
            projection, or a shape does not fit.

    Holds under every JAX transformation.
    """
    gates = gates_from_params(params)
    return {
        _scoped(scope, f"{blob}_{kind}"): jnp.concatenate(
            [gates[part][f"{gate}_{kind}"] for gate in _GATES_BY_BLOB]
        )
        for part, blob in _BLOBS.items()
        for kind in "wb"
    }


def weights_from_gates(layers: Sequence[Gates], spec: RNNSpec) -> Array:
    """Return the flat vector that Caffe2's `cuDNN_LSTM` and `ostinato.rnn` share.

    Args:
        layers: one mapping, as `params_from_gates` takes it, for every pseudo-layer:
            fwd0, rev0, fwd1, ...
        spec: an LSTM with both biases and without a projection.

    Returns:
        `[num_params]`: all matrices, then all biases.

    Raises:
        TypeError, ValueError: as `params_from_gates` and `ostinato.pack_weights`.

    Holds under every JAX transformation.
    """
    _check_spec(spec)
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(
            "`layers` must be a list of mappings, one for each pseudo-layer, got "
            f"{_checks.describe(layers)}"
        )
    params = [
        _params_from_gates(f"layers[{p}]", gates) for p, gates in enumerate(layers)
    ]
    return pack_weights(params, spec)


def gates_from_weights(
    weights: Array, spec: RNNSpec
) -> list[dict[str, dict[str, Array]]]:
    """Return the arrays by gate of a flat vector; the inverse of `weights_from_gates`.

    Raises:
        TypeError: `weights` is no array of floats.
        ValueError: the vector does not fit `spec`, or `spec` is not an LSTM with both
            biases and without a projection.

    Holds under every JAX transformation.
    """
    _check_spec(spec)
    layers = pseudo_layers(spec, weights, traced=True)
    return [gates_from_params(layer) for layer in layers]


def _scoped(scope: str, name: str) -> str:
    _checks.check_text("`scope`", scope)
    return f"{scope}/{name}" if scope else name


def _check_names(name: str, value: Any, wanted: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a mapping, got {_checks.describe(value)}")
    for missing in [key for key in wanted if key not in value]:
        there = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"`{name}` must hold {missing!r}, got {there}")
    for unknown in [key for key in value if key not in wanted]:
        names = ", ".join(map(repr, wanted))
        raise ValueError(f"`{name}` must hold {names} alone, got {unknown!r} too")


def _check_gate_shapes(argument: str, arrays: dict[str, Array]) -> None:
    hidden = arrays[f"{argument}['recurrent']['input_gate_b']"].shape
    inputs = arrays[f"{argument}['input']['input_gate_w']"].shape[1:]
    for label, a in arrays.items():
        want = hidden
        if label.endswith("_w']"):
            want = (
                *hidden,
                *(inputs if label.startswith(f"{argument}['input']") else hidden),
            )
        if a.shape != want:
            raise ValueError(f"`{label}` must have shape {want}, got {a.shape}")


def _check_params(name: str, params: Any) -> LayerWeights:
    if not isinstance(params, LayerWeights):
        raise TypeError(
            f"`{name}` must be LayerWeights, got {_checks.describe(params)}"
        )
    labels = {
        field: f"{name}.{field}"
        for field, value in params._asdict().items()
        if value is not None
    }
    found = {f: as_array(label, getattr(params, f)) for f, label in labels.items()}
    rows = found["w_hh"].shape if "w_hh" in found else ()
    square = len(rows) == 2 and rows[0] == 4 * rows[1]
    if [*found] != ["w_ih", "w_hh", "b_ih", "b_hh"] or not square:
        raise ValueError(
            f"`{name}` must be those of an LSTM with both biases and no projection, "
            f"got {', '.join(found)} with w_hh of shape {rows}"
        )
    _check_fields(labels, found)
    return LayerWeights(**found, w_hr=None)


def _check_fields(labels: Mapping[str, str], found: Mapping[str, Array]) -> None:
    """Check that the arrays of an LSTM fit each other; `labels` are for messages."""
    rows, hidden = found["w_hh"].shape
    wanted = {"w_ih": (2, f"{rows}, I"), "b_ih": (1, rows), "b_hh": (1, rows)}
    if rows != 4 * hidden:
        wanted = {"w_hh": (None, "4H, H")}
    for field, (rank, want) in wanted.items():
        shape = found[field].shape
        if len(shape) != rank or shape[0] != rows:
            raise ValueError(
                f"`{labels[field]}` must have shape [{want}], got {list(shape)}"
            )
    _checks.check_same_dtype(**{labels[field]: a for field, a in found.items()})


def _check_spec(spec: Any) -> None:
    plain = isinstance(spec, RNNSpec) and (
        spec.mode == "lstm"
        and spec.bias == "double"
        and not spec.proj_size
        and spec.num_heads == 1
        and spec.input_mode == "linear"
    )
    if not plain:
        raise ValueError(
            "`spec` must be an RNNSpec of mode 'lstm' with bias='double' and one head, "
            f"without proj_size and input_mode='skip', got {spec}"
        )
