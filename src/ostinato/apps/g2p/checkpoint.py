"""The file of a trained model.

`model.safetensors` holds everything that `pronounce` needs: the best parameters, the
training pronunciations (one flat array, for the n-gram model), and in the header's
metadata the spec, alphabet, phonemes and error rates.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ostinato as ost

from ..fields import check, check_range, make
from ..tensors import MODEL_FILE, TensorFiles, fitting, named
from .data import ALPHABET
from .model import MOST_PARAMS, Config, Params
from .models import config_class

FILES = TensorFiles("ostinato-g2p-2", "train one with: ostinato train g2p", MOST_PARAMS)


class Model(NamedTuple):
    """A trained model; `pronunciations` are phoneme labels, for the n-gram model."""

    config: Config
    params: Params
    pronunciations: Sequence[Sequence[int]]
    rank_weights: tuple[float, ...]
    figures: dict[str, Any]


def save_model(folder: Path, model: Model) -> None:
    """Write `model.safetensors`; if that fails, the old file stays as it was."""
    tensors = {name: np.asarray(leaf) for name, leaf in named(model.params)}
    tensors["pronunciations"] = _flatten(model.pronunciations)
    header = {
        "model": model.config.name,
        "config": dataclasses.asdict(model.config),
        "spec": dataclasses.asdict(model.config.spec),
        "alphabet": ALPHABET,
        "rank_weights": model.rank_weights,
        "figures": model.figures,
    }
    FILES.save(folder / MODEL_FILE, tensors, header)


def load_model(folder: Path) -> Model:
    """Read `model.safetensors`.

    Raises:
        UserError: the file is missing, damaged, or was written by another program.
    """
    path = folder / MODEL_FILE
    tensors, header = FILES.read(path)
    with FILES.damage(path):
        config = _config(header)
        template = jax.eval_shape(config.init, jax.random.key(0))
        wanted = dict(named(template))
        flat = tensors.pop("pronunciations")
        pronunciations = _unflatten(flat, len(config.phonemes))
        leaves = fitting(tensors, wanted)
        weights = tuple(header["rank_weights"])
        count = len(config.reader().opinions)
        for weight in weights:
            check("rank_weights", float, weight)
        check_range("rank_weights", f"{count} numbers", weights, len(weights) == count)
        figures = header["figures"]
        check("figures", dict, figures)
    params = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Model(config, params, pronunciations, weights, figures)


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
