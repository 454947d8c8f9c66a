"""The CTC model: a bidirectional LSTM that scores phonemes, trained with a CTC loss.

The LSTM runs one step per letter; the output layer then gives `frames` distributions
for each letter, since one letter may stand for several phonemes ("x" is K S).
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

from ..ensemble import mean_probability, with_axis
from . import ctc_search, model
from .batches import Batch, word_batches
from .data import ALPHABET
from .joint import Aligned
from .model import normal
from .ranking import Candidate, Labels


class Params(NamedTuple):
    """The learned arrays of the CTC model."""

    embedding: jax.Array  # [letters + 1, E]
    weights: jax.Array  # the LSTM's flat vector
    w_out: jax.Array  # [2 H, frames * labels]
    b_out: jax.Array  # [frames * labels]


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    """The configuration of the CTC model; label 0 is the blank."""

    frames: int = 2  # per letter

    name = "ctc"

    def size(self, word: str, target: Sequence[int]) -> int | None:
        """Return the number of letters, or None if they are too few for `target`."""
        repeats = sum(a == b for a, b in pairwise(target))
        fits = len(target) + repeats <= self.frames * len(word)
        return len(word) if fits else None

    def init_one(self, key: jax.Array) -> Params:
        """Draw the initial parameters of one member, float32."""
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
        """Return the mean CTC loss over the words of a batch; length 0 is left out."""
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
        """Return the CTC loss of one word."""
        x = params.embedding[letters]
        y = ost.rnn(self.spec, params.weights, x, key=key).y
        out = (y @ params.w_out + params.b_out).reshape(-1, self.num_labels)
        frames, labels = out[None], phonemes[None]  # optax wants a batch
        padding = jnp.zeros(frames.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(frames, padding[0], labels, padding[1])[0]

    def reader(
        self, aligned: Aligned | None = None, bounds: Sequence[int] = ()
    ) -> "Reader":
        """Return a reader of words for this model."""
        return Reader(self, aligned, bounds)


def scores(
    params: Params,
    config: Config,
    letters: ArrayLike,
    seq_lengths: ArrayLike,
    key: jax.Array | None = None,
) -> jax.Array:
    """Score every frame of every word.

    Args:
        params: of one member, from `Config.init_one`.
        config: static under jax.jit.
        letters: ``[B, T]`` letter ids, 0 past a word's end.
        seq_lengths: ``[B]``, the length of each word; 0 is allowed.
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
    """Return minus the log of the total probability of all paths that spell `labels`.

    Args:
        scores: ``[B, F, L]``, unnormalised.
        num_frames: ``[B]``.
        labels: ``[B, U]``, each at least 1.
        label_lengths: ``[B]``.

    Returns:
        ``[B]``; about 1e5 where no path spells the labels.
    """
    return optax.ctc_loss(
        scores,
        _padding(scores.shape[1], num_frames),
        jnp.asarray(labels),
        _padding(jnp.shape(labels)[1], label_lengths),
    )


def _padding(size: int, lengths: ArrayLike) -> jax.Array:
    """Return a mask ``[B, size]``, 1.0 past each sequence's end, as optax wants it."""
    return (jnp.arange(size) >= jnp.asarray(lengths)[:, None]).astype(jnp.float32)


@partial(jax.jit, static_argnums=1)
def _log_probs(
    params: Params, config: Config, letters: ArrayLike, seq_lengths: ArrayLike
) -> jax.Array:
    def of_one(one: Params) -> jax.Array:
        return jax.nn.log_softmax(scores(one, config, letters, seq_lengths))

    return mean_probability(jax.vmap(of_one)(with_axis(params, config.members)))


class Reader(model.Reader):
    """A reader that takes the best path, or searches over sums of paths."""

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
        """Return the labels of the best path of every word."""
        return [ctc_search.greedy(word) for word in self.log_probs(params, words)]

    def beam(self, params: Params, words: Sequence[str]) -> list[list[Candidate]]:
        """Return the labels whose paths have the largest total probability."""
        found = [ctc_search.beam(word) for word in self.log_probs(params, words)]
        return [
            [Candidate(labels, score, (joint,)) for (labels, score), joint in of_word]
            for of_word in self.with_ngram(words, found)
        ]
