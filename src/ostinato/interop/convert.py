"""Files of one library to files of another: what `ostinato convert` does.

The suffix of a file tells its kind: `.pt`, `.pth`, `.safetensors`, `.keras`, `.h5` and
`.onnx` are read, `.safetensors`, `.onnx` and `.pt` are written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import store
from .._files import check_path, same, write_atomically
from . import keras, onnx, onnx_files, torch
from .imported import Contents, Imported

__all__ = ["SOURCES", "TARGETS", "convert", "read"]

SOURCES = (".pt", ".pth", ".safetensors", ".keras", ".h5", ".onnx")
TARGETS = (".safetensors", ".onnx", ".pt")
_UNNAMED = "rnn"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    name: str | None = None,
) -> Contents:
    """Write the recurrent networks of one file to another one.

    Args:
        source: `.pt`, `.pth`, `.safetensors`, `.keras`, `.h5` or `.onnx`.
        target: another file than `source` and, for `.onnx`, those with its data:
            `.safetensors`, `.onnx`, for which there must be one network, or `.pt`.
            Nothing is written if there is no network.
        name: of the one network to write; None: all.

    Returns:
        `found`, the networks that were written, by name, and `others`, what was not, by
        name with the reason. The file keeps float64; in `found` it is float32 unless
        `jax_enable_x64` is set.

    Raises:
        TypeError: `source` or `target` is no path.
        ValueError: another suffix, a damaged file, a `target` that `source` needs, no
            network called `name`, or several for `.onnx`.
        ImportError: a package is not installed.
        OSError: a file cannot be read or written.
    """
    _check_suffix("source", source, SOURCES)
    _check_suffix("target", target, TARGETS)
    if any(same(file, target) for file in _files(source, target)):
        raise ValueError(
            "`target` must be another file than `source` and its data, got "
            f"{os.fspath(target)!r}, which would be overwritten; what is no recurrent "
            "network would be lost"
        )
    with jax.enable_x64(True):  # so that files with float64 keep it
        found, others = _convert(source, target, name)
    return Contents({name: _held(network) for name, network in found.items()}, others)


def _held(network: Imported) -> Imported:
    """Return a network with weights of a dtype that JAX has where this is called."""
    return network._replace(weights=jnp.asarray(np.asarray(network.weights)))


def _convert(
    source: str | os.PathLike[str], target: str | os.PathLike[str], name: str | None
) -> Contents:
    found, others = read(source)
    if name is not None:
        if name not in found:
            there = ", ".join(map(repr, found)) or "none"
            reason = f": {others[name]}" if name in others else ""
            raise ValueError(
                f"`name` must be that of a network in {os.fspath(source)!r}, "
                f"{there}, got {name!r}{reason}"
            )
        others |= {n: "another name was asked for" for n in found if n != name}
        found = {name: found[name]}
    if found:
        found = _WRITERS[_suffix(target)](target, found, others)
    return Contents(found, others)


def read(path: str | os.PathLike[str]) -> Contents:
    """Return the networks in a file by name, and why the rest of it is none.

    Raises:
        TypeError: `path` is no path.
        ValueError: another suffix, or a damaged file.
        ImportError: a package is not installed.
        OSError: the file cannot be read.
    """
    _check_suffix("path", path, SOURCES)
    return _READERS[_suffix(path)](path)


def _files(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> Iterator[str | os.PathLike[str]]:
    """Yield the files that `source` consists of, where one of them can be `target`."""
    yield source
    if _suffix(source) == ".onnx" and os.path.exists(target):
        yield from onnx_files.data_files(source)


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix.lower()


def _check_suffix(
    name: str, path: str | os.PathLike[str], known: tuple[str, ...]
) -> None:
    check_path(name, path)
    if _suffix(path) not in known:
        raise ValueError(
            f"`{name}` must end in one of {', '.join(known)}, got {os.fspath(path)!r}"
        )


def _from_torch(path: str | os.PathLike[str]) -> Contents:
    return _named(torch.read_file(path))


def _from_safetensors(path: str | os.PathLike[str]) -> Contents:
    tensors, header = store.read_tensors(path)
    if not store.saved_by_ostinato(header):
        return _named(torch.contents(tensors))
    saved = {name: Imported(*network) for name, network in store.load(path).items()}
    return Contents(saved, {})


def _named(contents: Contents) -> Contents:
    """Return networks by the name of their module instead of a prefix with a dot.

    A network without a module is the first free one of `rnn`, `rnn_1` and so on. A dot
    stays where the name without it is that of another network.
    """
    found = {
        prefix if prefix[:-1] in contents.found else prefix.removesuffix("."): network
        for prefix, network in contents.found.items()
    }
    free = (f"{_UNNAMED}_{i}" if i else _UNNAMED for i in itertools.count())
    names = {"": next(name for name in free if name not in found)}
    return contents._replace(
        found={names.get(name, name): network for name, network in found.items()}
    )


def _to_safetensors(
    path: Any, found: dict[str, Imported], others: dict[str, str]
) -> dict[str, Imported]:
    store.save(path, found)
    return found


def _to_onnx(
    path: Any, found: dict[str, Imported], others: dict[str, str]
) -> dict[str, Imported]:
    if len(found) > 1:
        raise ValueError(
            "`name` must say which network to write as .onnx: "
            f"{', '.join(map(repr, found))}"
        )
    written = {}
    for name, (spec, weights, _) in found.items():
        try:
            model = onnx.to_model(spec, weights)
        except ValueError as error:
            others[name] = str(error)
            continue
        write_atomically(path, model.SerializeToString())
        written[name] = found[name]
    return written


def _to_torch(
    path: Any, found: dict[str, Imported], others: dict[str, str]
) -> dict[str, Imported]:
    written, tensors = {}, {}
    for name, (spec, weights, _) in found.items():
        prefix = f"{name}." if len(found) > 1 else ""
        try:
            tensors |= torch.to_state_dict(spec, weights, prefix)
        except ValueError as error:
            others[name] = str(error)
            continue
        network = found[name]
        if spec.mode == "rnn_relu":
            note = "tensors do not tell relu: torch.nn.RNN needs nonlinearity='relu'"
            network = network._replace(notes=(*network.notes, note))
        written[name] = network
    if written:
        write_atomically(path, torch.as_bytes(tensors))
    return written


_READERS = {
    ".pt": _from_torch,
    ".pth": _from_torch,
    ".safetensors": _from_safetensors,
    ".keras": keras.read_file,
    ".h5": keras.read_file,
    ".onnx": onnx.read_file,
}
_WRITERS = {".safetensors": _to_safetensors, ".onnx": _to_onnx, ".pt": _to_torch}
