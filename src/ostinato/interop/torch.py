"""Weights of PyTorch's `LSTM`, `GRU`, `RNN` and their cells, in and out.

    from ostinato.interop import torch as from_torch

    spec, weights, notes = from_torch.from_module(module)
    y, state = ostinato.rnn(spec, weights, x)

PyTorch orders gates as this package does. A state dict may hold tensors, or arrays of
numpy: only `from_file` and `to_state_dict` need torch.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Generator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .. import LayerWeights, RNNSpec, _checks
from .._files import MAX_RATIO, BadFileError, check_zip, reading
from .._modules import needs
from .._typing import Array, Float
from .exported import pseudo_layers, require
from .imported import (
    Contents,
    Imported,
    as_array,
    build,
    check_state_dict,
    gate_order,
    reorder_gates,
)

__all__ = ["find", "from_file", "from_module", "from_state_dict", "to_state_dict"]

_FIELDS = {
    "weight_ih": "w_ih",
    "weight_hh": "w_hh",
    "bias_ih": "b_ih",
    "bias_hh": "b_hh",
    "weight_hr": "w_hr",
}
_BIASES = ("b_ih", "b_hh")
GATES = {"lstm": "i f g o", "gru": "r z n", "rnn_tanh": "h", "rnn_relu": "h"}
"""How PyTorch orders the gates, under this package's names."""

_NAME = re.compile(rf"({'|'.join(_FIELDS)})(?:_l(\d+)(_reverse)?)?")
_RAW = "_raw"  # of what weight drop, as in AWD-LSTM, makes the weight of a layer inside
_INSIDE = "module."
# Of what torch makes a tensor at each call, by pruning or a parametrization.
_SOURCE = re.compile(
    rf"(?:parametrizations\.)?{_NAME.pattern}(?:_orig|_mask|_[gv]|\.original\d*|{_RAW})"
)
_LAYERS = "torch.nn."  # where torch defines its layers; those of torch.ao round weights
_MODES = {4: "lstm", 3: "gru"}
_MAX_LAYERS = 10_000
_MAX_DEPTH = 100  # of mappings and lists in a checkpoint
_NOT_OURS = "not of a recurrent layer"
_OF_MODULE = "; `from_module` converts a layer"


def from_module(module: Any) -> Imported:
    """Convert a module of PyTorch.

    Args:
        module: a `torch.nn.LSTM`, `GRU`, `RNN`, `LSTMCell`, `GRUCell` or `RNNCell`, or
            of a class that is derived from one of these and computes the same.

    Returns:
        `Imported(spec, weights, notes)`. The notes say what the caller has to ask for:
        `batch_first=False`, and the dropout between layers, which needs a `key`.

    Raises:
        TypeError: `module` is none of these, or has a `forward` of its own or hooks.
    """
    kind = _class_of_torch(module)
    is_cell = kind.endswith("Cell")
    if not is_cell:
        kind = getattr(module, "mode", kind)
    modes = {
        "LSTM": "lstm",
        "GRU": "gru",
        "RNN_TANH": "rnn_tanh",
        "RNN_RELU": "rnn_relu",
        "LSTMCell": "lstm",
        "GRUCell": "gru",
        "RNNCell": f"rnn_{getattr(module, 'nonlinearity', 'tanh')}",
    }
    known = kind in modes and hasattr(module, "state_dict") and not _overrides(module)
    sd = module.state_dict() if known else {}
    for name in sd:
        _refuse_source(name, name)
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    if known and ("forward" in vars(module) or any(getattr(module, h) for h in hooks)):
        raise TypeError(
            "`module` must have no hooks and no `forward` of its own, which change "
            "what it computes; `from_state_dict` converts its weights"
        )
    if not any(name.startswith("weight_hh") for name in sd):  # quantised ones have none
        raise TypeError(
            "`module` must be a torch.nn.LSTM, GRU, RNN, LSTMCell, GRUCell or RNNCell, "
            f"got {type(module).__module__}.{type(module).__qualname__}; `find` and "
            "`from_state_dict` convert parts of larger modules"
        )
    nonlinearity = "relu" if modes[kind] == "rnn_relu" else "tanh"
    notes, options = [], {}
    if not is_cell and module.batch_first is False:
        notes.append("batch_first=False: call with time_major=True")
    dropout = 0.0 if is_cell else float(module.dropout)
    if dropout:
        options["dropout"] = dropout
        notes.append(f"dropout={dropout} between layers needs a `key` to take place")
    return _from_named(sd, "", nonlinearity, notes, options)


