"""Networks in safetensors files: one tensor for each matrix, specs in the header.

    ostinato.save("model.safetensors", {"encoder": (spec, weights)})
    spec, weights = ostinato.load("model.safetensors")["encoder"]

The tensors of a network are `encoder/l0.w_ih`, `encoder/l0_reverse.w_hh` and so on,
with the gates in this package's order. Any reader of safetensors finds them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import _checks
from ._files import check_path, read_json, reading, write_atomically
from ._modules import needs
from ._rnn.cell import LayerWeights
from ._rnn.layout import (
    as_flat,
    check_weights,
    pack_weights,
    param_shapes,
    unpack_weights,
)
from ._rnn.prepared import PreparedWeights
from ._rnn.spec import RNNSpec, check_spec
from ._typing import Array, Float

_KEY = "ostinato"  # of the header's entry with the specs
_FORMAT = 1
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16",
    "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_FIELDS = {field.name for field in dataclasses.fields(RNNSpec)}


class Saved(NamedTuple):
    """A network of a file.

    Attributes:
        spec: the network.
        weights: its flat vector, `[spec.num_params]`.
    """

    spec: RNNSpec
    weights: Float[Array, " num_params"]


def save(
    path: str | os.PathLike[str],
    networks: Mapping[str, tuple[RNNSpec, Any] | tuple[RNNSpec, Any, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write networks to a safetensors file.

    The file appears whole or not at all: it is written beside its place, and renamed.

    Args:
        path: of the file.
        networks: for each name its spec and its flat weights, `[spec.num_params]`, or
            prepared ones. What an importer of `ostinato.interop` returned will do.
        metadata: more text for the header; the name `"ostinato"` is taken.

    Raises:
        TypeError: `path` is no path, a name or metadata are no text, a spec is none, or
            weights are no array of floats, or traced, as under `jax.jit`.
        ValueError: weights are not those of their spec, a text has characters that
            UTF-8 lacks, or `metadata` has `"ostinato"`.
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    safetensors = _safetensors()
    check_path("path", path)
    if not isinstance(networks, Mapping):
        raise TypeError(
            "`networks` must map names to (spec, weights), got "
            f"{_checks.describe(networks)}; for one, pass {{'name': (spec, weights)}}"
        )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(
            f"`metadata` must be text by name, got {_checks.describe(metadata)}"
        )
    header = dict(metadata or {})
    for key, text in header.items():
        _checks.check_text("a name in `metadata`", key)
        _checks.check_text(f"`metadata[{key!r}]`", text)
    if _KEY in header:
        raise ValueError(f"`metadata` must not have {_KEY!r}, which holds the specs")
    specs, tensors = {}, {}
    for name, network in networks.items():
        _checks.check_text("a name in `networks`", name)
        if not isinstance(network, (tuple, list)) or len(network) < 2:
            raise TypeError(
                f"`networks[{name!r}]` must be (spec, weights), got "
                f"{_checks.describe(network)}"
            )
        spec, weights, *_ = network
        check_spec(spec, f"networks[{name!r}][0]")
        weights = flat_weights(f"networks[{name!r}][1]", weights, spec)
        specs[name] = dataclasses.asdict(spec)
        named = _named(name, spec, unpack_weights(weights, spec))
        tensors |= {key: np.ascontiguousarray(value) for key, value in named.items()}
    header[_KEY] = json.dumps({"format": _FORMAT, "networks": specs})
    write_atomically(path, safetensors.numpy.save(tensors, header))


def load(path: str | os.PathLike[str]) -> dict[str, Saved]:
    """Read the networks that `save` wrote.

    Args:
        path: of the file.

    Returns:
        The networks by name, in the dtype that was written. float64 needs
        `jax_enable_x64`, as everywhere in JAX. The `metadata` of `save` are those of
        the file: `safetensors.safe_open(path, "numpy").metadata()`.

    Raises:
        TypeError: `path` is no path.
        ValueError: the file is damaged, or not one that `save` wrote.
        ImportError: safetensors is not installed.
        OSError: the file cannot be opened.
    """
    tensors, header = read_tensors(path)
    with reading(path, "a safetensors file that ostinato.save wrote"):
        if _KEY not in header:
            raise ValueError("its header has no specs")
        written = read_json(header[_KEY])
        if written.get("format") != _FORMAT:
            raise ValueError(f"it has the unknown format {written.get('format')!r}")
        return {
            name: _read(name, fields, tensors)
            for name, fields in written["networks"].items()
        }


def read_tensors(
    path: str | os.PathLike[str],
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors and the header's text of any safetensors file.

    Tensors of other dtypes than numpy and JAX have are vectors of their bytes.

    Raises:
        ValueError: the file is damaged.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    with reading(path, "a safetensors file"):
        data = Path(path).read_bytes()
        tensors = {}
        for name, found in safetensors.deserialize(data):
            known = found["dtype"] in _DTYPES
            dtype = _dtype(found["dtype"]) if known else np.dtype("uint8")
            tensor = np.frombuffer(found["data"], dtype)
            tensors[name] = tensor.reshape(found["shape"]) if known else tensor
        size = int.from_bytes(data[:8], "little")
        header = read_json(data[8 : 8 + size]).get("__metadata__") or {}
    return tensors, header


def flat_weights(
    name: str, weights: Any, spec: RNNSpec, traced: bool = False
) -> Float[Array, " num_params"]:
    """Return weights that are to be written elsewhere as the flat vector of their spec.

    Args:
        name: of the weights in errors.
        weights: the vector, or what `ostinato.prepare` made of it.
        spec: the network.
        traced: whether weights without values will do, as they are under `jax.jit`.

    Raises:
        TypeError: the weights are no array of floats, or traced.
        ValueError: they are not those of the spec.
    """
    if isinstance(weights, PreparedWeights):
        weights = weights.weights
    weights = as_flat(weights, name)
    _checks.check_floating(name, weights, _checks.FLOATS)
    check_weights(weights, spec, name)
    if not traced and not _checks.is_concrete(weights):
        raise TypeError(
            f"`{name}` must not be traced, as weights are under jit and vmap"
        )
    return weights


def saved_by_ostinato(header: Mapping[str, str]) -> bool:
    """Return whether a file with this header is one that `save` wrote."""
    return _KEY in header


def _safetensors() -> Any:
    with needs("store"):
        import safetensors.numpy
    return safetensors


def _dtype(name: str) -> np.dtype:
    return np.dtype(jnp.dtype(_DTYPES[name]))


def _keys(name: str, spec: RNNSpec) -> list[str]:
    """Return what stands before the fields of each pseudo-layer."""
    return [
        f"{name}/l{layer}{'_reverse' if reverse else ''}"
        for layer in range(spec.num_layers)
        for reverse in range(spec.num_directions)
    ]


def _named(name: str, spec: RNNSpec, layers: list[LayerWeights]) -> dict[str, Array]:
    return {
        f"{key}.{field}": value
        for key, layer in zip(_keys(name, spec), layers, strict=True)
        for field, value in layer._asdict().items()
        if value is not None
    }


def _read(name: str, fields: Any, tensors: Mapping[str, np.ndarray]) -> Saved:
    """Return one network, after a check that the tensors are there for its sizes."""
    if unknown := set(fields) - _FIELDS:
        raise ValueError(f"{name!r} has unknown fields: {', '.join(sorted(unknown))}")
    spec = RNNSpec(**fields)
    if spec.num_layers * spec.num_directions > len(tensors):
        raise ValueError(f"{name!r} has more layers than the file has tensors")
    layers = []
    for key, shapes in zip(_keys(name, spec), param_shapes(spec), strict=True):
        found = {field: tensors.get(f"{key}.{field}") for field in shapes._fields}
        for field, shape in shapes._asdict().items():
            got = found[field]
            if (None if got is None else got.shape) != shape:
                raise ValueError(
                    f"{f'{key}.{field}'!r} must have the shape {shape}, got "
                    f"{None if got is None else got.shape}"
                )
            if got is not None and got.dtype not in map(jnp.dtype, _checks.FLOATS):
                raise ValueError(f"{f'{key}.{field}'!r} holds {got.dtype.name}")
        layers.append(LayerWeights(**found))
    return Saved(spec, pack_weights(layers, spec))
