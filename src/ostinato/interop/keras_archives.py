"""Which arrays of a `.keras` file are whose: by the classes of layers, numbered."""

from __future__ import annotations

import collections
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._files import read_json
from .keras_layers import (
    KINDS,
    Arrays,
    Place,
    Stored,
    group_name,
    places_of,
    stored_layer,
)

_ELSEWHERE = (
    "the file has no arrays in its place: the layer was not built, or Keras stored it "
    "elsewhere, as in another model or an attribute; load the model with Keras and "
    "save it as .h5"
)
_UNCLEAR = (
    "the file does not tell its arrays: Keras 2 numbers those of a class without the "
    "layers that it stored elsewhere, as in another model or an attribute; load the "
    "model with Keras and save it as .h5"
)


def counts_all(archive: zipfile.ZipFile) -> bool:
    """Return whether the numbers of groups in a `.keras` file count all layers.

    Keras 3 counts a layer that it has stored elsewhere, Keras 2.14 and 2.15 do not.
    """
    if "metadata.json" not in archive.namelist():
        return False
    metadata = read_json(archive.read("metadata.json"))
    version = metadata.get("keras_version") if isinstance(metadata, Mapping) else None
    major = str(version).split(".")[0]
    return major.isdecimal() and int(major) >= 3


def read_archive(
    stored: Arrays, model: Mapping[str, Any], counts_all: bool
) -> Iterator[Stored]:
    """Yield the layers of a model in a `.keras` file.

    The groups of layers are called after their classes, and numbered in the order of
    the configuration. A layer that occurs several times, in other models or attributes
    too, is stored where Keras meets it first.
    """
    places = [*places_of(model)]
    doubtful = set() if counts_all else _doubtful(stored, places)
    marked = _stored_once(stored, places, model) if counts_all else {}
    for place in places:
        if any(prefix in doubtful for prefix, _ in place.groups):
            yield stored_layer(place, (), _UNCLEAR)
        else:
            arrays = _own(stored, place) or marked.get(_shared(place.layer), [])
            yield stored_layer(place, arrays, _ELSEWHERE)


def _own(stored: Arrays, place: Place) -> list[np.ndarray]:
    """Return the arrays in the group of a layer."""
    at = group_name(*place.groups[-1])
    sides = [at]
    if place.layer.get("class_name") == "Bidirectional":
        sides = [f"{at}/forward_layer", f"{at}/backward_layer"]
    paths = [f"{side}/cell/vars/{n}" for side in sides for n in range(3)]
    return [stored[path] for path in paths if path in stored]


def _doubtful(stored: Arrays, places: Sequence[Place]) -> set[str]:
    """Return what those groups begin with whose numbers may be of other layers.

    Layers that are stored elsewhere have no number. If one is, then the last number of
    its class is missing, or is that of a model without the layers looked for in it.
    """
    there: dict[tuple[str, int], bool] = {}
    for place in places:
        if place.layer.get("class_name") in KINDS:
            found = bool(_own(stored, place))
            for group in place.groups:
                there[group] = there.get(group, False) or found
    return {prefix for (prefix, _), found in there.items() if not found}


def _shared(layer: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return class and name of a layer that has been described before, else None."""
    return None if layer.get("shared_object_id") is None else _labels(layer)


def _labels(layer: Mapping[str, Any]) -> tuple[str, str]:
    config = layer.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    return str(layer.get("class_name")), str(name)


def _stored_once(
    stored: Arrays, places: Sequence[Place], model: Mapping[str, Any]
) -> dict[tuple[str, str] | None, list[np.ndarray]]:
    """Return the arrays of layers that may occur again, by class and name.

    Keras 3 marks all descriptions of a layer but the first. Where one alone, of all
    objects with this class and name, has no mark, it is that of the same layer.
    """
    first = collections.Counter(
        _labels(one) for one in _descriptions(model) if _shared(one) is None
    )
    return {
        _labels(place.layer): _own(stored, place)
        for place in places
        if _shared(place.layer) is None and first[_labels(place.layer)] == 1
    }


def _descriptions(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of all objects in a configuration."""
    pending = [config]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            if "class_name" in one:
                yield one
            pending += one.values()
        elif isinstance(one, list):
            pending += one
