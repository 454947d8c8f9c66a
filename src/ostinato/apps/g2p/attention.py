"""The attention model: an encoder of letters, and a decoder that writes phonemes.

A bidirectional LSTM reads the word; its outputs, projected, are the memory. The decoder
has two layers. The lower one reads the previous phoneme and the previous context, and
attends to the memory again; it runs step by step. The upper one reads the output of the
lower one and the context, and runs on the fused operator. Both start from the encoder's
final states. Label 0 is the edge: it marks the start and the end of a pronunciation.

The encoder is also trained with a CTC loss, which makes it learn faster. A beam search
ranks its candidates by the decoder's score, by their probability under CTC, and by
their probability under a joint n-gram model of letters and phonemes.

References:
    Attention: Bahdanau et al. (2014), arXiv:1409.0473. Order of the steps: Luong et al.
    (2015), arXiv:1508.04025. For pronunciations: Toshniwal & Livescu (2016),
    arXiv:1610.06540. Smoothed labels: Szegedy et al. (2015), arXiv:1512.00567. With
    CTC: Watanabe et al. (2017), doi:10.1109/JSTSP.2017.2763455.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import ostinato as ost
from ostinato import cells

from ..ensemble import mean_probability, with_axis
from . import ctc, model
from .batches import Batch, word_batches
from .beam import EDGE, beam_search
from .data import ALPHABET
from .joint import Aligned
from .model import normal
from .ranking import Candidate, Labels

WIDTH = 6
CTC_SHARE = 0.5  # of the loss
UNSPELLABLE = 1e4  # a CTC loss above this means that no path spells the labels
SMOOTHING = 0.1  # share of the target that is spread evenly over all labels
LETTERS_PER_PHONEME = 0.8  # where letters and phonemes need equally little padding


class Params(NamedTuple):
    """The learned arrays of the attention model."""

    letters: jax.Array  # [letters + 1, E]
    encoder: jax.Array  # the LSTM's flat vector
    w_memory: jax.Array  # [2 H, H]
    phonemes: jax.Array  # [labels, E]
    decoder: tuple[cells.AttentionParams, ost.LayerWeights]
    w_out: jax.Array  # [H, labels]
    b_out: jax.Array  # [labels]
    w_ctc: jax.Array  # [2 H, frames * labels]
    b_ctc: jax.Array  # [frames * labels]


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    """The configuration of the attention model; label 0 is the edge."""

    frames: int = 2  # of CTC, per letter

    name = "attention"

    @property
    def attention(self) -> cells.Attention:
        """The decoder's lower layer."""
        size = self.hidden_size
        cell = cells.LSTM(self.embedding_size + size, size)
        return cells.Attention(cell, "regular", memory_size=size)

    @property
    def writer(self) -> cells.LSTM:
        """The decoder's upper layer."""
        return cells.LSTM(2 * self.hidden_size, self.hidden_size)

    def size(self, word: str, target: Sequence[int]) -> int:
        """Return the decoder's steps, or the letters as steps if they are more."""
        return max(len(target) + 1, math.ceil(LETTERS_PER_PHONEME * len(word)))

    def init_one(self, key: jax.Array) -> Params:
        """Draw the initial parameters of one member, float32."""
        keys = iter(jax.random.split(key, 8))
        size, embedding = self.hidden_size, self.embedding_size
        frames = self.frames * self.num_labels
        return Params(
            letters=normal(next(keys), len(ALPHABET) + 1, embedding, scale=0.3),
            encoder=ost.init_weights(next(keys), self.spec),
            w_memory=normal(next(keys), 2 * size, size),
            phonemes=normal(next(keys), self.num_labels, embedding, scale=0.3),
            decoder=(self.attention.init(next(keys)), self.writer.init(next(keys))),
            w_out=normal(next(keys), size, self.num_labels),
            b_out=jnp.zeros(self.num_labels, jnp.float32),
            w_ctc=normal(next(keys), 2 * size, frames),
            b_ctc=jnp.zeros(frames, jnp.float32),
        )

    def loss(
        self, params: Params, batch: Batch, key: jax.Array | None = None
    ) -> jax.Array:
        """Return the mean over words of the decoder's and the encoder's losses.

        The decoder's loss is the cross entropy with smoothed labels. The encoder's is
        that of CTC, and 0 for a word whose pronunciation no path can spell.
        """
        losses = self._losses(params, *batch, key)
        return model.mean_of_words(losses, batch.seq_lengths)

    def word_loss(
        self,
        params: Params,
        letters: jax.Array,
        phonemes: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the loss of one word."""
        n, m = jnp.array([letters.shape[0]]), jnp.array([phonemes.shape[0]])
        return self._losses(params, letters[None], n, phonemes[None], m, key)[0]

    def _losses(
        self,
        params: Params,
        letters: ArrayLike,
        seq_lengths: ArrayLike,
        phonemes: ArrayLike,
        phoneme_lengths: ArrayLike,
        key: jax.Array | None,
    ) -> jax.Array:
        """Return the loss of each word, ``[B]``; 0 for words of length 0."""
        k_encoder, k_decoder = _split(key, 2)
        encoded = encode(params, self, letters, seq_lengths, k_encoder)
        log_probs = decode(params, self, encoded, phonemes, k_decoder)
        targets = jnp.pad(jnp.asarray(phonemes), ((0, 0), (0, 1)))
        picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        wanted = (1 - SMOOTHING) * picked + SMOOTHING * jnp.mean(log_probs, axis=-1)
        real = encoded.lengths > 0
        steps = jnp.where(real, jnp.asarray(phoneme_lengths) + 1, 0)
        counts = jnp.arange(targets.shape[1]) < steps[:, None]
        written = -jnp.sum(jnp.where(counts, wanted, 0), axis=-1)
        spelled = ctc.label_losses(
            encoded.frames,
            encoded.lengths * self.frames,
            phonemes,
            phoneme_lengths,
        )
        spelled = jnp.where(real & (spelled < UNSPELLABLE), spelled, 0)
        return (1 - CTC_SHARE) * written + CTC_SHARE * spelled

    def reader(
        self, aligned: Aligned | None = None, bounds: Sequence[int] = ()
    ) -> "Reader":
        """Return a reader of words for this model."""
        return Reader(self, aligned, bounds)


class Encoded(NamedTuple):
    """The encoder's results for a batch of words."""

    memory: jax.Array  # [B, T, H]
    lengths: jax.Array  # [B]
    states: tuple  # initial (h, c) of each of the decoder's layers
    frames: jax.Array  # [B, T * frames, labels], unnormalised scores for CTC


def encode(
    params: Params,
    config: Config,
    letters: ArrayLike,
    seq_lengths: ArrayLike,
    key: jax.Array | None = None,
) -> Encoded:
    """Run the encoder over a batch of words.

    Args:
        params: of one member, from `Config.init_one`.
        config: static under jax.jit.
        letters: ``[B, T]`` letter ids, 0 past a word's end.
        seq_lengths: ``[B]``, the length of each word; 0 is allowed.
        key: for dropout; None evaluates.
    """
    k_between, k_outputs = _split(key, 2)
    x = params.letters[jnp.asarray(letters)]
    y, (h, c) = ost.rnn(
        config.spec, params.encoder, x, seq_lengths=seq_lengths, key=k_between
    )
    y = _dropout(k_outputs, y, config.dropout)
    frames = y @ params.w_ctc + params.b_ctc
    return Encoded(
        memory=y @ params.w_memory,
        lengths=jnp.asarray(seq_lengths),
        states=((h[-1], c[-1]), (h[-2], c[-2])),  # of the last layer's directions
        frames=frames.reshape(len(x), -1, config.num_labels),
    )


def decode(
    params: Params,
    config: Config,
    encoded: Encoded,
    phonemes: ArrayLike,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the log probabilities of the next label after every correct prefix.

    Args:
        params: of one member, from `Config.init_one`.
        config: static under jax.jit.
        encoded: from `encode`.
        phonemes: ``[B, U]``, the correct labels.
        key: for dropout; None evaluates.

    Returns:
        ``[B, U + 1, labels]``.
    """
    y = params.phonemes[jnp.pad(jnp.asarray(phonemes), ((0, 0), (1, 0)))]
    decoder, states = _decoder(config, encoded)
    layers = zip(_split(key, 2), decoder.cells, params.decoder, states, strict=True)
    for layer_key, cell, weights, state in layers:
        y = ost.recurrent_net(cell, y, state, params=weights).outputs
        y = _dropout(layer_key, y, config.dropout)
    return jax.nn.log_softmax(y @ params.w_out + params.b_out)


def _decoder(config: Config, encoded: Encoded) -> tuple[cells.Stack, tuple]:
    """Return the decoder's cell for a batch of words, and its initial states."""
    lower = config.attention.attend(encoded.memory, encoded.lengths)
    first, upper = encoded.states
    attending = lower.initial_state(len(encoded.memory))._replace(cell=first)
    return cells.Stack((lower, config.writer)), (attending, upper)


def _split(key: jax.Array | None, count: int) -> list:
    return [None] * count if key is None else list(jax.random.split(key, count))


def _dropout(key: jax.Array | None, x: jax.Array, rate: float) -> jax.Array:
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


@partial(jax.jit, static_argnames=("config", "width"))
def _search(
    params: Params,
    config: Config,
    letters: ArrayLike,
    seq_lengths: ArrayLike,
    width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the results of `beam_search`, and their CTC log probabilities.

    The latter are ``[B, width]``.
    """
    params = with_axis(params, config.members)

    @jax.vmap
    def encoded_by(one: Params) -> Encoded:
        encoded = encode(one, config, letters, seq_lengths)
        return jax.tree.map(lambda a: jnp.repeat(a, width, axis=0), encoded)

    @jax.vmap
    def prepared_by(one: Params, encoded: Encoded) -> Any:
        return _decoder(config, encoded)[0].prepare(one.decoder)

    # Rows of hypotheses come first in states, members second.
    @partial(jax.vmap, in_axes=(0, 0, 0, 1, None, None), out_axes=(1, 0))
    def step_of(
        one: Params, encoded: Encoded, ready: Any, states: tuple, labels: Any, t: Any
    ) -> tuple:
        decoder, _ = _decoder(config, encoded)
        x = decoder.precompute(ready, one.phonemes[labels])
        states, y = decoder.step(ready, states, x, t)
        return states, jax.nn.log_softmax(y @ one.w_out + one.b_out)

    encoded = encoded_by(params)
    ready = prepared_by(params, encoded)

    def step(states: tuple, labels: jax.Array, t: jax.Array) -> tuple:
        states, log_probs = step_of(params, encoded, ready, states, labels, t)
        return states, mean_probability(log_probs)

    active = jnp.asarray(seq_lengths) > 0
    states = jax.vmap(lambda one: _decoder(config, one)[1], out_axes=1)(encoded)
    longest = _most_phonemes(jnp.shape(letters)[1])
    most = _most_phonemes(jnp.asarray(seq_lengths))
    labels, scores = beam_search(
        step, states, active=active, width=width, most=most, longest=longest
    )
    lengths = jnp.sum(labels != EDGE, axis=-1).reshape(-1)

    @jax.vmap
    def losses_of(encoded: Encoded) -> jax.Array:
        num_frames = encoded.lengths * config.frames
        flat = labels.reshape(-1, longest)
        return ctc.label_losses(encoded.frames, num_frames, flat, lengths)

    spelled = mean_probability(-losses_of(encoded))
    return labels, scores, spelled.reshape(scores.shape)


def _most_phonemes(letters: Any) -> Any:
    """Return the most phonemes that a word of so many letters may have."""
    return 2 * letters + 8


def alignment(
    params: Params, config: Config, letters: Sequence[int], labels: Sequence[int]
) -> np.ndarray:
    """Return the attention weights of the decoder while it writes one word.

    Args:
        params: from `Config.init`; the weights are the mean over the members.
        config: the model's configuration.
        letters: T letter ids.
        labels: U labels of phonemes.

    Returns:
        ``[U + 1, T]``, a row for each phoneme and one for the end; each row sums to 1.
    """

    def weights_of(one: Params) -> jax.Array:
        encoded = encode(one, config, np.array([letters]), np.array([len(letters)]))
        cell = config.attention.attend(encoded.memory, return_weights=True)
        state = cell.initial_state(1)._replace(cell=encoded.states[0])
        x = one.phonemes[np.array([[EDGE, *labels]])]
        out = ost.recurrent_net(cell, x, state, params=one.decoder[0])
        return out.outputs.weights[0]

    members = jax.vmap(weights_of)(with_axis(params, config.members))
    return np.asarray(jnp.mean(members, axis=0))


class Reader(model.Reader):
    """A reader that decodes greedily, or by a beam search with two more opinions."""

    opinions = ("CTC", "n-gram")

    def greedy(self, params: Params, words: Sequence[str]) -> list[Labels]:
        """Return the labels of every word, the most likely one in every step."""
        return [best[0][0] for best in self._read(params, words, width=1)]

    def beam(self, params: Params, words: Sequence[str]) -> list[list[Candidate]]:
        """Return the candidates of a beam search of width `WIDTH` for every word."""
        found = self._read(params, words, width=WIDTH)
        return [
            [Candidate(labels, s, (ctc, joint)) for (labels, s, ctc), joint in of_word]
            for of_word in self.with_ngram(words, found)
        ]

    def _read(
        self, params: Params, words: Sequence[str], width: int
    ) -> list[list[tuple[Labels, float, float]]]:
        """Return labels, decoder score and CTC score of every word's candidates."""
        found: list[list] = [[] for _ in words]
        for places, letters, lengths in word_batches(words, self.bounds):
            out = _search(params, self.config, letters, lengths, width)
            out = jax.device_get(out)
            for row, place in enumerate(places):
                of_word = zip(*(a[row].tolist() for a in out), strict=True)
                found[place] = [
                    (tuple(filter(None, labels)), score, ctc)
                    for labels, score, ctc in of_word
                    if score > -math.inf
                ]
        return found
