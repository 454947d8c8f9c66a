"""Letters in, phoneme scores out: a bidirectional LSTM under a CTC loss.

The recurrent part runs once a letter; its last layer then gives `frames` scores a
letter, since a letter may need more than one phoneme ("x" is K S).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

import ostinato as ost

from . import ctc_search, model
from .batches import Batch, word_batches
from .data import ALPHABET
from .model import Candidate, Labels, normal


class Params(NamedTuple):
    """What is learned."""

    embedding: jax.Array  # [letters + 1, E]
    weights: jax.Array  # the LSTM's flat vector
    w_out: jax.Array  # [2 H, frames * labels]
    b_out: jax.Array  # [frames * labels]


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    """A bidirectional LSTM that scores `frames` labels a letter; 0 is the blank."""

    frames: int = 2

    name = "ctc"

    def size(self, word: str, target: Sequence[int]) -> int | None:
        """Letters; None if CTC cannot spell the target in `frames` scores a letter."""
        repeats = sum(a == b for a, b in pairwise(target))
        fits = len(target) + repeats <= self.frames * len(word)
        return len(word) if fits else None

    def init(self, key: jax.Array) -> Params:
        """Draw the parameters before training, float32."""
        k_embedding, k_weights, k_out = jax.random.split(key, 3)
        scores = self.frames * self.num_labels
        return Params(
            normal(k_embedding, len(ALPHABET) + 1, self.embedding_size, scale=0.3),
            ost.init_weights(k_weights, self.spec),
            normal(k_out, 2 * self.hidden_size, scores),
            jnp.zeros(scores, jnp.float32),
        )

    def loss(
        self, params: Params, batch: Batch, key: jax.Array | None = None
    ) -> jax.Array:
        """Mean CTC loss over the words of a batch, rows of length 0 left out."""
        out = scores(params, self, batch.letters, batch.seq_lengths, key)
        losses = label_losses(
            out, batch.seq_lengths * self.frames, batch.phonemes, batch.phoneme_lengths
        )
        return model.mean_of_words(losses, batch.seq_lengths)

    def word_loss(
        self,
        params: Params,
        letters: jax.Array,
        phonemes: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """CTC loss of one word."""
        x = params.embedding[letters]
        y = ost.rnn(self.spec, params.weights, x, key=key).y
        out = (y @ params.w_out + params.b_out).reshape(-1, self.num_labels)
        frames, labels = out[None], phonemes[None]  # optax wants a batch
        padding = jnp.zeros(frames.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(frames, padding[0], labels, padding[1])[0]

    def reader(
        self, pronunciations: Sequence[Sequence[int]] = (), bounds: Sequence[int] = ()
    ) -> "Reader":
        """What reads words with this model."""
        return Reader(self, pronunciations, bounds)


def scores(
    params: Params,
    config: Config,
    letters: ArrayLike,
    seq_lengths: ArrayLike,
    key: jax.Array | None = None,
) -> jax.Array:
    """Score every frame of every word.

    Args:
        params: from `Config.init`.
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


def label_losses(
    scores: jax.Array,
    num_frames: ArrayLike,
    labels: ArrayLike,
    label_lengths: ArrayLike,
) -> jax.Array:
    """Minus the log probability of labels, summed over all paths that spell them.

    Args:
        scores: ``[B, F, L]``, unnormalised.
        num_frames: ``[B]``.
        labels: ``[B, U]``, from 1.
        label_lengths: ``[B]``.

    Returns:
        ``[B]``; some 1e5 where no path spells the labels.
    """
    return optax.ctc_loss(
        scores,
        _padding(scores.shape[1], num_frames),
        jnp.asarray(labels),
        _padding(jnp.shape(labels)[1], label_lengths),
    )


def _padding(size: int, lengths: ArrayLike) -> jax.Array:
    """1.0 past each row's end, as optax wants it."""
    return (jnp.arange(size) >= jnp.asarray(lengths)[:, None]).astype(jnp.float32)


@partial(jax.jit, static_argnums=1)
def _log_probs(
    params: Params, config: Config, letters: ArrayLike, seq_lengths: ArrayLike
) -> jax.Array:
    return jax.nn.log_softmax(scores(params, config, letters, seq_lengths))


class Reader(model.Reader):
    """Reads the best path, or searches for sums over paths and asks an n-gram model."""

    opinions = ("n-gram",)

    def log_probs(self, params: Params, words: Sequence[str]) -> list[np.ndarray]:
        """Return ``[frames * letters, labels]`` for every word, in their order."""
        found: list[np.ndarray] = [np.empty(0)] * len(words)
        for places, letters, lengths in word_batches(words, self.bounds):
            out = np.asarray(_log_probs(params, self.config, letters, lengths))
            for row, place in enumerate(places):
                found[place] = out[row, : lengths[row] * self.config.frames]
        return found

    def greedy(self, params: Params, words: Sequence[str]) -> list[Labels]:
        """Take the best path of every word."""
        return [ctc_search.greedy(word) for word in self.log_probs(params, words)]

    def beam(self, params: Params, words: Sequence[str]) -> list[list[Candidate]]:
        """Search for the labels whose paths are most likely together."""
        found = [ctc_search.beam(word) for word in self.log_probs(params, words)]
        labels = [labels for candidates in found for labels, _ in candidates]
        ngram = iter(self.ngram.log_prob(labels).tolist())
        return [
            [Candidate(labels, score, (next(ngram),)) for labels, score in candidates]
            for candidates in found
        ]