def _class_of_torch(module: Any) -> str:
    """Return the name of the class of torch that a module is or is derived from."""
    bases = type(module).__mro__
    return next((c.__name__ for c in bases if c.__module__.startswith(_LAYERS)), "")


def _overrides(module: Any) -> bool:
    """Return whether a subclass computes something else than a module of torch."""
    forward = getattr(type(module), "forward", None)
    return not getattr(forward, "__module__", "").startswith(_LAYERS)


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
        TypeError: a tensor holds no floats, dtypes differ, or `prefix` is no string.
        ValueError: there is no recurrent layer under `prefix`, a tensor is missing, or
            shapes do not fit each other; the message names the tensor.
    """
    _checks.check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    return _from_named(sd, prefix, nonlinearity, [], {})


def from_file(
    path: str | os.PathLike[str], *, nonlinearity: Literal["tanh", "relu"] = "tanh"
) -> dict[str, Imported]:
    """Convert the recurrent layers of a file that `torch.save` wrote.

    The file is read with `weights_only=True`, so no code in it runs.

    Args:
        path: a state dict, or mappings and lists that hold some, as checkpoints do.
        nonlinearity: of plain RNNs, which their weights do not tell.

    Returns:
        The networks by prefix; names of nested mappings, and places in lists, are
        joined by dots, as in `"models.0."`. What is there several times has its first
        name.

    Raises:
        TypeError: `path` is no path.
        ValueError: the file is damaged, holds no tensors by name, or holds objects
            that are not data, such as modules.
        ImportError: torch is not installed.
    """
    _checks.check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    return contents(_tensors_of(path)[0], nonlinearity).found


def read_file(path: str | os.PathLike[str]) -> Contents:
    """Return the networks in a file of torch, and the names of other tensors."""
    tensors, passed_over = _tensors_of(path)
    found, others = contents(tensors)
    return Contents(found, others | passed_over)


def contents(sd: Mapping[str, Any], nonlinearity: str = "tanh") -> Contents:
    """Return the networks in a state dict, and the names of other tensors."""
    found, others = {}, dict.fromkeys(sd, _NOT_OURS)
    for prefix, part in _by_prefix(sd).items():
        try:
            network = _from_named(part, prefix, nonlinearity, [], {})
        except (TypeError, ValueError) as error:
            others |= dict.fromkeys(part, str(error))
            continue
        if network.spec.mode == "rnn_tanh" and nonlinearity == "tanh":
            note = "weights do not tell tanh from relu: taken as tanh"
            network = network._replace(notes=(note,))
        found[prefix] = network
        for name in part:
            del others[name]
    return Contents(found, others)


def _tensors_of(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors in a file by name, and why parts of it were passed over.

    Raises:
        ValueError: the file is damaged, or holds no tensors by name.
    """
    with needs("torch"):
        import torch

    kind = "a file of tensors that torch.save wrote, such as a state_dict"
    with reading(path, kind) as size:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_zip(archive, size)
                names = archive.namelist()
            if any(name.endswith("/constants.pkl") for name in names):
                raise BadFileError(
                    f"`path` must be {kind}; {os.fspath(path)!r} is a module of "
                    "TorchScript: save torch.jit.load(path).state_dict() instead"
                )
        try:
            with warnings.catch_warnings():  # of what is refused then
                warnings.simplefilter("ignore")
                tree = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise BadFileError(
                f"`path` must be {kind}; {os.fspath(path)!r} holds other objects, such "
                "as a whole module, which only its own code can read, or is damaged; "
                "save module.state_dict() instead"
            ) from error
    tensors, passed_over, left = {}, {}, MAX_RATIO * size
    for name, tensor in _flat(tree, (), {}, passed_over):
        more = _bytes_beyond_storage(tensor)
        if more > left:
            passed_over[name] = f"too large for its file of {size} bytes"
            continue
        left -= more
        if name in tensors:
            raise ValueError(
                f"`path` must hold one tensor called {name!r}, got several"
            )
        tensors[name] = tensor
    if not tensors and not isinstance(tree, Mapping):
        raise BadFileError(
            f"`path` must be {kind}; {os.fspath(path)!r} holds "
            f"{' '.join(_checks.describe(tree).split())}"
        )
    return tensors, passed_over


