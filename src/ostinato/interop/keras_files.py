"""Layers of Keras as its files describe them: configuration and arrays, no code.

A `.keras` file is a zip file of `config.json` and `model.weights.h5`, an older `.h5`
file has the configuration in an attribute. HDF5 can refer to other files and declare
arrays of any size; here names are followed only inside the file, and an array is read
only if it fits in the file.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .files import BadFileError, check_zip, read_json, reading

_ARRAYS = ("kernel", "recurrent_kernel", "bias")
_MODELS = ("Functional", "Sequential", "Model")
_MAX_DEPTH = 20  # of models in models
_MAX_LAYERS = 100_000


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
    import h5py

    with reading(path, "a model that Keras saved as .keras or .h5") as size:
        if not zipfile.is_zipfile(path):
            with h5py.File(path, "r", locking=False) as file:
                return _read_legacy(_Reader(h5py, file, size))
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, size)
            config = read_json(archive.read("config.json"))
            data = archive.read("model.weights.h5")
        with h5py.File(io.BytesIO(data), "r") as file:
            reader = _Reader(h5py, file, len(data))
            return list(_read_current(reader, config, "", "", 0))


class _Reader:
    """Arrays of one HDF5 file, found without leaving it."""

    def __init__(self, h5py: Any, file: Any, size: int) -> None:
        self.h5py, self.file, self.size = h5py, file, size

    def find(self, path: str) -> Any:
        """Return the group or dataset at a path of plain links; None if it has none."""
        node = self.file
        for part in path.split("/"):
            if not isinstance(node, self.h5py.Group) or part not in ("", *node):
                return None
            if part and not isinstance(
                node.get(part, getlink=True), self.h5py.HardLink
            ):
                raise BadFileError(
                    f"`path` must be a file without links to others, got {path!r}"
                )
            node = node[part] if part else node
        return node

    def array(self, path: str) -> np.ndarray | None:
        """Return the array at a path; None if there is none."""
        node = self.find(path)
        if not isinstance(node, self.h5py.Dataset):
            return None
        if node.external or node.is_virtual:
            raise BadFileError(
                f"`path` must be a file without data in others, got {path!r}"
            )
        bfloat16 = node.attrs.get("dtype") == "bfloat16" and node.dtype.itemsize == 2
        if not (node.dtype.kind == "f" or bfloat16) or node.nbytes > self.size:
            raise BadFileError(
                f"`path` must hold floats that fit in its {self.size} bytes, got "
                f"{node.dtype}{list(node.shape)} in {path!r}"
            )
        array = np.asarray(node[()])
        return array.view(jnp.bfloat16) if bfloat16 else array


def _kind(layer: Mapping[str, Any]) -> str:
    """Return a layer's class, told from strangers' classes of the same name."""
    module, kind = layer.get("module") or "keras", str(layer.get("class_name"))
    return (
        kind
        if str(module).split(".")[0] in ("keras", "tf_keras")
        else f"{module}>{kind}"
    )


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
    reader: _Reader, model: Mapping[str, Any], group: str, before: str, depth: int
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
            yield from _read_current(reader, layer, f"{at}/", f"{name}/", depth + 1)
            continue
        sides = _sides(layer, at, (f"{at}/forward_layer", f"{at}/backward_layer"))
        paths = [f"{side}/cell/vars/{n}" for side in sides for n in range(3)]
        arrays = [reader.array(path) for path in paths]
        yield Stored(name, kind, layer["config"], [a for a in arrays if a is not None])


def _snake_case(name: str) -> str:
    """Return a class name as Keras writes it in the names of groups."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _read_legacy(reader: _Reader) -> list[Stored]:
    """Return the layers of an `.h5` file, whose weights are listed by name."""
    attributes = reader.file.attrs
    if "model_config" not in attributes:
        raise ValueError("it has no `model_config`: save the model, not weights alone")
    return list(_legacy(reader, read_json(attributes["model_config"]), None, "", 0))


def _legacy(
    reader: _Reader,
    model: Mapping[str, Any],
    group: str | None,
    before: str,
    depth: int,
) -> Iterator[Stored]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"its models are nested more than {_MAX_DEPTH} deep")
    for layer in _configs(model):
        kind, name = _kind(layer), _name(layer, before)
        own = _name(layer, "")
        at = f"model_weights/{own}" if group is None else group
        if kind in _MODELS:
            yield from _legacy(reader, layer, at, f"{name}/", depth + 1)
            continue
        node = reader.find(at)
        paths = [] if node is None else _weight_names(node)
        if group is not None:  # weights of a model inside are listed together
            paths = [path for path in paths if own in path.split("/")]
        sides = _sides(layer, "", ("forward_", "backward_"))
        arrays = [
            reader.array(f"{at}/{path}")
            for side in sides
            for leaf in _ARRAYS
            for path in paths
            if path.split("/")[-1].split(":")[0] == leaf
            and any(part.startswith(side) for part in path.split("/"))
        ]
        yield Stored(name, kind, layer["config"], [a for a in arrays if a is not None])


def _weight_names(group: Any) -> list[str]:
    """Return the list in an attribute, which long lists share with numbered ones."""
    names = [*group.attrs.get("weight_names", [])]
    for n in range(_MAX_LAYERS):
        if f"weight_names{n}" not in group.attrs:
            break
        names += [*group.attrs[f"weight_names{n}"]]
    return [n.decode() if isinstance(n, bytes) else str(n) for n in names]
