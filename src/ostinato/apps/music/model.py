"""The model: a recurrent network over frames that says which keys sound next.

It follows Boulanger-Lewandowski et al., Modeling Temporal Dependencies in
High-Dimensional Sequences (2012), arXiv:1206.6392: `p(frame_t | frames before)` is a
product of probabilities, one for each key. They are either independent of each other,
or each depends on the lower keys of the frame through a masked network (Germain et al.,
MADE (2015), arXiv:1502.03509).
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ostinato as ost

from ..fields import check_range, check_types
from .rolls import NOTES

MODES = "gru", "lstm"
CHORDS = "independent", "chained"
MOST, MOST_LAYERS = 2**12, 8
MOST_PARAMS = 2**26
CHAIN_UNITS = 2 * (NOTES - 1)  # of the masked network
Params = dict[str, Any]


class Batch(NamedTuple):
    """Rolls, float32, padded to the longest; some at the end may have no frames."""

    rolls: Any  # [B, T, 88], 0 or 1
    lengths: Any  # [B], int32


@dataclasses.dataclass(frozen=True)
class Composer:
    """A model of the next frame; `chords` says whether keys depend on lower ones."""

    mode: str
    hidden: int
    layers: int
    chords: str
    dropout: float

    def __post_init__(self) -> None:
        check_types(self)
        check_range("mode", " or ".join(MODES), self.mode, self.mode in MODES)
        check_range("chords", " or ".join(CHORDS), self.chords, self.chords in CHORDS)
        for name, most in (("hidden", MOST), ("layers", MOST_LAYERS)):
            got = getattr(self, name)
            check_range(name, f"1 to {most}", got, 1 <= got <= most)
        good = 0 <= self.dropout < 1
        check_range("dropout", "at least 0 and below 1", self.dropout, good)
        count = self.spec.num_params + self.hidden * (NOTES + CHAIN_UNITS)
        count += NOTES * (NOTES + 2 * CHAIN_UNITS)
        check_range(
            "hidden", "smaller for this model", self.hidden, count < MOST_PARAMS
        )

    @property
    def spec(self) -> ost.RNNSpec:
        """The recurrent network over the frames."""
        return ost.RNNSpec(
            self.mode,  # type: ignore[arg-type]  # checked above
            NOTES,
            self.hidden,
            num_layers=self.layers,
            dropout=self.dropout,
        )

    def init(self, key: jax.Array) -> Params:
        """Draw parameters."""
        keys = jax.random.split(key, 5)

        def matrix(key: jax.Array, rows: int, columns: int) -> jax.Array:
            return jax.random.normal(key, (rows, columns)) * rows**-0.5

        params = {
            "rnn": ost.init_weights(keys[0], self.spec),
            "write": matrix(keys[1], self.hidden, NOTES),
            "write_bias": jnp.full(NOTES, -3.0),  # few keys sound
        }
        if self.chords == "chained":
            params |= {
                "chain_state": matrix(keys[2], self.hidden, CHAIN_UNITS),
                "chain_bias": jnp.zeros(CHAIN_UNITS),
                "chain_read": matrix(keys[3], NOTES, CHAIN_UNITS),
                "chain_write": matrix(keys[4], CHAIN_UNITS, NOTES),
                "chain_direct": jnp.zeros((NOTES, NOTES)),
            }
        return params

    def logits(
        self, params: Params, batch: Batch, key: jax.Array | None = None
    ) -> jax.Array:
        """Return the logit of each key in each frame, given all that comes before it.

        Args:
            params: the parameters.
            batch: the rolls; the frame before the first is silent.
            key: draws dropout; None means none.

        Returns:
            `[B, T, 88]`; meaningless in the padding.
        """
        before = jnp.pad(batch.rolls[:, :-1], ((0, 0), (1, 0), (0, 0)))
        key, inner = (None, None) if key is None else jax.random.split(key)
        y = ost.rnn(
            self.spec, params["rnn"], before, seq_lengths=batch.lengths, key=inner
        ).y
        if key is not None and self.dropout:
            kept = jax.random.bernoulli(key, 1 - self.dropout, y.shape)
            y = jnp.where(kept, y / (1 - self.dropout), 0)
        logits, units = self.given_state(params, y)
        if units is not None:
            read, write, direct = chain(params)
            units = jax.nn.relu(units + batch.rolls @ read)
            logits += units @ write + batch.rolls @ direct
        return logits

    def given_state(self, params: Params, y: Any) -> tuple[Any, Any]:
        """Return what the network's output `[..., H]` adds to logits, and to the chain.

        Returns:
            `[..., 88]`, and `[..., CHAIN_UNITS]`, None for independent keys.
        """
        logits = y @ params["write"] + params["write_bias"]
        if self.chords == "independent":
            return logits, None
        return logits, y @ params["chain_state"] + params["chain_bias"]

    def nll(self, params: Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Return the negative logarithm of the probability of each frame, `[B, T]`."""
        logits = self.logits(params, batch, key)
        nll = jnp.sum(jax.nn.softplus(logits) - batch.rolls * logits, axis=-1)
        places = jnp.arange(nll.shape[1])
        return jnp.where(places < batch.lengths[:, None], nll, 0)

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """Return the mean of `nll` over the frames of a batch."""
        return jnp.sum(self.nll(params, batch, key)) / jnp.sum(batch.lengths)

    @partial(jax.jit, static_argnums=0)
    def sums(self, params: Params, batch: Batch) -> jax.Array:
        """Return the sums of `nll` over first frames, and over all others, `[2]`."""
        nll = self.nll(params, batch, None)
        return jnp.stack([jnp.sum(nll[:, 0]), jnp.sum(nll[:, 1:])])


def chain(params: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the weights of the masked network, through which no key sees a higher one.

    Unit `k` reads the keys below its degree and adds to those from it on.

    Returns:
        From keys to units `[88, CHAIN_UNITS]`, from units to keys, from keys to keys.
    """
    keys, degrees = np.arange(NOTES), 1 + np.arange(CHAIN_UNITS) % (NOTES - 1)
    reads = keys[:, None] < degrees
    return (
        jnp.where(reads, params["chain_read"], 0),
        jnp.where(reads.T, 0, params["chain_write"]),
        jnp.where(keys[:, None] < keys, params["chain_direct"], 0),
    )