def _bytes_beyond_storage(tensor: Any) -> int:
    """Return the bytes of a tensor that its file repeats by strides, or leaves out."""
    try:
        stored = tensor.untyped_storage().nbytes()
    except (AttributeError, NotImplementedError, RuntimeError):  # a sparse one has none
        stored = 0
    return max(tensor.numel() * tensor.element_size() - stored, 0)


def _flat(
    tree: Any, place: tuple[str, ...], seen: dict[int, str], passed_over: dict[str, str]
) -> Generator[tuple[str, Any], None, bool]:
    """Yield the tensors in nested mappings and lists, each of which is visited once.

    Args:
        tree: a mapping, a list or a tuple; anything else holds no tensors by name.
        place: the names that lead to it.
        seen: for each that was visited, by `id`, its name; `""` if it holds no tensors,
            as far as is known.
        passed_over: where to note what is not visited, by name with the reason.

    Returns:
        Whether there were any.
    """
    holds, seen[id(tree)], items = False, "", ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    for key, value in items:
        is_tensor = hasattr(value, "detach")
        if not is_tensor and not isinstance(value, (Mapping, list, tuple)):
            continue
        inner = (*place, str(key))
        name = ".".join(inner)
        if is_tensor:
            holds = True
            yield name, value
        elif id(value) in seen:
            if first := seen[id(value)]:
                passed_over[name] = f"the same object as {first!r}"
        elif len(inner) > _MAX_DEPTH:
            passed_over[name] = f"nested more than {_MAX_DEPTH} deep"
        elif (yield from _flat(value, inner, seen, passed_over)):
            holds, seen[id(value)] = True, name
    return holds


def find(sd: Mapping[str, Any]) -> dict[str, RNNSpec]:
    """Find the recurrent layers of a state dict.

    Args:
        sd: a state dict; tensors of torch or arrays.

    Returns:
        For each layer its prefix, which `from_state_dict` takes, and its spec. Those of
        plain RNNs have mode `"rnn_tanh"`: weights do not tell it from `"rnn_relu"`.

    Raises:
        TypeError: `sd` is no mapping.
    """
    check_state_dict(sd, hint=_OF_MODULE)
    return {name: network.spec for name, network in contents(sd).found.items()}


