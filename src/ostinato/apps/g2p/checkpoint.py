"""The file of a trained model.

`model.safetensors` holds everything that `pronounce` needs: the best parameters, the
training words with their pronunciations, letter by letter (for the n-gram model), and
in the header's metadata the spec, alphabet, phonemes and error rates.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ostinato as ost

from ..fields import check, check_range, make
from ..tensors import MODEL_FILE, TensorFiles, fitting, named
from .alignment import num_codes
from .data import ALPHABET
from .joint import Aligned
from .model import MOST_PARAMS, Config, Params
from .models import config_class

FILES = TensorFiles("ostinato-g2p-4", "train one with: ostinato train g2p", MOST_PARAMS)


class Model(NamedTuple):
    """A trained model; `aligned` are the words it learned from."""

    config: Config
    params: Params
    aligned: Aligned
    rank_weights: tuple[float, ...]
    figures: dict[str, Any]


def save_model(folder: Path, model: Model) -> None:
    """Write `model.safetensors`; if that fails, the old file stays as it was."""
    tensors = {name: np.asarray(leaf) for name, leaf in named(model.params)}
    tensors |= {f"aligned_{name}": a for name, a in model.aligned._asdict().items()}
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
        aligned = Aligned(*(tensors.pop(f"aligned_{n}") for n in Aligned._fields))
        _check_aligned(aligned, num_codes(config.num_labels))
        leaves = fitting(tensors, wanted)
        weights = tuple(header["rank_weights"])
        count = len(config.reader().opinions)
        for weight in weights:
            check("rank_weights", float, weight)
        check_range("rank_weights", f"{count} numbers", weights, len(weights) == count)
        figures = header["figures"]
        check("figures", dict, figures)
    params = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Model(config, params, aligned, weights, figures)


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


def _check_aligned(aligned: Aligned, most: int) -> None:
    """Check the units of the words that were learned, and their probabilities."""
    units, probs = aligned
    fits = units.dtype == np.int32 and units.ndim == 1 and units.size > 0
    kind = f"{units.dtype} {units.shape}"
    check_range("aligned_units", "int32 in one row", kind, fits)
    fits = units[-1] == 0 and 0 <= units.min() and units.max() < most
    wanted = f"numbers from 0 to {most - 1}, the last one 0"
    check_range("aligned_units", wanted, units.tolist(), bool(fits))
    wanted = {"aligned_probs": jax.ShapeDtypeStruct((most,), np.float32)}
    fitting({"aligned_probs": probs}, wanted)
    fits = bool(np.all((probs > 0) & (probs <= 1)))
    check_range("aligned_probs", "above 0, and 1 at most", probs.tolist(), fits)
