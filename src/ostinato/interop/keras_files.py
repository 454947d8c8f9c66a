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
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from .._files import check_zip, read_json, reading
from .._modules import not_installed
from . import keras_archives, keras_hdf5
from .keras_layers import Arrays, Stored

_SCRIPT = Path(__file__).with_name("hdf5_script.py")
_PATIENCE = 600  # seconds for a large file on a slow disk


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
            return _distinct(keras_hdf5.read_hdf5(arrays, read_json(text)))
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, size)
            config = read_json(archive.read("config.json"))
            _, arrays = _hdf5("-", archive.read("model.weights.h5"))
            counts_all = keras_archives.counts_all(archive)
        return _distinct(keras_archives.read_archive(arrays, config, counts_all))


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
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and isinstance(p, str)),
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
