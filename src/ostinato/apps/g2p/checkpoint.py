"""The files of a run, written so that a crash loses neither the old nor the new ones.

`model.safetensors` holds everything that `pronounce` needs: the best parameters, the
training pronunciations (one flat array, for the n-gram model), and in the header's
metadata the spec, alphabet, phonemes and error rates. `resume.safetensors` holds the
whole state of a run.
"""

import dataclasses
import json
import stat
import struct
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

import ostinato as ost

from .. import files
from ..errors import UserError
from .data import ALPHABET
from .fields import check, check_range, make
from .model import MOST_PARAMS, Config, Params
from .models import config_class
from .training import State, init_state

MODEL_FILE, RESUME_FILE = "model.safetensors", "resume.safetensors"
FORMAT = "ostinato-g2p-2"
FIRST = "train one with: ostinato train g2p"
# One float32 for each parameter, or four of them, and a quarter more for the rest.
MOST_BYTES = {MODEL_FILE: 5 * MOST_PARAMS, RESUME_FILE: 20 * MOST_PARAMS}
MALFORMED = (
    UserError,
    AttributeError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
    struct.error,
)


class Model(NamedTuple):
    """A trained model; `pronunciations` are phoneme labels, for the n-gram model."""

    config: Config
    params: Params
    pronunciations: Sequence[Sequence[int]]
    rank_weights: tuple[float, ...]
    figures: dict[str, Any]


def save_model(folder: Path, model: Model) -> None:
    """Write `model.safetensors`; if that fails, the old file stays as it was."""
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
        UserError: the file is missing, damaged, or was written by another program.
    """
    path = folder / MODEL_FILE
    tensors, header = read(path)
    with damage(path):
        config = _config(header)
        template = jax.eval_shape(config.init, jax.random.key(0))
        wanted = dict(_named(template))
        flat = tensors.pop("pronunciations")
        pronunciations = _unflatten(flat, len(config.phonemes))
        leaves = _fitting(tensors, wanted)
        weights = tuple(header["rank_weights"])
        count = len(config.reader().opinions)
        for weight in weights:
            check("rank_weights", float, weight)
        check_range("rank_weights", f"{count} numbers", weights, len(weights) == count)
        figures = header["figures"]
        check("figures", dict, figures)
    params = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Model(config, params, pronunciations, weights, figures)


def save_state(folder: Path, state: State, header: dict[str, Any]) -> None:
    """Write `resume.safetensors`, with `header` as JSON in its metadata."""
    leaves = jax.tree.leaves(state[1:])
    tensors = {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    _save(folder / RESUME_FILE, tensors, {**header, "step": state.step})


def load_header(folder: Path) -> dict[str, Any]:
    """Read the `header` that `save_state` was given."""
    return read(folder / RESUME_FILE)[1]


def load_state(folder: Path, config: Config) -> State:
    """Read the state of a run whose model is `config`.

    Raises:
        UserError: the file is missing, damaged, or holds the state of another model.
    """
    path = folder / RESUME_FILE
    tensors, header = read(path)
    template = jax.eval_shape(lambda: init_state(0, config)[1:])
    shapes, tree = jax.tree.flatten(template)
    with damage(path):
        leaves = _fitting(tensors, {f"{i:03}": want for i, want in enumerate(shapes)})
        step = header["step"]
        check("step", int, step)
        check_range("step", "at least 0", step, step >= 0)
    return State(step, *jax.tree.unflatten(tree, leaves))


def _config(header: dict[str, Any]) -> Config:
    """Return the model's configuration; check that the rest of the header agrees."""
    name, fields = header["model"], header["config"]
    check("model", str, name)
    check("config", dict, fields)
    check("phonemes", list, fields["phonemes"])
    config = make(config_class(name), {**fields, "phonemes": tuple(fields["phonemes"])})
    same = header["alphabet"] == ALPHABET
    check_range("alphabet", repr(ALPHABET), header["alphabet"], same)
    check("spec", dict, header["spec"])
    spec = ost.RNNSpec(**header["spec"])
    check_range(
        "spec", f"that of its weights, {config.spec}", spec, spec == config.spec
    )
    return config


def _fitting(tensors: dict[str, np.ndarray], wanted: dict[str, Any]) -> list[jax.Array]:
    """Return the arrays in the order of `wanted`; check their names and shapes."""
    check_range(
        "arrays", ", ".join(wanted), [*tensors], tensors.keys() == wanted.keys()
    )
    for name, want in wanted.items():
        got = tensors[name]
        fits = got.shape == want.shape and got.dtype == want.dtype
        kind = f"{want.dtype} {want.shape}"
        check_range(name, kind, f"{got.dtype} {got.shape}", fits)
        check_range(name, "finite", "NaN or infinity", bool(np.isfinite(got).all()))
    return [jnp.asarray(tensors[name]) for name in wanted]


def _named(params: Params) -> list[tuple[str, Any]]:
    """Return the arrays of the parameters with their paths, such as `decoder.0.v`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return [(name(path), leaf) for path, leaf in leaves]


def _flatten(pronunciations: Sequence[Sequence[int]]) -> np.ndarray:
    """Concatenate the phoneme labels, with a 0 after every pronunciation."""
    return np.array([p for q in pronunciations for p in (*q, 0)], np.uint8)


def _unflatten(flat: np.ndarray, most: int) -> list[list[int]]:
    fits = flat.dtype == np.uint8 and flat.ndim == 1 and flat.size > 0
    kind = f"{flat.dtype} {flat.shape}"
    check_range("pronunciations", "uint8 in one row", kind, fits)
    fits = flat[-1] == 0 and flat.max() <= most
    wanted = f"numbers up to {most}, the last one 0"
    check_range("pronunciations", wanted, flat.tolist(), bool(fits))
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
        UserError: the file is missing or damaged.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"cannot read {path}: it is no file")
        if status.st_size > (most := MOST_BYTES[path.name]):
            size = f"{status.st_size:,} bytes, and at most {most:,} can be right"
            raise UserError(f"cannot read {path}: it is too large, of {size}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no {path}; {FIRST} --out {path.parent}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    with damage(path):
        tensors = load(content)
        (size,) = struct.unpack("<Q", content[:8])
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        got = metadata.get("format")
        check_range("format", FORMAT, got, got == FORMAT)
        same = metadata.get("checksum") == _checksum(tensors)
        check_range("checksum", "that of its arrays", metadata.get("checksum"), same)
        header = json.loads(metadata["header"])
        check("header", dict, header)
    return tensors, header


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn errors caused by the content of a file into one line about the file.

    Raises:
        UserError: in place of any error that malformed content causes.
    """
    try:
        yield
    except KeyError as error:
        detail = f"it lacks {error}"
    except MALFORMED as error:
        detail = str(error)
    else:
        return
    detail = textwrap.shorten(detail, 400) or "it cannot be read"
    raise UserError(f"{path} is damaged or no file of this program: {detail}; {FIRST}")
