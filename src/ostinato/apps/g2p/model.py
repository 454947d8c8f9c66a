"""Letters in, phoneme scores out: a bidirectional LSTM under a CTC loss.

The recurrent part runs once a letter; its last layer then gives `frames` scores a
letter, since a letter may need more than one phoneme ("x" is K S).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import ostinato as ost

from .batches import Batch, letter_ids, pad
from .data import ALPHABET

LENGTH_STEP = 8  # words that no bucket holds are padded to a multiple of this
ROWS = 256  # words that are scored together


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's shape; hashable, so it is a static argument of jax.jit."""

    hidden_size: int
    num_layers: int
    phonemes: tuple[str, ...]
    dropout: float = 0.0
    embedding_size: int = 64
    frames: int = 2

    @property
    def spec(self) -> ost.RNNSpec:
        """The recurrent part."""
        return ost.RNNSpec(
            mode="lstm",
            input_size=self.embedding_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            bidirectional=True,
            dropout=self.dropout,
        )

    @property
    def num_labels(self) -> int:
        """Phonemes and the blank."""
        return len(self.phonemes) + 1

    def spell(self, labels: Sequence[int]) -> tuple[str, ...]:
        """Name the phonemes of labels from 1."""
        return tuple(self.phonemes[label - 1] for label in labels)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every field of `Params`."""
        features, scores = 2 * self.hidden_size, self.frames * self.num_labels
        return {
            "embedding": (len(ALPHABET) + 1, self.embedding_size),
            "weights": (self.spec.num_params,),
            "w_out": (features, scores),
            "b_out": (scores,),
        }


class Params(NamedTuple):
    """What is learned."""

    embedding: jax.Array  # [letters + 1, E]
    weights: jax.Array  # the LSTM's flat vector
    w_out: jax.Array  # [2 H, frames * labels]
    b_out: jax.Array  # [frames * labels]


def init_params(key: jax.Array, config: Config) -> Params:
    """Draw the parameters before training, float32."""
    k_embedding, k_weights, k_out = jax.random.split(key, 3)
    shapes = config.shapes
    scale = shapes["w_out"][0] ** -0.5
    return Params(
        jax.random.normal(k_embedding, shapes["embedding"], jnp.float32) * 0.3,
        ost.init_weights(k_weights, config.spec),
        jax.random.normal(k_out, shapes["w_out"], jnp.float32) * scale,
        jnp.zeros(shapes["b_out"], jnp.float32),
    )


def scores(
    params: Params,
    config: Config,
    letters: ArrayLike,
    seq_lengths: ArrayLike,
    key: jax.Array | None = None,
) -> jax.Array:
    """Score every frame of every word.

    Args:
        params: from `init_params`.
        config: static under jax.jit.
        letters: ``[B, T]`` letter numbers, 0 past a word's end.
        seq_lengths: ``[B]`` letters of each word; 0 is allowed.
        key: for dropout; None evaluates.

    Returns:
        Unnormalised scores ``[B, T * frames, labels]``; label 0 is the blank.
    """
    x = params.embedding[jnp.asarray(letters)]
    y = ost.rnn(config.spec, params.weights, x, seq_lengths=seq_lengths, key=key).y
    out = y @ params.w_out + params.b_out
    return out.reshape(len(x), -1, config.num_labels)


def loss(
    params: Params, batch: Batch, key: jax.Array | None = None, *, config: Config
) -> jax.Array:
    """Mean CTC loss over the words of a batch, rows of length 0 left out."""
    out = scores(params, config, batch.letters, batch.seq_lengths, key)
    losses = optax.ctc_loss(
        out,
        _padding(out.shape[1], batch.seq_lengths * config.frames),
        batch.phonemes,
        _padding(batch.phonemes.shape[1], batch.phoneme_lengths),
    )
    real = batch.seq_lengths > 0
    return jnp.sum(jnp.where(real, losses, 0)) / jnp.maximum(jnp.sum(real), 1)


def _padding(size: int, lengths: ArrayLike) -> jax.Array:
    """1.0 past each row's end, as optax wants it."""
    return (jnp.arange(size) >= jnp.asarray(lengths)[:, None]).astype(jnp.float32)


@partial(jax.jit, static_argnums=1)
def _log_probs(
    params: Params, config: Config, letters: ArrayLike, seq_lengths: ArrayLike
) -> jax.Array:
    return jax.nn.log_softmax(scores(params, config, letters, seq_lengths))


class Scorer:
    """Log probabilities for words of any length, in few compiled shapes."""

    def __init__(self, config: Config, bounds: Sequence[int] = ()) -> None:
        self.config, self.bounds = config, tuple(bounds)

    def __call__(self, params: Params, words: Sequence[str]) -> list[np.ndarray]:
        """Return ``[frames * letters, labels]`` for every word, in their order."""
        found: list[np.ndarray] = [np.empty(0)] * len(words)
        buckets: dict[int, list[int]] = {}
        for i, word in enumerate(words):
            buckets.setdefault(self._padded_length(word), []).append(i)
        for length, places in sorted(buckets.items()):
            for start in range(0, len(places), ROWS):
                rows = places[start : start + ROWS]
                ids = letter_ids([words[i] for i in rows])
                count = ROWS if len(words) > ROWS else len(rows)
                letters, lengths = pad(ids, length, count)
                out = np.asarray(_log_probs(params, self.config, letters, lengths))
                for row, place in enumerate(rows):
                    found[place] = out[row, : lengths[row] * self.config.frames]
        return found

    def _padded_length(self, word: str) -> int:
        fitting = [bound for bound in self.bounds if len(word) <= bound]
        return min(fitting, default=-(-len(word) // LENGTH_STEP) * LENGTH_STEP)
