"""Weights of Keras's `LSTM`, `GRU`, `SimpleRNN` and `Bidirectional`, in and out.

    from ostinato.interop import keras as from_keras

    spec, weights, notes = from_keras.from_layer(layer)
    networks = from_keras.from_file("model.keras")   # by layer name
    y, state = ostinato.rnn(spec, weights, x)

Keras orders gates `i f c o` and `z r h`, `c` and `h` being the candidates, and stores
matrices transposed. Its LSTM has one bias, its GRU with `reset_after=True` two. Keras
itself is not imported: files are read with h5py and json, so no code in them runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from .. import LayerWeights, RNNSpec, _checks
from .._rnn.joining import transposed
from .._typing import Array, Float, Mode
from .exported import join_biases, pseudo_layer, require
from .imported import (
    FLIPPED,
    Contents,
    Imported,
    as_array,
    build,
    gate_order,
    reorder_gates,
)
from .keras_files import read_layers
from .keras_layers import KINDS, Stored

__all__ = ["from_file", "from_layer", "to_weights"]

GATES = {"lstm": "i f g o", "gru": "z r n", "rnn_tanh": "h", "rnn_relu": "h"}
"""How Keras orders the gates, under this package's names."""

_PACKAGES = ("keras", "tf_keras")
_KINDS = {"LSTM": "lstm", "GRU": "gru", "SimpleRNN": "rnn_tanh"}
_DEFAULTS = {
    "activation": "tanh",
    "recurrent_activation": "sigmoid",
}
_FIELDS = {"w_ih": "kernel", "w_hh": "recurrent_kernel", "b_ih": "bias", "b_hh": "bias"}


def from_layer(layer: Any) -> Imported:
    """Convert a layer of Keras, or a stack of them.

    Args:
        layer: a built `keras.layers.LSTM`, `GRU`, `SimpleRNN`, or a `Bidirectional` of
            one of these with `merge_mode="concat"`; or a list of layers, each of which
            reads the outputs of the one before. In a list all but the last one need
            `return_sequences=True`, and the first one alone may have `go_backwards`.

    Returns:
        `Imported(spec, weights, notes)`, in the dtype of the variables. The notes say
        what else the layer does, such as dropout of its inputs or going backwards.

    Raises:
        TypeError: `layer` is none of these, or layers of a stack differ in dtype.
        ValueError: another activation, another `merge_mode`, a layer that is not built,
            or layers of a stack that differ in kind, or that no one call computes; the
            message names the attribute.

    Holds under every JAX transformation.
    """
    layers = list(layer) if isinstance(layer, (list, tuple)) else [layer]
    if not layers:
        raise ValueError("`layer` must hold at least one layer, got an empty list")
    return _convert([_stored(one) for one in layers])


def from_file(path: str | os.PathLike[str]) -> dict[str, Imported]:
    """Convert the recurrent layers of a file that Keras saved.

    Args:
        path: a model, `.keras`, or of the older form `.h5`.

    Returns:
        The networks by layer name; that of a layer inside another model is
        `"model/layer"`. Layers of other kinds are passed over. A recurrent layer whose
        arrays the file does not tell, as one in two models may be, is left out with a
        warning; asking for it raises KeyError with the reason.

    Raises:
        TypeError: `path` is no path, or weights of a recurrent layer are no floats.
        ValueError: the file is damaged or refers to other files; or a recurrent layer
            has another activation or `merge_mode`: the message names the attribute.
        ImportError: h5py is not installed.
    """
    networks, unknown = _Networks(), {}
    for stored in read_layers(path):
        if stored.reason and stored.kind in KINDS:
            unknown[stored.name] = _unknown(stored)
        elif stored.kind in KINDS:
            networks[stored.name] = _convert([stored])
    networks.unknown = unknown
    if unknown:
        left_out = "\n".join(unknown.values())
        warnings.warn(f"{os.fspath(path)!r} is read without\n{left_out}", stacklevel=2)
    return networks


class _Networks(dict[str, Imported]):
    """The networks of a file by name, and why others are unknown."""

    unknown: Mapping[str, str]

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(self.unknown.get(name, name))


