"""Layers of Keras as its files describe them: configuration and arrays, no code.

A `.keras` file is a zip file of `config.json` and `model.weights.h5`, an older `.h5`
file has the configuration in an attribute. HDF5 can refer to other files and declare
arrays of any size; here names are followed only inside the file, and an array is read
only if it fits in the file. Since the HDF5 library may loop for ever on damaged files,
`hdf5_script` calls it in a process of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._files import check_zip, read_json, reading
from .._modules import not_installed

_ARRAYS = ("kernel", "recurrent_kernel", "bias")
_MODELS = ("Functional", "Sequential", "Model")
_MAX_DEPTH = 20  # of models in models
_SCRIPT = Path(__file__).with_name("hdf5_script.py")
_PATIENCE = 600  # seconds for a large file on a slow disk

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
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    arrays: Sequence[Any]


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
            return list(_read_legacy(arrays, read_json(text), "", ()))
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, size)
            config = read_json(archive.read("config.json"))
            _, arrays = _hdf5("-", archive.read("model.weights.h5"))
        return list(_read_current(arrays, config, "", "", 0))


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


def _name(layer: Mapping[str, Any], before: str) -> str:
    return f"{before}{layer['config'].get('name') or layer.get('name')}"


def _read_current(
    stored: Arrays, model: Mapping[str, Any], group: str, before: str, depth: int
) -> Iterator[Stored]:
    """Yield the layers of a model in a `.keras` file.

    The groups of layers are called after their classes, and numbered in the order of
    the configuration.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    used: dict[str, int] = {}
    for layer in _configs(model):
        kind, name = _kind(layer), _name(layer, before)
        snake = _snake_case(str(layer.get("class_name")))
        used[snake] = used.get(snake, -1) + 1
        at = f"{group}layers/{snake}{'_' + str(used[snake]) if used[snake] else ''}"
        if kind in _MODELS:
            yield from _read_current(stored, layer, f"{at}/", f"{name}/", depth + 1)
            continue
        sides = [at]
        if layer.get("class_name") == "Bidirectional":
            sides = [f"{at}/forward_layer", f"{at}/backward_layer"]
        paths = [f"{side}/cell/vars/{n}" for side in sides for n in range(3)]
        arrays = [stored[path] for path in paths if path in stored]
        yield Stored(name, kind, layer["config"], arrays)


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in the names of groups."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _read_legacy(
    stored: Arrays, model: Mapping[str, Any], group: str, around: tuple[str, ...]
) -> Iterator[Stored]:
    """Yield the layers of a model in an `.h5` file, where groups have their names.

    Args:
        stored: the arrays, those of a group in Keras's order.
        model: the description of the model.
        group: the group of the outermost model that is inside of the file's, whose
            layers' arrays are there together; empty for the file's model.
        around: the names of the models around these layers.
    """
    if len(around) > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    for layer in _configs(model):
        kind, own = _kind(layer), _name(layer, "")
        at = group or f"model_weights/{own}/"
        if kind in _MODELS:
            yield from _read_legacy(stored, layer, at, (*around, own))
            continue
        cells = _cells(stored, at)
        if group:
            both = layer.get("class_name") == "Bidirectional"
            cells = _cells_of(cells, own, around, both)
        arrays = [array for scope in _forward_first([*cells]) for array in cells[scope]]
        yield Stored("/".join((*around, own)), kind, layer["config"], arrays)


def _cells(stored: Arrays, group: str) -> dict[Scope, list[np.ndarray]]:
    """Return the arrays of every cell in a group, by the names around them."""
    leaves: dict[Scope, dict[str, np.ndarray]] = {}
    for path, array in stored.items():
        if path.startswith(group):
            *scope, leaf = path.removeprefix(group).split("/")
            leaves.setdefault(tuple(scope), {})[leaf.split(":")[0]] = array
    return {
        scope: [found[leaf] for leaf in _ARRAYS if leaf in found]
        for scope, found in leaves.items()
    }


def _cells_of(
    cells: Mapping[Scope, list[np.ndarray]],
    own: str,
    around: tuple[str, ...],
    both: bool,
) -> dict[Scope, list[np.ndarray]]:
    """Return the cells of one layer among those of all layers of a model.

    Names around a cell are those of models, of the layer, of the direction if the layer
    runs `both`, and, unless Keras was an old one, of the cell.
    """
    for place in (-3, -2) if both else (-2, -1):
        scopes = [s for s in cells if len(s) >= -place and s[place] == own]
        if scopes:
            break
    else:
        return {}
    # A layer of another model may have the same name.
    models = {scope: _common_end(scope[:place], around) for scope in scopes}
    most = max(models.values())
    return {scope: cells[scope] for scope in scopes if models[scope] == most}


def _common_end(a: tuple[str, ...], b: tuple[str, ...]) -> int:
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
