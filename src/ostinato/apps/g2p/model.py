"""What the two models have in common, and what the rest asks of either.

A `Config` is a frozen dataclass that makes parameters, a loss and a `Reader`; `ctc.py`
and `attention.py` hold one each, `models.py` names them.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import ostinato as ost
from ostinato import ragged

from .batches import Batch, RaggedBatch
from .fields import check_range, check_types
from .ngram import NGram

Params = Any  # a NamedTuple of arrays, perhaps of further NamedTuples
Labels = tuple[int, ...]

MOST_HIDDEN, MOST_LAYERS, MOST_FRAMES = 2**13, 64, 16
MOST_PHONEMES = 255  # their numbers are stored as bytes
MOST_PARAMS = 2**28  # a gibibyte of float32; training needs some eight


class Candidate(NamedTuple):
    """Labels that a search found, and log probabilities of them."""

    labels: Labels
    score: float  # the search's
    opinions: tuple[float, ...]  # of others, as many as `Reader.opinions`


@dataclasses.dataclass(frozen=True)
class Config:
    """A model's shape; hashable, so it is a static argument of jax.jit.

    Raises:
        G2PError: a field is of another type or out of range.
    """

    hidden_size: int
    num_layers: int
    phonemes: tuple[str, ...]
    dropout: float = 0.0
    embedding_size: int = 64

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_types(self)
        most = dict(
            hidden_size=MOST_HIDDEN,
            num_layers=MOST_LAYERS,
            embedding_size=MOST_HIDDEN,
            frames=MOST_FRAMES,
        )
        for name in (field.name for field in dataclasses.fields(self)):
            if name in most:
                got, wanted = getattr(self, name), f"from 1 to {most[name]}"
                check_range(name, wanted, got, 1 <= got <= most[name])
        good = 0 <= self.dropout < 1
        check_range("dropout", "at least 0 and below 1", self.dropout, good)
        names = self.phonemes
        good = 1 <= len(names) == len(set(names)) <= MOST_PHONEMES
        good = good and all(
            name.isprintable() and [name] == name.split() for name in names
        )
        wanted = f"from 1 to {MOST_PHONEMES} different names without spaces"
        check_range("phonemes", wanted, names, good)
        params = ost.num_params(self.spec)
        check_range(
            "parameters", f"at most {MOST_PARAMS}", params, params <= MOST_PARAMS
        )

    @property
    def spec(self) -> ost.RNNSpec:
        """The network that reads the letters."""
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
        """Phonemes, from 1, and label 0: CTC's blank, or the edge of the word."""
        return len(self.phonemes) + 1

    def spell(self, labels: Sequence[int]) -> tuple[str, ...]:
        """Name the phonemes of labels from 1."""
        return tuple(self.phonemes[label - 1] for label in labels)

    def size(self, word: str, target: Sequence[int]) -> int | None:
        """By what a pair shares batches with others; None if it cannot be learned."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> Params:
        """Draw the parameters before training, float32."""
        raise NotImplementedError

    def loss(
        self, params: Params, batch: Batch, key: jax.Array | None = None
    ) -> jax.Array:
        """Mean over the words of a batch, rows of length 0 left out.

        Args:
            params: from `init`.
            batch: padded words and pronunciations.
            key: for dropout; None evaluates.
        """
        raise NotImplementedError

    def word_loss(
        self,
        params: Params,
        letters: jax.Array,
        phonemes: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The loss of one word, which knows of no others and of no padding.

        Args:
            params: from `init`.
            letters: letter numbers ``[n]``, n >= 1.
            phonemes: labels ``[m]``, m >= 1.
            key: for dropout; None evaluates.
        """
        raise NotImplementedError

    def ragged_loss(
        self, params: Params, batch: RaggedBatch, key: jax.Array | None = None
    ) -> jax.Array:
        """What `loss` returns, by `word_loss`; for jax.jit.

        Every word draws its own dropout masks. A row of length 0 is no word: under
        jax.jit its loss is NaN, which is left out.
        """
        keys = None if key is None else jax.random.split(key, len(batch.letters))
        losses = ragged.vmap(partial(self.word_loss, params))(*batch, keys)
        return mean_of_words(losses, batch.letters.lengths)

    def reader(
        self, pronunciations: Sequence[Sequence[int]] = (), bounds: Sequence[int] = ()
    ) -> "Reader":
        """What reads words with this model.

        Args:
            pronunciations: labels of the training words.
            bounds: word lengths to pad to, each of them compiled once.
        """
        raise NotImplementedError


class Reader:
    """Turns words into labels, with a model's parameters.

    Args:
        config: the model's.
        pronunciations: labels of the training words; an n-gram model of them is one of
            the opinions.
        bounds: word lengths to pad to, each of them compiled once.
    """

    opinions: ClassVar[tuple[str, ...]]  # whose they are

    def __init__(
        self,
        config: Any,
        pronunciations: Sequence[Sequence[int]] = (),
        bounds: Sequence[int] = (),
    ) -> None:
        self.config, self.pronunciations = config, pronunciations
        self.bounds = tuple(bounds)

    @cached_property
    def ngram(self) -> NGram:
        """How likely phoneme sequences are, whatever the letters."""
        return NGram(self.pronunciations, self.config.num_labels)

    def greedy(self, params: Params, words: Sequence[str]) -> list[Labels]:
        """Take what is most likely step by step."""
        raise NotImplementedError

    def beam(self, params: Params, words: Sequence[str]) -> list[list[Candidate]]:
        """Search for the most likely labels of every word."""
        raise NotImplementedError


def rank(
    found: Sequence[Sequence[Candidate]], weights: Sequence[float]
) -> list[Labels]:
    """Choose one of the candidates of every word.

    Args:
        found: what `Reader.beam` returned for each word.
        weights: how much each of the opinions counts beside the score.
    """

    def total(candidate: Candidate) -> float:
        opinions = zip(weights, candidate.opinions, strict=True)
        return candidate.score + sum(w * opinion for w, opinion in opinions)

    return [max(candidates, key=total).labels for candidates in found]


def normal(key: jax.Array, *shape: int, scale: float = 0.0) -> jax.Array:
    """Draw float32 weights; `scale` is the first size ** -0.5 unless given."""
    return jax.random.normal(key, shape, jnp.float32) * (scale or shape[0] ** -0.5)


def mean_of_words(losses: jax.Array, seq_lengths: Any) -> jax.Array:
    """The mean of ``[B]`` losses over the rows that are words: not of length 0."""
    real = jnp.asarray(seq_lengths) > 0
    return jnp.sum(jnp.where(real, losses, 0)) / jnp.maximum(jnp.sum(real), 1)
