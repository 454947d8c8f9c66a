"""Returns and advantages of reinforcement learning, as linear recurrences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _checks
from .._padding import is_last_step, select, zero
from .._rnn.accumulation import accumulation_dtype
from .._typing import Array, ArrayLike, Bool, Float, Int
from . import advantages
from .api import linear_recurrence


class GAEOutput(NamedTuple):
    """The result of `gae`.

    Attributes:
        advantages: in the shape of `rewards`; 0 past the end of a sequence.
        returns: `advantages + values`, the targets of the values.
    """

    advantages: Array
    returns: Array


def discounted_returns(
    rewards: Float[Array, "*B T"],
    discounts: Float[ArrayLike, "*B T"],
    bootstrap: Float[Array, "*B"] | None = None,
    *,
    seq_lengths: Int[ArrayLike, "*B"] | None = None,
    time_major: bool = False,
) -> Float[Array, "*B T"]:
    """Return the discounted sums of rewards, `G_t = r_t + d_t G_{t+1}`.

    Args:
        rewards: `[B, T]`, `[T, B]` if `time_major`, or `[T]` for one sequence.
        discounts: a number, or an array in the shape of `rewards`, which is 0 at a step
            that ends an episode.
        bootstrap: `[B]`, what follows the last step; None means 0.
        seq_lengths: integers `[B]`; a scalar for one sequence. Values in the padding,
            NaN included, reach nothing. None means that every sequence has T steps.
        time_major: whether time is the first axis.

    Returns:
        In the shape and dtype of `rewards`; 0 past the end of a sequence. bfloat16 and
        float16 are computed in float32.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape.

    Holds under the same transformations as `linear_recurrence`.

    References:
        Sutton and Barto, Reinforcement Learning (2018), section 3.3. It is rlax's
        `discounted_returns` with its last `v_t` as `bootstrap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> ost.discounted_returns(jnp.array([1.0, 1.0, 1.0]), 0.5).tolist()
        [1.75, 1.5, 1.0]
    """
    batch = _Batch(rewards, seq_lengths, time_major)
    factors = batch.each("discounts", discounts)
    start = None if bootstrap is None else batch.vector("bootstrap", bootstrap)
    return batch.run(factors, batch.rewards, start)


def lambda_returns(
    rewards: Float[Array, "*B T"],
    discounts: Float[ArrayLike, "*B T"],
    next_values: Float[Array, "*B T"],
    lambda_: Float[ArrayLike, "*B T"] = 1.0,
    *,
    seq_lengths: Int[ArrayLike, "*B"] | None = None,
    time_major: bool = False,
) -> Float[Array, "*B T"]:
    """Return lambda-returns, `G_t = r_t + d_t ((1 - l_t) v_t + l_t G_{t+1})`.

    After the last step of a sequence, `G` is its last `v`.

    Args:
        rewards: `[B, T]`, `[T, B]` if `time_major`, or `[T]` for one sequence.
        discounts: a number, or an array in the shape of `rewards`, which is 0 at a step
            that ends an episode.
        next_values: `v_t`, the values of the states after each step, in the shape of
            `rewards`.
        lambda_: a number, or an array in the shape of `rewards`.
        seq_lengths: as for `discounted_returns`.
        time_major: whether time is the first axis.

    Returns:
        In the shape and dtype of `rewards`; 0 past the end of a sequence. bfloat16 and
        float16 are computed in float32.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape.

    Holds under the same transformations as `linear_recurrence`.

    References:
        Sutton (1988), doi:10.1007/BF00115009; rlax's `lambda_returns`.
    """
    batch = _Batch(rewards, seq_lengths, time_major)
    factors = batch.each("discounts", discounts)
    weights = batch.each("lambda_", lambda_)
    values = batch.array("next_values", next_values)
    factors, weights, values = map(batch.inside, (factors, weights, values))
    inputs = batch.rewards + factors * (1 - weights) * values
    start = batch.last(values)
    return batch.run(factors * weights, inputs, start)


def gae(
    rewards: Float[Array, "*B T"],
    values: Float[Array, "*B T"],
    bootstrap: Float[Array, "*B"],
    *,
    discounts: Float[ArrayLike, "*B T"],
    lambda_: Float[ArrayLike, "*B T"],
    terminations: Bool[Array, "*B T"] | None = None,
    truncations: Bool[Array, "*B T"] | None = None,
    seq_lengths: Int[ArrayLike, "*B"] | None = None,
    time_major: bool = False,
) -> GAEOutput:
    """Return generalised advantage estimates, and the returns that belong to them.

        delta_t = r_t + d_t v_{t+1} - v_t
        A_t = delta_t + d_t l_t A_{t+1}

    Args:
        rewards: `[B, T]`, `[T, B]` if `time_major`, or `[T]` for one sequence.
        values: the values of the states before each step, in the shape of `rewards`.
        bootstrap: `[B]`, the value of the state after the last step.
        discounts: a number, or an array in the shape of `rewards`.
        lambda_: a number, or an array in the shape of `rewards`.
        terminations: bool, in the shape of `rewards`: where True, the step ends an
            episode: its discount counts as 0, and nothing passes through from later
            steps, not even a NaN.
        truncations: bool, in the shape of `rewards`: where True, the episode was cut
            off after the step; its advantage is 0, as the value of the state that
            followed is not known, and nothing passes through from later steps.
        seq_lengths: as for `discounted_returns`; `bootstrap` follows the last step of
            each sequence.
        time_major: whether time is the first axis.

    Returns:
        `GAEOutput(advantages, returns)` in the dtype of `rewards`; bfloat16 and float16
        are computed in float32. Gradients pass through all arguments; stop
        them where targets are to be constants.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape.

    Holds under the same transformations as `linear_recurrence`.

    References:
        Schulman et al. (2016), arXiv:1506.02438. The advantages are those of rlax's
        `truncated_generalized_advantage_estimation`; the returns are `vs` of brax's
        `compute_gae`, whose advantages are `r_t + d_t vs_{t+1} - v_t` instead.
    """
    batch = _Batch(rewards, seq_lengths, time_major)
    given = (
        batch.rewards,
        batch.array("values", values),
        batch.vector("bootstrap", bootstrap),
        batch.number("discounts", discounts),
        batch.number("lambda_", lambda_),
    )
    masks = [
        None if mask is None else batch.mask(name, mask)
        for name, mask in (("terminations", terminations), ("truncations", truncations))
    ]
    found = advantages.run(batch.time_major, given, (*masks, batch.lengths))
    return GAEOutput(*map(batch.given, found))


class _Batch:
    """The sequences of a call, with a batch axis, and the checks of its arguments."""

    def __init__(self, rewards: Any, seq_lengths: Any, time_major: Any):
        self.time_major = _checks.check_bool("time_major", time_major)
        rewards = _checks.check_array("rewards", rewards)
        _checks.check_floating("rewards", rewards, _checks.FLOATS)
        if rewards.ndim not in (1, 2):
            order = "[T, B]" if self.time_major else "[B, T]"
            raise ValueError(
                f"`rewards` must have shape {order}, or [T] for one sequence, got "
                f"{_checks.describe(rewards)}"
            )
        self.single = rewards.ndim == 1
        self.axes = "T" if self.single else "TB" if self.time_major else "BT"
        self.shape, self.original = rewards.shape, rewards
        # A discount of 0.99 is not one of bfloat16.
        self.dtype = accumulation_dtype(rewards.dtype)
        self.axis = 0 if self.time_major else 1  # of time, with a batch axis
        self.rewards = self._batched(rewards)
        self.steps = self.rewards.shape[self.axis]
        self.batch = self.rewards.shape[1 - self.axis]
        self.lengths = None
        if seq_lengths is not None:
            lengths = _checks.check_seq_lengths(
                seq_lengths, self.batch, self.steps, self.single
            )
            self.lengths = jnp.reshape(lengths, (self.batch,))

    def _batched(self, x: Array) -> Array:
        x = x if x.dtype == jnp.bool_ else x.astype(self.dtype)
        return jnp.expand_dims(x, 1 - self.axis) if self.single else x

    def array(self, name: str, x: Any) -> Array:
        """Check an array in the shape of the rewards, and add the batch axis."""
        x = _checks.check_array(name, x)
        _checks.check_same_dtype(rewards=self.original, **{name: x})
        return self._batched(self._checked(name, x))

    def _checked(self, name: str, x: Array) -> Array:
        if x.shape != self.shape:
            raise ValueError(
                f"`{name}` must have the shape {self.shape} of `rewards`, got {x.shape}"
            )
        return x

    def each(self, name: str, x: Any) -> Array:
        """Return a number, or an array in the shape of the rewards, for every step."""
        return jnp.broadcast_to(self.number(name, x), self.rewards.shape)

    def number(self, name: str, x: Any) -> Array:
        """Return a number, `[]`, or an array in the shape of the rewards."""
        if isinstance(x, (int, float)):
            return jnp.asarray(_checks.check_real(name, x), self.dtype)
        x = _checks.check_array(name, x)
        if x.ndim:
            return self.array(name, x)
        if not any(jnp.issubdtype(x.dtype, t) for t in (jnp.floating, jnp.integer)):
            raise TypeError(f"`{name}` must be a number, got {_checks.describe(x)}")
        return x.astype(self.dtype)

    def mask(self, name: str, x: Any) -> Array:
        """Check bools in the shape of the rewards, and add the batch axis."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return self._batched(_checks.check_mask(name, x, **sizes))

    def vector(self, name: str, x: Any) -> Array:
        """Check an array `[B]`, or a scalar for one sequence; return `[B]`."""
        x = _checks.check_array(name, x)
        _checks.check_same_dtype(rewards=self.original, **{name: x})
        _checks.check_shape(name, x, **({} if self.single else {"B": self.batch}))
        return jnp.reshape(x, (self.batch,)).astype(self.dtype)

    def inside(self, x: Array) -> Array:
        """Return an array for every step, with 0 past the end of a sequence."""
        return x if self.lengths is None else zero(x, self.lengths, self.axis)

    def last(self, x: Array) -> Array:
        """Return the last valid element of each sequence, 0 where there is none."""
        if self.steps == 0:
            return jnp.zeros((self.batch,), x.dtype)
        lengths = self.lengths
        if lengths is None and isinstance(self.steps, int):
            return jax.lax.index_in_dim(x, self.steps - 1, self.axis, keepdims=False)
        if lengths is None:  # under `jax.export`, of a size that is a symbol
            lengths = jnp.full((self.batch,), self.steps, jnp.int32)
        last = is_last_step(lengths, self.steps, self.axis)
        return jnp.sum(select(last, x), self.axis)

    def run(self, factors: Array, inputs: Array, start: Array | None) -> Array:
        """Run the recurrence from the last step to the first."""
        h, _ = linear_recurrence(
            factors,
            inputs,
            start,
            reverse=True,
            seq_lengths=self.lengths,
            time_major=self.time_major,
        )
        return self.given(h)

    def given(self, x: Array) -> Array:
        """Return an array in the shape and dtype of the rewards as they were given."""
        x = jnp.squeeze(x, 1 - self.axis) if self.single else x
        return x.astype(self.original.dtype)