def _by_prefix(sd: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tensors with names of recurrent layers, by what stands before."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in sd.items():
        for pattern in (_NAME, _SOURCE) if isinstance(name, str) else ():
            if match := re.fullmatch(rf"(.*?){pattern.pattern}", name, re.DOTALL):
                prefix = match[1]
                if name.endswith(_RAW):
                    inside = prefix + _INSIDE
                    made = inside + name[len(prefix) :].removesuffix(_RAW)
                    prefix = inside if made in sd else prefix
                parts.setdefault(prefix, {})[name] = value
    # `weight_ih` alone is a name that other layers may have as well.
    return {
        prefix: part
        for prefix, part in parts.items()
        if any("weight_hh" in name[len(prefix) :] for name in part)
    }


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
        TypeError: `weights` is no array of floats, or traced; `prefix` is no string.
        ValueError: `reset_after=False`, `cell_clip`, `input_mode="skip"` or several
            heads; `weights` is not the vector of `spec`.
        ImportError: torch is not installed.
    """
    _checks.check_text("`prefix`", prefix)
    require(
        spec, "a layer of torch", reset_after=True, cell_clip=None, input_mode="linear"
    )
    sd = {}
    order = gate_order(spec.mode), GATES[spec.mode]
    for p, layer in enumerate(pseudo_layers(spec, weights)):
        number, reverse = divmod(p, spec.num_directions)
        for theirs, ours in _FIELDS.items():
            value = getattr(layer, ours)
            if value is None and ours in _BIASES and spec.bias != "none":
                value = jnp.zeros(layer.w_hh.shape[0], layer.w_hh.dtype)
            if value is None:
                continue
            if ours != "w_hr":
                value = reorder_gates(value, *order)
            name = f"{prefix}{theirs}_l{number}{'_reverse' if reverse else ''}"
            sd[name] = as_tensor(value)
    return sd


def as_bytes(sd: Mapping[str, Any]) -> bytes:
    """Return what `torch.save` writes of a state dict."""
    with needs("torch"):
        import torch

    buffer = io.BytesIO()
    torch.save(dict(sd), buffer)
    return buffer.getvalue()


def as_tensor(a: Array) -> Any:
    """Return a copy of an array as a tensor of torch."""
    with needs("torch"):
        import torch

    if a.dtype == jnp.bfloat16:  # which numpy hands to torch as raw bytes
        return torch.tensor(np.asarray(a, np.float32)).to(torch.bfloat16)
    return torch.tensor(np.asarray(a))


def _from_named(
    sd: Mapping[str, Any], prefix: str, nonlinearity: str, notes: list, options: dict
) -> Imported:
    check_state_dict(sd, prefix, _OF_MODULE)
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    names: dict[tuple[int, bool, str], str] = {}
    for name in sd:
        if not isinstance(name, str) or not name.startswith(prefix):
            continue
        rest = name[len(prefix) :]
        _refuse_source(name, rest)
        if match := _NAME.fullmatch(rest):
            if (raw := prefix.removesuffix(_INSIDE) + rest + _RAW) in sd:
                _refuse_source(raw, rest + _RAW)
            field, place = _FIELDS[match[1]], (int(match[2] or 0), bool(match[3]))
            if other := names.get((*place, field)):
                raise ValueError(
                    f"`sd` must hold each weight once, got {other!r} and {name!r}"
                )
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

    wanted = ["w_ih", "w_hh"]
    if any(field in fields for fields in found.values() for field in _BIASES):
        wanted += _BIASES  # torch has all or none
    layers = []
    for p, place in enumerate(places):
        fields = found.get(place, {})
        for field in wanted:
            if field not in fields:
                raise ValueError(f"`{label(p, field)}` must be given, and is missing")
        layers.append(LayerWeights(**{**dict.fromkeys(LayerWeights._fields), **fields}))
    mode = _mode(layers[0], label(0, "w_hh"), nonlinearity)
    return build(
        mode,
        layers,
        label,
        order=GATES[mode],
        bidirectional=bidirectional,
        notes=notes,
        **options,
    )


def _refuse_source(name: str, rest: str) -> None:
    """Refuse a tensor of which torch makes a weight, by its name after a prefix."""
    if not _SOURCE.fullmatch(rest):
        return
    advice = (
        "torch.nn.utils.prune.remove or "
        "torch.nn.utils.parametrize.remove_parametrizations keeps the result"
    )
    if rest.endswith(_RAW):
        advice = (
            "put it under the name of the weight, which weight drop leaves with zeros"
        )
    raise ValueError(
        f"`sd` must hold the weights themselves, got {name!r}, of which torch makes "
        f"one; {advice}"
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
