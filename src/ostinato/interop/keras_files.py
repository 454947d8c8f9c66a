"""Layers of Keras as its files describe them: configuration and arrays, no code.

A `.keras` file is a zip file of `config.json` and `model.weights.h5`, an older `.h5`
file has the configuration in an attribute. HDF5 can refer to other files and declare
arrays of any size; here names are followed only inside the file, and an array is read
only if it fits in the file. Since the HDF5 library may loop for ever on damaged files,
`hdf5_script` calls it in a process of its own.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._files import check_zip, read_json, reading
from .._modules import not_installed

KINDS = ("LSTM", "GRU", "SimpleRNN", "Bidirectional")
"""The recurrent layers of Keras whose arrays are looked for."""

_ARRAYS = ("kernel", "recurrent_kernel", "bias")
_MODELS = ("Functional", "Sequential", "Model")
_MAX_DEPTH = 20  # of models in models
_SCRIPT = Path(__file__).with_name("hdf5_script.py")
_PATIENCE = 600  # seconds for a large file on a slow disk
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
_UNNAMED = (
    "the file does not tell its arrays: no names of arrays fit this layer alone, as if "
    "it had been renamed, or the file written in part; save the model as .keras"
)

Arrays = Mapping[str, np.ndarray]
"""Arrays by path in the file."""

Scope = tuple[str, ...]
"""The names of the groups around an array."""


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


class _Place(NamedTuple):
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


def read_layers(path: str | os.PathLike[str]) -> list[Stored]:
    """Return the layers of a model in a file of Keras.

    Raises:
        ValueError: the file is damaged, or refers to other files.
        ImportError: h5py is not installed.
    """
    if importlib.util.find_spec("h5py") is None:
        raise not_installed(ModuleNotFoundError(name="h5py"), "keras")
    with reading(path, "a model that Keras saved as .keras or .h5") as size:
        if not zipfile.is_zipfile(path):
            text, arrays = _hdf5(os.fspath(path), b"")
            if not isinstance(text, str):
                raise ValueError(
                    "it has no `model_config`: save the model, not weights alone"
                )
            return _distinct(_read_legacy(arrays, read_json(text)))
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, size)
            config = read_json(archive.read("config.json"))
            _, arrays = _hdf5("-", archive.read("model.weights.h5"))
            counts_all = _counts_all(archive)
        return _distinct(_read_current(arrays, config, counts_all))


def _distinct(layers: Iterable[Stored]) -> list[Stored]:
    """Return the layers, with a reason in place of arrays where names are the same.

    `"a/b"` may be a layer of Keras 2, and the layer `"b"` of the model `"a"`.
    """
    found = [*layers]
    count = collections.Counter(layer.name for layer in found)
    return [
        layer
        if count[layer.name] == 1
        else layer._replace(
            arrays=(), reason="several layers of the file have its name"
        )
        for layer in found
    ]


def _hdf5(path: str, data: bytes) -> tuple[str | None, Arrays]:
    """Return the configuration and the arrays of a file, or of `data` for `"-"`."""
    command = [sys.executable, "-P", str(_SCRIPT), path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, input=data, capture_output=True, env=environment, timeout=_PATIENCE
    )
    line, _, raw = done.stdout.partition(b"\n")
    if done.returncode or not line:
        raise ValueError("the HDF5 library failed on it")
    head = json.loads(line)
    if "error" in head:
        raise ValueError(head["error"])
    arrays, offset = {}, 0
    for name, kind, shape in head["arrays"]:
        if kind is None:  # no numbers: an error where a layer has it
            arrays[name] = np.empty(0, object)
            continue
        dtype = np.dtype(jnp.bfloat16 if kind == "bfloat16" else kind)
        array = np.frombuffer(raw, dtype, math.prod(shape), offset)
        arrays[name] = array.reshape(shape)
        offset += array.nbytes
    return head["config"], arrays


def _kind(layer: Mapping[str, Any]) -> str:
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


def _places(
    model: Mapping[str, Any],
    names: tuple[str, ...] = (),
    groups: tuple[tuple[str, int], ...] = (),
) -> Iterator[_Place]:
    """Yield the layers of a model and of the models in it."""
    if len(names) > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    used: collections.Counter[str] = collections.Counter()
    before = f"{_group(*groups[-1])}/" if groups else ""
    for layer in _configs(model):
        name = layer["config"].get("name") or layer.get("name")
        group = f"{before}layers/{_snake_case(str(layer.get('class_name')))}"
        place = _Place(layer, (*names, str(name)), (*groups, (group, used[group])))
        used[group] += 1
        if _kind(layer) in _MODELS:
            yield from _places(*place)
        else:
            yield place


def _group(prefix: str, number: int) -> str:
    return f"{prefix}_{number}" if number else prefix


def _stored(place: _Place, arrays: Sequence[Any], reason: str) -> Stored:
    """Return a layer of a file; the reason is told only where there are no arrays."""
    kind = _kind(place.layer)
    if kind not in KINDS:
        arrays, reason = (), ""
    why = "" if arrays else reason
    return Stored("/".join(place.names), kind, place.layer["config"], arrays, why)


def _counts_all(archive: zipfile.ZipFile) -> bool:
    """Return whether the numbers of groups in a `.keras` file count all layers.

    Keras 3 counts a layer that it has stored elsewhere, Keras 2.14 and 2.15 do not.
    """
    if "metadata.json" not in archive.namelist():
        return False
    metadata = read_json(archive.read("metadata.json"))
    version = metadata.get("keras_version") if isinstance(metadata, Mapping) else None
    major = str(version).split(".")[0]
    return major.isdecimal() and int(major) >= 3


def _read_current(
    stored: Arrays, model: Mapping[str, Any], counts_all: bool
) -> Iterator[Stored]:
    """Yield the layers of a model in a `.keras` file.

    The groups of layers are called after their classes, and numbered in the order of
    the configuration. A layer that occurs several times, in other models or attributes
    too, is stored where Keras meets it first.
    """
    places = [*_places(model)]
    doubtful = set() if counts_all else _doubtful(stored, places)
    marked = _stored_once(stored, places, model) if counts_all else {}
    for place in places:
        if any(prefix in doubtful for prefix, _ in place.groups):
            yield _stored(place, (), _UNCLEAR)
        else:
            arrays = _own(stored, place) or marked.get(_shared(place.layer), [])
            yield _stored(place, arrays, _ELSEWHERE)


def _own(stored: Arrays, place: _Place) -> list[np.ndarray]:
    """Return the arrays in the group of a layer."""
    at = _group(*place.groups[-1])
    sides = [at]
    if place.layer.get("class_name") == "Bidirectional":
        sides = [f"{at}/forward_layer", f"{at}/backward_layer"]
    paths = [f"{side}/cell/vars/{n}" for side in sides for n in range(3)]
    return [stored[path] for path in paths if path in stored]


def _doubtful(stored: Arrays, places: Sequence[_Place]) -> set[str]:
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
    stored: Arrays, places: Sequence[_Place], model: Mapping[str, Any]
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


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in the names of groups."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _read_legacy(stored: Arrays, model: Mapping[str, Any]) -> Iterator[Stored]:
    """Yield the layers of a model in an `.h5` file, where groups have their names.

    The arrays of a model inside of the file's, with those of all models in it, are
    there together.

    Args:
        stored: the arrays, those of a group in Keras's order.
        model: the description of the model.
    """
    everywhere = [*_places(model)]
    inside: dict[str, list[_Place]] = {}
    marks = collections.Counter(map(_mark, everywhere))
    for place in everywhere:
        inside.setdefault(place.names[0], []).append(place)
    for name, places in inside.items():
        cells = {}
        if any(_kind(place.layer) in KINDS for place in places):
            cells = _cells(stored, name, inside)
        if len(places[0].names) > 1:
            scopes = _scopes(cells, places, marks)
        else:
            scopes = [[*cells]]
        for place, own in zip(places, scopes, strict=True):
            wanted = 2 if place.layer.get("class_name") == "Bidirectional" else 1
            own = _forward_first(own) if len(own) == wanted else []
            arrays = [array for scope in own for array in cells[scope]]
            yield _stored(place, arrays, _UNNAMED)


def _cells(
    stored: Arrays, name: str, names: Iterable[str]
) -> dict[Scope, list[np.ndarray]]:
    """Return the arrays of every cell in the group of a layer or model, by its scope.

    Names may have slashes, so that the groups of others lie in that of `name`.
    """
    group = f"model_weights/{name}/"
    others = tuple(
        f"model_weights/{other}/" for other in names if other.startswith(f"{name}/")
    )
    leaves: dict[Scope, dict[str, np.ndarray]] = {}
    for path, array in stored.items():
        if path.startswith(group) and not path.startswith(others):
            *scope, leaf = path.removeprefix(group).split("/")
            leaves.setdefault(tuple(scope), {})[leaf.split(":")[0]] = array
    return {
        scope: [found[leaf] for leaf in _ARRAYS if leaf in found]
        for scope, found in leaves.items()
        if "recurrent_kernel" in found
    }


def _mark(place: _Place) -> str | None:
    """Return what descriptions of the same layer have in common, if anything."""
    mark = place.layer.get("shared_object_id")
    return None if mark is None else str(mark)


def _are_one(places: Sequence[_Place], marks: collections.Counter[str | None]) -> bool:
    """Return whether the configuration says that several layers are the same one.

    Keras 2 marks all descriptions of a layer in an `.h5` file, at times but the first.
    """
    found = collections.Counter(map(_mark, places))
    unmarked = found.pop(None, 0)
    return len(places) == 1 or (
        unmarked <= 1
        and len(found) == 1
        and all(marks[mark] == count for mark, count in found.items())
    )


def _scopes(
    cells: Iterable[Scope],
    places: Sequence[_Place],
    marks: collections.Counter[str | None],
) -> list[list[Scope]]:
    """Return for each layer of a model the cells that are its own by their names.

    A cell is that of the layer whose names fit best. If they fit several layers alike,
    it is none of theirs, unless the configuration says that these are the same one.
    """
    cells = [*cells]
    fits = [_fits(cells, place) for place in places]
    best: dict[Scope, tuple[bool, int]] = {}
    for fit in fits:
        best |= {scope: max(fit[scope], best.get(scope, fit[scope])) for scope in fit}
    owners: dict[Scope, list[_Place]] = {scope: [] for scope in best}
    own = []
    for place, fit in zip(places, fits, strict=True):
        most = max(fit.values(), default=None)
        own.append([s for s in fit if fit[s] == most == best[s]])
        for scope in own[-1]:
            owners[scope].append(place)
    clear = {scope for scope, them in owners.items() if _are_one(them, marks)}
    return [scopes if clear.issuperset(scopes) else [] for scopes in own]


def _fits(cells: Sequence[Scope], place: _Place) -> dict[Scope, tuple[bool, int]]:
    """Return the cells that have a layer's name, and how well the names before it fit.

    Names around a cell are those of models, of the layer, of the direction if the layer
    runs both, and, unless Keras was an old one, of the cell. Fits are compared first by
    whether all names are those of the models, then by how many are.
    """
    own, whole = place.names[-1].split("/"), "/".join(place.names).split("/")
    both = place.layer.get("class_name") == "Bidirectional"
    for after in (2, 1) if both else (1, 0):
        fits = {}
        for scope in cells:
            names = [*scope[: max(0, len(scope) - after)]]
            if names[-len(own) :] == own:
                same = _common_end(names, whole)
                fits[scope] = (same == min(len(names), len(whole)), same)
        if fits:
            return fits
    return {}


def _common_end(a: Sequence[str], b: Sequence[str]) -> int:
    """Return how many of the last names are the same."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _forward_first(scopes: list[Scope]) -> list[Scope]:
    """Return the cells in order of their directions.

    Keras lists the backward one first only if the forward one is not trained.
    """
    if len(scopes) != 2:
        return scopes
    pairs = zip(*scopes, strict=False)
    first, second = next(filter(lambda pair: pair[0] != pair[1], pairs), ("", ""))
    swapped = second.startswith("forward_") and not first.startswith("forward_")
    return scopes[::-1] if swapped else scopes
