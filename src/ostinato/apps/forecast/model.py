"""The forecaster: a GRU that reads segments of the past and writes those of the future.

Lin et al., SegRNN: Segment Recurrent Neural Network for Long-Term Time Series
Forecasting (2023), arXiv:2308.11200: every column is a sequence of its own; the last
value is subtracted; the GRU reads segments of the look-back; one further step for each
segment of the horizon, all at once, starts from its last state.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ostinato as ost

from ..ensemble import MOST_MEMBERS, init_members, with_axis
from ..fields import check_range, check_types

MOST = 2**14  # of every size
MOST_PARAMS = 2**26
Params = dict[str, jax.Array]


class Batch(NamedTuple):
    """Windows, float32; those of weight 0 fill up the last batch of an epoch."""

    x: Any  # [B, look_back, C]
    y: Any  # [B, horizon, C]
    weights: Any  # [B], 0 or 1


@dataclasses.dataclass(frozen=True)
class Forecaster:
    """A model of `columns`; `look_back` and `horizon` are multiples of `segment`.

    Its forecast is the mean of those of its `members`, see `..ensemble`. The last value
    of the `constant` columns, given by their numbers, is repeated.
    """

    columns: int
    look_back: int
    horizon: int
    segment: int
    hidden: int
    dropout: float
    members: int = 1
    constant: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("columns", "look_back", "horizon", "segment", "hidden"):
            got = getattr(self, name)
            check_range(name, f"1 to {MOST}", got, 1 <= got <= MOST)
        good = 1 <= self.members <= MOST_MEMBERS
        check_range("members", f"1 to {MOST_MEMBERS}", self.members, good)
        check_range("hidden", "even", self.hidden, self.hidden % 2 == 0)
        good = 0 <= self.dropout < 1
        check_range("dropout", "at least 0 and below 1", self.dropout, good)
        for name in ("look_back", "horizon"):
            got = getattr(self, name)
            wanted = f"a multiple of segment = {self.segment}"
            check_range(name, wanted, got, got % self.segment == 0)
        count = self.spec.num_params + self.hidden * (2 * self.segment + self.columns)
        good = all(0 <= i < self.columns for i in self.constant)
        wanted = f"numbers of columns, from 0 to {self.columns - 1}"
        check_range("constant", wanted, self.constant, good)
        good = count * self.members < MOST_PARAMS
        check_range("hidden", "smaller for this model", self.hidden, good)

    @property
    def spec(self) -> ost.RNNSpec:
        """The GRU that reads and writes."""
        return ost.RNNSpec("gru", self.hidden, self.hidden)

    def init(self, key: jax.Array) -> Params:
        """Draw the parameters of all members."""
        return init_members(self._init_one, self.members, key)

    def _init_one(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 5)
        size, half = self.hidden, self.hidden // 2

        def matrix(key: jax.Array, rows: int, columns: int) -> jax.Array:
            return jax.random.normal(key, (rows, columns)) * rows**-0.5

        return {
            "read": matrix(keys[0], self.segment, size),
            "read_bias": jnp.zeros(size),
            "gru": ost.init_weights(keys[1], self.spec),
            "place": jax.random.normal(keys[2], (self.horizon // self.segment, half)),
            "column": jax.random.normal(keys[3], (self.columns, half)),
            "write": matrix(keys[4], size, self.segment),
            "write_bias": jnp.zeros(self.segment),
        }

    def forecast(self, params: Params, x: jax.Array) -> jax.Array:
        """Forecast standardised values.

        Args:
            params: the parameters of all members.
            x: the look-back, `[B, look_back, columns]`.

        Returns:
            The horizon, `[B, horizon, columns]`.
        """
        every = with_axis(params, self.members)
        return jnp.mean(jax.vmap(self.forecast_of_one, (0, None))(every, x), axis=0)

    def forecast_of_one(
        self, params: Params, x: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Return the forecast of one member.

        Args:
            params: its parameters.
            x: the look-back, `[B, look_back, columns]`.
            key: draws dropout; None means none.

        Returns:
            The horizon, `[B, horizon, columns]`.
        """
        batch, columns, size = x.shape[0], self.columns, self.hidden
        last = x[:, -1:]
        x = jnp.swapaxes(x - last, 1, 2).reshape(batch * columns, -1, self.segment)
        read = jax.nn.relu(x @ params["read"] + params["read_bias"])
        _, state = ost.rnn(self.spec, params["gru"], read)
        state = state.reshape(batch, columns, 1, size)
        y = _gru_step(self.spec, params["gru"], self._wanted(params), state)
        if key is not None and self.dropout:
            y = _dropped(key, self.dropout, y)
        y = y @ params["write"] + params["write_bias"]
        y = jnp.swapaxes(y.reshape(batch, columns, self.horizon), 1, 2)
        if self.constant:
            y = y.at[:, :, np.array(self.constant)].set(0)
        return y + last

    def _wanted(self, params: Params) -> jax.Array:
        """Return what asks for each segment: its place and column, `[C, P, hidden]`."""
        place, column = params["place"], params["column"][:, None]
        shape = self.columns, self.horizon // self.segment, self.hidden // 2
        parts = [jnp.broadcast_to(part, shape) for part in (place, column)]
        return jnp.concatenate(parts, axis=-1)

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """Return the weighted mean absolute error of one member on a batch."""
        error = jnp.abs(self.forecast_of_one(params, batch.x, key) - batch.y)
        of_windows = jnp.mean(error, axis=(1, 2))
        return jnp.sum(of_windows * batch.weights) / jnp.sum(batch.weights)

    @partial(jax.jit, static_argnums=0)
    def errors(
        self, params: Params, x: jax.Array, y: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Return the weighted sums of squared and of absolute errors, `[2]`."""
        error = (self.forecast(params, x) - y) * weights[:, None, None]
        return jnp.stack([jnp.sum(error**2), jnp.sum(jnp.abs(error))])


def _gru_step(
    spec: ost.RNNSpec, weights: jax.Array, x: jax.Array, h: jax.Array
) -> jax.Array:
    """Run one step of a GRU on inputs and states that are broadcast to each other.

    Their products are computed once, however many states meet an input, or inputs a
    state; `rnn_step` would repeat both.
    """
    layer = ost.unpack_weights(weights, spec)[0]
    of_x = jnp.split(x @ layer.w_ih.T + layer.b_ih, 3, axis=-1)
    of_h = jnp.split(h @ layer.w_hh.T + layer.b_hh, 3, axis=-1)
    reset, update = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in range(2))
    new = jnp.tanh(of_x[2] + reset * of_h[2])
    return new + update * (h - new)


def _dropped(key: jax.Array, rate: float, y: jax.Array) -> jax.Array:
    """Set elements to 0 at a rate in 256ths: a random byte decides about each."""
    dropped = min(round(256 * rate), 255)
    kept = jax.random.bits(key, y.shape, jnp.uint8) >= dropped
    return jnp.where(kept, y * (256 / (256 - dropped)), 0)
