"""The file of a trained model, and pieces drawn from it."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ostinato as ost

from ..fields import check, check_range, make
from ..tensors import MODEL_FILE, TensorFiles, fitting, named
from .model import MOST_PARAMS, Composer, Params, chain
from .rolls import MOST_FRAMES, NOTES
from .settings import MOST_PER_BEAT

FILES = TensorFiles(
    "ostinato-music-2",
    "train one with: ostinato train music FILE...",
    MOST_PARAMS,
)


class Trained(NamedTuple):
    """A trained model; `per_beat` frames are a quarter note, `figures` its run's."""

    model: Composer
    params: Params
    per_beat: int
    figures: dict[str, Any]


def save(folder: Path, trained: Trained) -> None:
    """Write `model.safetensors`; if that fails, the old file stays as it was."""
    tensors = {name: np.asarray(leaf) for name, leaf in named(trained.params)}
    header = {
        "model": dataclasses.asdict(trained.model),
        "per_beat": trained.per_beat,
        "figures": trained.figures,
    }
    FILES.save(folder / MODEL_FILE, tensors, header)


def load(folder: Path) -> Trained:
    """Read `model.safetensors`.

    Raises:
        UserError: the file is missing, damaged, or of another program.
    """
    path = folder / MODEL_FILE
    tensors, header = FILES.read(path)
    with FILES.damage(path):
        check("model", dict, header["model"])
        model = make(Composer, header["model"])
        check("per_beat", int, per_beat := header["per_beat"])
        good = 1 <= per_beat <= MOST_PER_BEAT
        check_range("per_beat", f"1 to {MOST_PER_BEAT}", per_beat, good)
        check("figures", dict, header["figures"])
        template = jax.eval_shape(model.init, jax.random.key(0))
        leaves = fitting(tensors, dict(named(template)))
    params = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Trained(model, params, per_beat, header["figures"])


def sample(
    model: Composer,
    params: Params,
    frames: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    prime: np.ndarray | None = None,
) -> np.ndarray:
    """Draw a piece frame by frame.

    Args:
        model: the model.
        params: its parameters.
        frames: how many to draw.
        seed: of the random numbers, which decides the piece.
        temperature: divides the logits; below 1, likely notes become likelier.
        prime: a piece to go on with, `[P, 88]`; None begins with silence.

    Returns:
        The prime and the frames after it, uint8 `[P + frames, 88]`.

    Raises:
        UserError: a value is out of range.
    """
    check("temperature", float, temperature)
    check_range("temperature", "above 0", temperature, temperature > 0)
    check_range("seed", "at least 0", seed, seed >= 0)
    start = np.zeros((0, NOTES), np.uint8) if prime is None else prime
    most = MOST_FRAMES - len(start)
    good = 1 <= frames <= most
    check_range("frames", f"1 to {most}", frames, good)
    rng = np.random.default_rng(seed)
    session = ost.stream(model.spec, params["rnn"], 1)
    draw = _Drawing(model, params, temperature)
    piece = np.zeros((len(start) + frames, NOTES), np.uint8)
    piece[: len(start)] = start
    y = session.step(np.zeros((1, NOTES), np.float32))
    for t, frame in enumerate(piece):
        if t >= len(start):
            frame[:] = draw(y[0], rng)
        y = session.step(frame[None].astype(np.float32))
    return piece


class _Drawing:
    """Draws frames, key by key from the lowest."""

    def __init__(self, model: Composer, params: Params, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        self._params = {name: np.asarray(leaf) for name, leaf in params.items()}
        self._chain = None
        if model.chords == "chained":
            self._chain = [np.asarray(weights) for weights in chain(params)]

    def __call__(self, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a frame, `[88]`, from the output `[H]` of the network before it."""
        logits, units = self._model.given_state(self._params, y)
        logits, chances = np.array(logits, np.float64), rng.random(NOTES)
        if self._chain is None:
            return chances < self._probability(logits)
        read, write, direct = self._chain
        frame, units = np.zeros(NOTES, bool), np.array(units, np.float64)
        for key in range(NOTES):
            logit = logits[key] + np.maximum(units, 0) @ write[:, key]
            frame[key] = chances[key] < self._probability(logit)
            if frame[key]:
                units += read[key]
                logits += direct[key]
        return frame

    def _probability(self, logits: Any) -> Any:
        with np.errstate(over="ignore"):  # the probability of infinity is right
            return 0.5 + 0.5 * np.tanh(logits / (2 * self._temperature))


def start_of(piece: np.ndarray, frames: int | None) -> np.ndarray:
    """Return the first frames of a piece; None means all.

    Raises:
        UserError: it has fewer.
    """
    if frames is None:
        return piece
    wanted = f"1 to {len(piece)}, the frames of the piece"
    check_range("prime_frames", wanted, frames, 1 <= frames <= len(piece))
    return piece[:frames]
