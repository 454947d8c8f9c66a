"""The interface of a model, and the code that the two models share.

A `Config` is a frozen dataclass that makes parameters, losses and a `Reader`; `ctc.py`
and `attention.py` define one each, `models.py` lists them by name.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import ostinato as ost
from ostinato import ragged

from ..ensemble import MOST_MEMBERS, init_members
from ..fields import check_range, check_types
from .batches import Batch, RaggedBatch
from .joint import Aligned, JointNGram
from .ranking import Candidate, Labels

Params = Any  # a NamedTuple of arrays, possibly nested

MOST_HIDDEN, MOST_LAYERS, MOST_FRAMES = 2**13, 64, 16
MOST_PHONEMES = 255  # their numbers are stored as bytes
MOST_PARAMS = 2**28  # a gibibyte of float32; training needs about eight times as much


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model; hashable, so that it can be a static argument of jax.jit.

    Raises:
        UserError: a field is of the wrong type or out of range.
    """

    hidden_size: int
    num_layers: int
    phonemes: tuple[str, ...]
    dropout: float = 0.0
    embedding_size: int = 64
    members: int = 1

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_types(self)
        most = dict(
            hidden_size=MOST_HIDDEN,
            num_layers=MOST_LAYERS,
            embedding_size=MOST_HIDDEN,
            frames=MOST_FRAMES,
            members=MOST_MEMBERS,
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
        params = self.members * ost.num_params(self.spec)
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
        """The number of phonemes, plus 1 for label 0: the blank of CTC, or the edge."""
        return len(self.phonemes) + 1

    def spell(self, labels: Sequence[int]) -> tuple[str, ...]:
        """Return the phonemes of labels, each at least 1."""
        return tuple(self.phonemes[label - 1] for label in labels)

    def size(self, word: str, target: Sequence[int]) -> int | None:
        """Return the size to group a pair by, or None if it cannot be learned."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> Params:
        """Draw the initial parameters of all members, float32."""
        return init_members(self.init_one, self.members, key)

    def init_one(self, key: jax.Array) -> Params:
        """Draw the initial parameters of one member, float32."""
        raise NotImplementedError

    def loss(
        self, params: Params, batch: Batch, key: jax.Array | None = None
    ) -> jax.Array:
        """Return the mean loss over the words of a batch; length 0 is left out.

        Args:
            params: from `init_one`.
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
        """Return the loss of one word, without a batch axis and without padding.

        Args:
            params: from `init_one`.
            letters: letter ids ``[n]``, n >= 1.
            phonemes: labels ``[m]``, m >= 1.
            key: for dropout; None evaluates.
        """
        raise NotImplementedError

    def ragged_loss(
        self, params: Params, batch: RaggedBatch, key: jax.Array | None = None
    ) -> jax.Array:
        """Return the same mean as `loss`, by `ragged.vmap` of `word_loss`.

        Every word draws its own dropout masks. It is meant for jax.jit, where the loss
        of a word of length 0 is NaN, which is left out of the mean.
        """
        letters = batch.letters
        keys: Any = None if key is None else jax.random.split(key, len(letters))
        if isinstance(letters, ragged.ShardedRagged) and keys is not None:
            of = letters.order, letters.mesh, letters.mesh_axis
            keys = ragged.ShardedBatch(keys[letters.order], *of)
        each = ragged.vmap(self.word_loss, in_axes=(None, 0, 0, 0))
        losses = each(params, *batch, keys)
        if isinstance(losses, ragged.ShardedBatch):
            losses = losses.data
        return mean_of_words(losses, letters.lengths)

    def reader(
        self, aligned: Aligned | None = None, bounds: Sequence[int] = ()
    ) -> "Reader":
        """Return a reader of words for this model.

        Args:
            aligned: the training words and their pronunciations; None can only read
                greedily.
            bounds: word lengths to pad to, each of which is compiled.
        """
        raise NotImplementedError


class Reader:
    """The decoder from words to labels, for parameters of one model.

    Args:
        config: the model's configuration.
        aligned: the training words and their pronunciations, for the n-gram model;
            None can only read greedily.
        bounds: word lengths to pad to, each of which is compiled.
    """

    opinions: ClassVar[tuple[str, ...]]  # names of the models that rank candidates too

    def __init__(
        self,
        config: Any,
        aligned: Aligned | None = None,
        bounds: Sequence[int] = (),
    ) -> None:
        self.config, self._aligned = config, aligned
        self.bounds = tuple(bounds)

    @cached_property
    def ngram(self) -> JointNGram:
        """An n-gram model of the training words and their pronunciations."""
        assert self._aligned is not None
        return JointNGram(self._aligned, self.config.num_labels)

    def with_ngram(
        self, words: Sequence[str], found: Sequence[Sequence[Any]]
    ) -> list[list[tuple[Any, float]]]:
        """Return what a search found for each word, with log probabilities by n-grams.

        Args:
            words: the words.
            found: for each of them tuples that start with labels.
        """
        of = [w for w, of_word in zip(words, found, strict=True) for _ in of_word]
        labels = [one[0] for of_word in found for one in of_word]
        log_probs = iter(self.ngram.log_prob(of, labels).tolist())
        return [[(one, next(log_probs)) for one in of_word] for of_word in found]

    def greedy(self, params: Params, words: Sequence[str]) -> list[Labels]:
        """Return the labels of every word by greedy decoding."""
        raise NotImplementedError

    def beam(self, params: Params, words: Sequence[str]) -> list[list[Candidate]]:
        """Return the most likely candidates for every word by beam search."""
        raise NotImplementedError


def normal(key: jax.Array, *shape: int, scale: float = 0.0) -> jax.Array:
    """Draw normal float32 weights, by default with the scale ``shape[0] ** -0.5``."""
    return jax.random.normal(key, shape, jnp.float32) * (scale or shape[0] ** -0.5)


def mean_of_words(losses: jax.Array, seq_lengths: Any) -> jax.Array:
    """Return the mean of losses ``[B]`` over the words that are not of length 0."""
    real = jnp.asarray(seq_lengths) > 0
    return jnp.sum(jnp.where(real, losses, 0)) / jnp.maximum(jnp.sum(real), 1)
