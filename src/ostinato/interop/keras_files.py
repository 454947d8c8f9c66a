"""Layers of Keras as its files describe them: configuration and arrays, no code.

A `.keras` file is a zip file of `config.json` and `model.weights.h5`, an older `.h5`
file has the configuration in an attribute. HDF5 can refer to other files and declare
arrays of any size; here names are followed only inside the file, and an array is read
only if it fits in the file. Since the HDF5 library may loop for ever on damaged files,
`hdf5_script` calls it in a process of its own.
"""

from __future__ import annotations

import importlib.util
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

_ARRAYS = ("kernel", "recurrent_kernel", "bias")
_MODELS = ("Functional", "Sequential", "Model")
_MAX_DEPTH = 20  # of models in models
_SCRIPT = Path(__file__).with_name("hdf5_script.py")
_PATIENCE = 600  # seconds for a large file on a slow disk

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
        raise ImportError(
            "files of Keras need the package `h5py`, which is not installed; run: "
            "pip install 'ostinato[keras]'"
        )
    with reading(path, "a model that Keras saved as .keras or .h5") as size:
        if not zipfile.is_zipfile(path):
            text, arrays = _hdf5(os.fspath(path), b"")
            if not isinstance(text, str):
                raise ValueError(
                    "it has no `model_config`: save the model, not weights alone"
                )
            return list(_read_legacy(arrays, read_json(text), None, "", 0))
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
        dtype = np.dtype(jnp.bfloat16 if kind == "bfloat16" else kind)
        count = math.prod(shape)
        array = np.frombuffer(raw, dtype, count, offset)
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


def _sides(layer: Mapping[str, Any], one: str, two: Sequence[str]) -> Sequence[str]:
    return two if layer.get("class_name") == "Bidirectional" else [one]


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
        sides = _sides(layer, at, (f"{at}/forward_layer", f"{at}/backward_layer"))
        paths = [f"{side}/cell/vars/{n}" for side in sides for n in range(3)]
        arrays = [stored[path] for path in paths if path in stored]
        yield Stored(name, kind, layer["config"], arrays)


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in the names of groups."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _read_legacy(
    stored: Arrays,
    model: Mapping[str, Any],
    group: str | None,
    before: str,
    depth: int,
) -> Iterator[Stored]:
    """Yield the layers of a model in an `.h5` file, where groups have their names."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    for layer in _configs(model):
        kind, name = _kind(layer), _name(layer, before)
        own = _name(layer, "")
        at = f"model_weights/{own}" if group is None else group
        if kind in _MODELS:
            yield from _read_legacy(stored, layer, at, f"{name}/", depth + 1)
            continue
        # Weights of a model inside another one are listed together.
        paths = [
            path
            for path in stored
            if path.startswith(f"{at}/")
            and (group is None or own in path[len(at) :].split("/"))
        ]
        arrays = [
            stored[path]
            for side in _sides(layer, "", ("forward_", "backward_"))
            for leaf in _ARRAYS
            for path in paths
            if path.split("/")[-1].split(":")[0] == leaf
            and any(part.startswith(side) for part in path.split("/"))
        ]
        yield Stored(name, kind, layer["config"], arrays)
