"""Layers in the configuration of a model of Keras, for all of its files."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

KINDS = ("LSTM", "GRU", "SimpleRNN", "Bidirectional")
"""The recurrent layers of Keras whose arrays are looked for."""

_MODELS = ("Functional", "Sequential", "Model")
_MAX_DEPTH = 20  # of models in models

Arrays = Mapping[str, np.ndarray]
"""Arrays by path in the file."""


class Stored(NamedTuple):
    """A layer of a file.

    Attributes:
        name: of the layer, with those of the models around it: `"model/layer"`.
        kind: its class, such as `"LSTM"`, or `"package>LSTM"` if it is not Keras's.
        config: its arguments.
        arrays: kernel, recurrent kernel and bias of each direction, as they are there;
            empty for layers of other kinds.
        reason: why the file does not tell the arrays; empty where it does.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    arrays: Sequence[Any]
    reason: str = ""


class Place(NamedTuple):
    """A layer in the configuration of a model.

    Attributes:
        layer: its description.
        names: those of the models around it, and its own.
        groups: in a `.keras` file, of the models around it, and its own: what the
            groups of one class in one model have in common, and the number.
    """

    layer: Mapping[str, Any]
    names: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]


def kind_of(layer: Mapping[str, Any]) -> str:
    """Return a layer's class, told from strangers' classes of the same name."""
    module, kind = str(layer.get("module") or "keras"), str(layer.get("class_name"))
    if kind.startswith("ostinato>"):  # ours, in an .h5 file
        return kind.removeprefix("ostinato>")
    ours = module == "ostinato.nn.keras"
    if ours or module.split(".")[0] in ("keras", "tf_keras"):
        return kind
    return f"{module}>{kind}"


def _configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the descriptions of a model's layers, each with its `"config"`."""
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, Mapping) else inner
    if not isinstance(layers, list):  # a class of the user's, whose code we do not run
        return []
    return [
        layer
        for layer in layers
        if isinstance(layer, Mapping) and isinstance(layer.get("config"), Mapping)
    ]


def places_of(
    model: Mapping[str, Any],
    names: tuple[str, ...] = (),
    groups: tuple[tuple[str, int], ...] = (),
) -> Iterator[Place]:
    """Yield the layers of a model and of the models in it."""
    if len(names) > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    used: collections.Counter[str] = collections.Counter()
    before = f"{group_name(*groups[-1])}/" if groups else ""
    for layer in _configs(model):
        name = layer["config"].get("name") or layer.get("name")
        group = f"{before}layers/{_snake_case(str(layer.get('class_name')))}"
        place = Place(layer, (*names, str(name)), (*groups, (group, used[group])))
        used[group] += 1
        if kind_of(layer) in _MODELS:
            yield from places_of(*place)
        else:
            yield place


def group_name(prefix: str, number: int) -> str:
    """Return the name of a layer's group in a `.keras` file."""
    return f"{prefix}_{number}" if number else prefix


def stored_layer(place: Place, arrays: Sequence[Any], reason: str) -> Stored:
    """Return a layer of a file; the reason is told only where there are no arrays."""
    kind = kind_of(place.layer)
    if kind not in KINDS:
        arrays, reason = (), ""
    why = "" if arrays else reason
    return Stored("/".join(place.names), kind, place.layer["config"], arrays, why)


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in the names of groups."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
