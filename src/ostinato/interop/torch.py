"""Weights of PyTorch's `LSTM`, `GRU`, `RNN` and their cells, in and out.

    from ostinato.interop import torch as from_torch

    spec, weights, notes = from_torch.from_module(module)
    y, state = ostinato.rnn(spec, weights, x)

PyTorch orders gates as this package does. A state dict may hold tensors, or arrays of
numpy as `safetensors.numpy.load_file` reads them: only `to_state_dict` needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .. import LayerWeights, RNNSpec, _checks, unpack_weights
from .._typing import Array, Float
from .imported import Imported, as_array, build

__all__ = ["find", "from_module", "from_state_dict", "to_state_dict"]

_FIELDS = {
    "weight_ih": "w_ih",
    "weight_hh": "w_hh",
    "bias_ih": "b_ih",
    "bias_hh": "b_hh",
    "weight_hr": "w_hr",
}
_NAME = re.compile(rf"({'|'.join(_FIELDS)})(?:_l(\d+)(_reverse)?)?")
_MODES = {4: "lstm", 3: "gru"}
_MAX_LAYERS = 10_000


def from_module(module: Any) -> Imported:
    """Convert a module of PyTorch.

    Args:
        module: a `torch.nn.LSTM`, `GRU`, `RNN`, `LSTMCell`, `GRUCell` or `RNNCell`.

    Returns:
        `Imported(spec, weights, notes)`. The notes say what the caller has to ask for:
        `batch_first=False`, and the dropout between layers, which needs a `key`.

    Raises:
        TypeError: `module` is none of these.
    """
    kind = getattr(module, "mode", type(module).__name__)
    modes = {
        "LSTM": "lstm",
        "GRU": "gru",
        "RNN_TANH": "rnn_tanh",
        "RNN_RELU": "rnn_relu",
        "LSTMCell": "lstm",
        "GRUCell": "gru",
        "RNNCell": f"rnn_{getattr(module, 'nonlinearity', 'tanh')}",
    }
    if kind not in modes or not hasattr(module, "state_dict"):
        raise TypeError(
            "`module` must be a torch.nn.LSTM, GRU, RNN, LSTMCell, GRUCell or RNNCell, "
            f"got {type(module).__name__}; `find` and `from_state_dict` convert parts "
            "of larger modules"
        )
    nonlinearity = "relu" if modes[kind] == "rnn_relu" else "tanh"
    notes, options = [], {}
    if getattr(module, "batch_first", True) is False:
        notes.append("batch_first=False: call with time_major=True")
    dropout = float(getattr(module, "dropout", 0.0))
    if dropout:
        options["dropout"] = dropout
        notes.append(f"dropout={dropout} between layers needs a `key` to take place")
    return _from_named(module.state_dict(), "", nonlinearity, notes, options)


def from_state_dict(
    sd: Mapping[str, Any],
    prefix: str = "",
    *,
    nonlinearity: Literal["tanh", "relu"] = "tanh",
) -> Imported:
    """Convert the recurrent layer whose tensors begin with `prefix`.

    Args:
        sd: a state dict; tensors of torch or arrays.
        prefix: what stands before `weight_ih_l0` in the names, such as `"encoder."`;
            `find` lists them.
        nonlinearity: of a plain RNN, which its weights do not tell.

    Returns:
        `Imported(spec, weights, notes)`, in the dtype of the tensors.

    Raises:
        TypeError: a tensor holds no floats, or dtypes differ.
        ValueError: there is no recurrent layer under `prefix`, a tensor is missing, or
            shapes do not fit each other; the message names the tensor.
    """
    _checks.check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    return _from_named(sd, prefix, nonlinearity, [], {})


def find(sd: Mapping[str, Any]) -> dict[str, RNNSpec]:
    """Find the recurrent layers of a state dict.

    Args:
        sd: a state dict; tensors of torch or arrays.

    Returns:
        For each layer its prefix, which `from_state_dict` takes, and its spec. Those of
        plain RNNs have mode `"rnn_tanh"`: weights do not tell it from `"rnn_relu"`.
    """
    names = (re.fullmatch(rf"(.*?){_NAME.pattern}", name) for name in sd)
    prefixes = dict.fromkeys(
        name[1] for name in names if name and name[2] == "weight_hh"
    )
    found = {}
    for prefix in prefixes:
        try:
            found[prefix] = from_state_dict(sd, prefix).spec
        except (TypeError, ValueError):
            continue  # a name of the same kind on something else
    return found


def to_state_dict(
    spec: RNNSpec, weights: Float[Array, " num_params"], prefix: str = ""
) -> dict[str, Any]:
    """Convert weights to a state dict that a `torch.nn` layer loads.

    Args:
        spec: the network; what torch cannot express raises ValueError.
        weights: its flat vector.
        prefix: put before every name.

    Returns:
        Tensors by name, copies. A spec with one bias has zeros for the other, and one
        without biases has none: `bias=False` in torch.

    Raises:
        ValueError: `reset_after=False`, `cell_clip` or `input_mode="skip"`.
        ImportError: torch is not installed.
    """
    import torch

    for name, plain in (
        ("reset_after", True),
        ("cell_clip", None),
        ("input_mode", "linear"),
    ):
        if getattr(spec, name) != plain:
            raise ValueError(
                f"`spec` must have {name}={plain!r} for a layer of torch, got "
                f"{getattr(spec, name)!r}"
            )
    sd = {}
    for p, layer in enumerate(unpack_weights(weights, spec)):
        number, reverse = divmod(p, spec.num_directions)
        for theirs, ours in _FIELDS.items():
            value = getattr(layer, ours)
            if value is None and ours in ("b_ih", "b_hh") and spec.bias != "none":
                value = jnp.zeros(layer.w_hh.shape[0], layer.w_hh.dtype)
            if value is not None:
                name = f"{prefix}{theirs}_l{number}{'_reverse' if reverse else ''}"
                sd[name] = _tensor(torch, value)
    return sd


def _tensor(torch: Any, a: Array) -> Any:
    if a.dtype == jnp.bfloat16:  # which numpy hands to torch as raw bytes
        return torch.tensor(np.asarray(a, np.float32)).to(torch.bfloat16)
    return torch.tensor(np.asarray(a))


def _from_named(
    sd: Mapping[str, Any], prefix: str, nonlinearity: str, notes: list, options: dict
) -> Imported:
    if not isinstance(sd, Mapping):
        raise TypeError(f"`sd` must be a mapping, got {_checks.describe(sd)}")
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    names: dict[tuple[int, bool, str], str] = {}
    for name in sd:
        match = isinstance(name, str) and name.startswith(prefix)
        match = match and _NAME.fullmatch(name[len(prefix) :])
        if match:
            field, place = _FIELDS[match[1]], (int(match[2] or 0), bool(match[3]))
            found.setdefault(place, {})[field] = as_array(name, sd[name])
            names[(*place, field)] = name
    if not found:
        raise ValueError(
            f"`sd` must hold a recurrent layer under the prefix {prefix!r}, with names "
            f"such as {prefix + 'weight_ih_l0'!r}; `find` lists those that there are"
        )
    bidirectional = any(reverse for _, reverse in found)
    directions = 2 if bidirectional else 1
    places = [
        (layer, bool(direction))
        for layer in range(min(max(found)[0] + 1, _MAX_LAYERS))
        for direction in range(directions)
    ]

    def label(p: int, field: str) -> str:
        layer, reverse = places[p]
        theirs = next(k for k, v in _FIELDS.items() if v == field)
        usual = f"{prefix}{theirs}_l{layer}{'_reverse' if reverse else ''}"
        return f"sd[{names.get((layer, reverse, field), usual)!r}]"

    layers = []
    for p, place in enumerate(places):
        fields = found.get(place, {})
        for field in ("w_ih", "w_hh"):
            if field not in fields:
                raise ValueError(f"`{label(p, field)}` must be given, and is missing")
        layers.append(LayerWeights(**{**dict.fromkeys(LayerWeights._fields), **fields}))
    return build(
        _mode(layers[0], label(0, "w_hh"), nonlinearity),
        layers,
        label,
        bidirectional=bidirectional,
        notes=notes,
        **options,
    )


def _mode(layer: LayerWeights, name: str, nonlinearity: str) -> str:
    """Tell the mode from the shapes of the recurrent weights."""
    shape = layer.w_hh.shape
    if layer.w_hr is not None:
        return "lstm"  # alone in having a projection
    gates = shape[0] // shape[1] if len(shape) == 2 and shape[1] else 0
    if gates not in (1, 3, 4) or shape[0] != gates * shape[1]:
        raise ValueError(
            f"`{name}` must have shape [G*H, H] with G = 1, 3 or 4 gates, got "
            f"{list(shape)}"
        )
    return _MODES.get(gates, f"rnn_{nonlinearity}")