def from_arrays(mode: Mode, arrays: Sequence[Any], **options: Any) -> Imported:
    """Convert one layer of any library that has the layouts of Keras.

    Args:
        mode: of `RNNSpec`.
        arrays: kernel `[I, G*H]`, recurrent kernel `[H, G*H]` and, if there is one,
            bias.
        options: more fields of `RNNSpec`.
    """
    weights = _weights("layer", arrays)
    return build(mode, [weights], lambda _, f: _FIELDS[f], order=GATES[mode], **options)


def read_file(path: str | os.PathLike[str]) -> Contents:
    """Return the networks in a file of Keras, and why other layers are none."""
    found, others = {}, {}
    for stored in read_layers(path):
        if stored.kind not in KINDS:
            if stored.kind != "InputLayer":
                others[stored.name] = f"{stored.kind} is no recurrent layer known here"
            continue
        try:
            found[stored.name] = _convert([stored])
        except (TypeError, ValueError) as error:
            others[stored.name] = str(error)
    return Contents(found, others)


def to_weights(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    *,
    layer: int = 0,
    fold: bool = False,
) -> list[np.ndarray]:
    """Convert one layer to the list that `set_weights` of a layer of Keras takes.

    Args:
        spec: the network; what Keras cannot express raises ValueError.
        weights: its flat vector.
        layer: which layer.
        fold: export the sum of two biases where Keras has one.

    Returns:
        `[kernel [I, G*H], recurrent_kernel [H, G*H], bias]`, those of the forward layer
        before those of the backward one if `spec.bidirectional`. A spec without biases
        is a layer with `use_bias=False`.

    Raises:
        TypeError: `weights` is no array of floats, or traced; `fold` is no bool.
        ValueError: `proj_size`, `cell_clip`, `input_mode="skip"` or several heads; two
            biases without `fold`, except for a GRU with `reset_after=True`.
    """
    target = "a layer of Keras"
    require(spec, target, proj_size=0, cell_clip=None, input_mode="linear")
    fold = _checks.check_bool("fold", fold)
    order, arrays = (gate_order(spec.mode), GATES[spec.mode]), []
    for reverse in range(spec.num_directions):
        parts = pseudo_layer(spec, weights, layer, bool(reverse))
        if spec.mode == "gru" and spec.reset_after:
            given = [b for b in (parts.b_ih, parts.b_hh) if b is not None]
            both = [
                reorder_gates(jnp.zeros_like(given[0]) if b is None else b, *order)
                for b in (parts.b_ih, parts.b_hh)
                if given
            ]
            bias = jnp.stack(both) if both else None
        else:
            b, _ = join_biases(spec, parts, target, fold)
            bias = None if b is None else reorder_gates(b, *order)
        matrices = [reorder_gates(w, *order).T for w in (parts.w_ih, parts.w_hh)]
        arrays += [*matrices, *([] if bias is None else [bias])]
    return [np.asarray(a) for a in arrays]


