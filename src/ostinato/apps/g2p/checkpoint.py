"""What a run leaves in its folder, written so that a crash loses nothing.

`model.safetensors` is all that `pronounce` needs: the best parameters, the training
pronunciations (one flat array, for the n-gram model), and in the header's metadata the
spec, alphabet, phonemes and figures. `resume.safetensors` is the whole state of a run.
"""

import dataclasses
import json
import struct
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from . import files
from .data import ALPHABET
from .errors import G2PError
from .model import Config, Params
from .models import MODELS
from .training import State, init_state

MODEL_FILE, RESUME_FILE = "model.safetensors", "resume.safetensors"
FORMAT = "ostinato-g2p-2"
FIRST = "train one with: ostinato train g2p"


class Model(NamedTuple):
    """A trained model; `pronunciations` are phoneme numbers, for the n-gram model."""

    config: Config
    params: Params
    pronunciations: Sequence[Sequence[int]]
    rank_weights: tuple[float, ...]
    figures: dict[str, Any]


def save_model(folder: Path, model: Model) -> None:
    """Write `model.safetensors`, or leave the old one untouched."""
    tensors = {name: np.asarray(leaf) for name, leaf in _named(model.params)}
    tensors["pronunciations"] = _flatten(model.pronunciations)
    header = {
        "model": model.config.name,
        "config": dataclasses.asdict(model.config),
        "spec": dataclasses.asdict(model.config.spec),
        "alphabet": ALPHABET,
        "rank_weights": model.rank_weights,
        "figures": model.figures,
    }
    _save(folder / MODEL_FILE, tensors, header)


def load_model(folder: Path) -> Model:
    """Read `model.safetensors`.

    Raises:
        G2PError: there is none, or it is damaged, or another program's.
    """
    path = folder / MODEL_FILE
    tensors, header = read(path)
    try:
        config = _config(header["model"], header["config"])
        template = jax.eval_shape(config.init, jax.random.key(0))
        leaves = [(tensors[name], name, want) for name, want in _named(template)]
        pronunciations = _unflatten(tensors["pronunciations"])
        weights, figures = tuple(header["rank_weights"]), dict(header["figures"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header lacks or garbles {error}") from None
    if header.get("alphabet") != ALPHABET:
        raise _damaged(path, "its alphabet is another one")
    for got, name, want in leaves:
        if got.shape != want.shape or got.dtype != want.dtype:
            raise _damaged(
                path,
                f"`{name}` must be {want.dtype} {want.shape}, got {got.dtype} "
                f"{got.shape}",
            )
    arrays = [jnp.asarray(got) for got, _, _ in leaves]
    params = jax.tree.unflatten(jax.tree.structure(template), arrays)
    return Model(config, params, pronunciations, weights, figures)


def save_state(folder: Path, state: State, header: dict[str, Any]) -> None:
    """Write `resume.safetensors`; `header` is kept as JSON."""
    leaves = jax.tree.leaves(state[1:])
    tensors = {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    _save(folder / RESUME_FILE, tensors, {**header, "step": state.step})


def load_header(folder: Path) -> dict[str, Any]:
    """Read what `save_state` was given as `header`."""
    return read(folder / RESUME_FILE)[1]


def load_state(folder: Path, config: Config) -> State:
    """Read the state of a run whose model is `config`.

    Raises:
        G2PError: there is none, or it is damaged, or another model's.
    """
    path = folder / RESUME_FILE
    tensors, header = read(path)
    template = jax.eval_shape(lambda: init_state(0, config)[1:])
    shapes, tree = jax.tree.flatten(template)
    leaves = [tensors.get(f"{i:03}") for i in range(len(shapes))]
    for leaf, want in zip(leaves, shapes, strict=True):
        if leaf is None or leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise _damaged(path, "its arrays are not those of this model")
    restored = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])
    return State(int(header["step"]), *restored)


def _config(name: str, fields: dict[str, Any]) -> Config:
    return MODELS[name](**{**fields, "phonemes": tuple(fields["phonemes"])})


def _named(params: Params) -> list[tuple[str, Any]]:
    """The arrays with their places in the parameters, such as `decoder.0.v`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return [(name(path), leaf) for path, leaf in leaves]


def _flatten(pronunciations: Sequence[Sequence[int]]) -> np.ndarray:
    """Phoneme numbers with a 0 after every pronunciation."""
    return np.array([p for q in pronunciations for p in (*q, 0)], np.uint8)


def _unflatten(flat: np.ndarray) -> list[list[int]]:
    ends = np.flatnonzero(flat == 0)
    return [part[part > 0].tolist() for part in np.split(flat, ends)[:-1]]


def _save(path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    metadata = {"format": FORMAT, "header": json.dumps(header)}
    files.write(path, save(tensors, {**metadata, "checksum": _checksum(tensors)}))


def _checksum(tensors: dict[str, np.ndarray]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and the header of a file of this program.

    Raises:
        G2PError: there is none, or it is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise G2PError(f"there is no {path}; {FIRST} --out {path.parent}") from None
    except OSError as error:
        raise G2PError(f"cannot read {path}: {error.strerror}") from None
    try:
        tensors = load(content)
        (size,) = struct.unpack("<Q", content[:8])
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        header = json.loads(metadata["header"])
    except (SafetensorError, KeyError, ValueError, struct.error) as error:
        raise _damaged(path, str(error) or "it cannot be read") from None
    if metadata.get("format") != FORMAT or not isinstance(header, dict):
        raise _damaged(path, f"its format is not {FORMAT}")
    if metadata.get("checksum") != _checksum(tensors):
        raise _damaged(path, "its checksum is wrong")
    return tensors, header


def _damaged(path: Path, detail: str) -> G2PError:
    return G2PError(f"{path} is damaged or no file of this program: {detail}; {FIRST}")