def _stored(layer: Any) -> Stored:
    """Return what a file would say of a layer."""
    kind = next(
        (
            c.__name__
            for c in type(layer).__mro__
            if c.__name__ in KINDS and c.__module__.startswith(("keras.", "tf_keras."))
        ),
        None,
    )
    if kind is None:
        raise TypeError(
            "`layer` must be a keras.layers.LSTM, GRU, SimpleRNN or Bidirectional, got "
            f"{type(layer).__module__}.{type(layer).__qualname__}"
        )
    inner = (
        [layer.forward_layer, layer.backward_layer]
        if kind == "Bidirectional"
        else [layer]
    )
    if not all(one.built for one in inner):
        raise ValueError(f"`built` of the layer {layer.name!r} must be True")
    arrays = []
    for one in inner:
        cell = one.cell if hasattr(one, "cell") else _stored(one)  # which raises
        for part in (layer, one, cell):
            for method in ("call", "inner_loop"):
                function = getattr(type(part), method, None)
                ours = (*_PACKAGES, "ostinato")
                if function is not None and _package(function) not in ours:
                    _refuse(
                        layer.name, method, "that of Keras", type(part).__qualname__
                    )
        names = ("kernel", "recurrent_kernel", "bias")
        arrays += [getattr(cell, n) for n in names if getattr(cell, n) is not None]
        for attribute in ("activation", "recurrent_activation"):
            _check_function(layer.name, attribute, getattr(cell, attribute, None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on functions that a file could not hold
        config = layer.get_config()
    return Stored(layer.name, kind, config, arrays)


def _convert(stack: Sequence[Stored]) -> Imported:
    """Return the network that stored layers, one after the other, describe."""
    pseudo, labels, notes, kinds = [], [], [], set()
    for stored in stack:
        if stored.reason:
            raise ValueError(_unknown(stored))
        parts = _directions(stored)
        _check_place(stored, parts[0][2], stack)
        count = len(stored.arrays) // len(parts)
        for n, (name, kind, config) in enumerate(parts):
            arrays = stored.arrays[n * count : (n + 1) * count]
            if count not in (2, 3) or len(stored.arrays) % len(parts):
                raise ValueError(
                    f"`{name}` must have 2 or 3 weights, got {len(stored.arrays)} for "
                    f"{len(parts)} direction{'s' * (len(parts) - 1)}"
                )
            mode, options = _mode(name, kind, config, arrays)
            layer = _weights(name, arrays)
            pseudo.append(layer)
            labels.append(name)
            kinds.add((mode, len(parts), *options.items()))
        notes += _notes(stored.name, parts)
    if len(kinds) > 1:
        raise ValueError(
            "`layer` must hold layers of one kind, activation, `reset_after` and "
            f"number of directions, got {sorted(map(str, kinds))}"
        )
    mode, directions, *options = kinds.pop()

    def label(p: int, field: str) -> str:
        return f"{labels[p]}.{_FIELDS[field]}"

    return build(
        mode,
        pseudo,
        label,
        order=GATES[mode],
        bidirectional=directions == 2,
        notes=notes,
        **dict(options),
    )


def _unknown(stored: Stored) -> str:
    return f"the layer {stored.name!r}: {stored.reason}"


def _check_place(
    stored: Stored, config: Mapping[str, Any], stack: Sequence[Stored]
) -> None:
    """Refuse a layer that does to time what one call of the stack cannot express.

    A layer with `go_backwards` returns its outputs in the order in which it reads. All
    layers after the first one have to keep the order that they are given.
    """
    if stored is not stack[0] and config.get("go_backwards"):
        wanted = "False after the first layer, as one call reads all in one order"
        _refuse(stored.name, "go_backwards", wanted, True)
    if stored is not stack[-1] and config.get("return_sequences") is False:
        wanted = "True before the last layer, as the next one reads all steps"
        _refuse(stored.name, "return_sequences", wanted, False)


def _directions(stored: Stored) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return name, kind and configuration of a layer, or of both inside a wrapper."""
    config = stored.config
    if stored.kind != "Bidirectional":
        return [(stored.name, stored.kind, config)]
    if config.get("merge_mode") != "concat":
        _refuse(stored.name, "merge_mode", "'concat'", config.get("merge_mode"))
    parts = []
    for which in ("layer", "backward_layer"):
        inner: Any = config.get(which)
        if inner is None and parts:  # made like the forward one, which was checked
            inner = config["layer"]
            inner = inner | {"config": inner["config"] | {"go_backwards": True}}
        if (
            not isinstance(inner, Mapping)
            or inner.get("class_name") not in _KINDS
            or not isinstance(inner.get("config"), Mapping)
        ):
            got = inner.get("class_name") if isinstance(inner, Mapping) else inner
            _refuse(stored.name, which, " or ".join(_KINDS), got)
        if bool(inner["config"].get("go_backwards")) != (which != "layer"):
            _refuse(f"{stored.name}.{which}", "go_backwards", which != "layer", "")
        name = "forward_layer" if which == "layer" else which
        parts.append((f"{stored.name}.{name}", inner["class_name"], inner["config"]))
    return parts


def _mode(
    name: str, kind: str, config: Mapping[str, Any], arrays: Sequence[Any]
) -> tuple[str, dict[str, Any]]:
    """Return the mode, and fields of its spec, that a configuration describes."""
    mode, options = _KINDS[kind], {}
    size = arrays[1].shape[0] if len(arrays[1].shape) == 2 else None
    for field, got in (("units", size), ("use_bias", len(arrays) == 3)):
        if got is not None and config.get(field, got) != got:
            _refuse(name, field, f"{got} for its arrays", config[field])
    activation = config.get("activation", "tanh")
    if kind == "SimpleRNN" and activation == "relu":
        mode = "rnn_relu"
    elif activation != "tanh":
        _refuse(name, "activation", "'tanh'", activation)
    if kind != "SimpleRNN":
        gates = config.get("recurrent_activation", "sigmoid")
        if gates != "sigmoid":
            _refuse(name, "recurrent_activation", "'sigmoid'", gates)
    if kind == "GRU":
        two = len(arrays) == 3 and len(arrays[2].shape) == 2
        options["reset_after"] = bool(config.get("reset_after", two))
        if len(arrays) == 3 and two != options["reset_after"]:
            _refuse(name, "reset_after", f"{two} for its bias", not two)
    return mode, options


def _package(function: Any) -> str:
    return (getattr(function, "__module__", None) or "").split(".")[0]


def _check_function(name: str, attribute: str, function: Any) -> None:
    """Refuse a function that has the name of one of Keras, but is another one.

    In the configuration of a layer they look alike.
    """
    label = getattr(function, "__name__", "")
    if label in ("tanh", "sigmoid", "relu") and _package(function) not in _PACKAGES:
        _refuse(name, attribute, f"the {label} of Keras", function)


def _refuse(name: str, attribute: str, wanted: object, got: object) -> NoReturn:
    text = f", got {got!r}"[:200] if got != "" else ""
    raise ValueError(f"`{attribute}` of the layer {name!r} must be {wanted}{text}")


def _weights(name: str, arrays: Sequence[Any]) -> LayerWeights:
    fields = ("kernel", "recurrent_kernel", "bias")[: len(arrays)]
    named = {
        field: as_array(f"{name}.{field}", array)
        for field, array in zip(fields, arrays, strict=True)
    }
    for field in fields[:2]:
        if named[field].ndim != 2:
            raise ValueError(
                f"`{name}.{field}` must be a matrix, got the shape "
                f"{list(named[field].shape)}"
            )
    kernel, recurrent = (
        transposed(named["kernel"]),
        transposed(named["recurrent_kernel"]),
    )
    bias = named.get("bias")
    if bias is not None and bias.ndim == 2:
        if bias.shape[0] != 2:
            raise ValueError(f"`{name}.bias` must have 2 rows, got {bias.shape[0]}")
        return LayerWeights(kernel, recurrent, bias[0], bias[1], None)
    return LayerWeights(kernel, recurrent, bias, None, None)


def _notes(name: str, parts: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    """Return what a layer does that a spec does not say."""
    notes, (_, _, config) = [], parts[0]
    if len(parts) == 1 and config.get("go_backwards"):
        notes.append(f"{name}: go_backwards=True: {FLIPPED}")
    for rate in ("dropout", "recurrent_dropout"):
        if config.get(rate):
            notes.append(
                f"{name}: {rate}={config[rate]} acts within the layer in training; "
                "here `dropout` acts between layers"
            )
    if config.get("return_sequences") is False:
        notes.append(f"{name}: return_sequences=False: its output is the final h")
    if config.get("time_major"):  # of Keras 2
        notes.append(f"{name}: time_major=True: call with time_major=True")
    if config.get("stateful"):
        notes.append(f"{name}: stateful=True: hand the state to the next call")
    policy = config.get("dtype")
    if isinstance(policy, Mapping) and isinstance(policy.get("config"), Mapping):
        policy = policy["config"].get("name")
    if isinstance(policy, str) and policy.startswith("mixed_"):
        computed = policy.removeprefix("mixed_")
        notes.append(f"{name}: it computes in {computed}: cast weights and inputs")
    return notes
