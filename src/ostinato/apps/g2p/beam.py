"""Beam search over what a decoder writes, many words at once, under jax.jit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EDGE = 0  # the label before the first and after the last


class _Beams(NamedTuple):
    """What is kept of `rows` words, the best first: W beginnings of each."""

    t: jax.Array  # labels so far
    states: Any  # of the decoder, leaves [rows * W, ...]
    labels: jax.Array  # [rows, W, longest], EDGE where nothing is written yet
    last: jax.Array  # [rows, W]
    scores: jax.Array  # [rows, W], log probabilities; -inf where there is no beginning
    done: jax.Array  # [rows, W], whether the edge has been written


def beam_search(
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]],
    states: Any,
    *,
    active: jax.Array,
    width: int,
    longest: int,
) -> tuple[jax.Array, jax.Array]:
    """Find the most likely label sequences of every row.

    In every step each beginning is continued with every label, and the `width` most
    likely results are kept, those that have ended among them. With `width` 1 this is
    greedy; with enough of it, exact. It stops when all that is kept has ended.

    Args:
        step: ``step(states, labels, t) -> (states, log_probs)`` continues
            ``rows * width`` beginnings: of their last labels, ``[N]``, it makes the
            log probabilities of the next, ``[N, L]``. Label 0 is the edge.
        states: before the first step, leaves ``[rows * width, ...]``.
        active: bool ``[rows]``, False for rows without a word; they find nothing.
        width: beginnings kept of each.
        longest: labels of a sequence at most, the edge not counted; then it must end.

    Returns:
        Labels ``[rows, width, longest]``, 0 past the end, and log probabilities
        ``[rows, width]``, the edge's included, best first; -inf where there are fewer
        sequences than `width`.
    """
    rows = len(active)

    def shaped(a: jax.Array) -> jax.Array:
        return a.reshape(rows, width, *a.shape[1:])

    def keep(a: jax.Array, parents: jax.Array) -> jax.Array:
        return jax.vmap(lambda of_row, places: of_row[places])(a, parents)

    def going_on(beams: _Beams) -> jax.Array:
        open_ = ~beams.done & (beams.scores > -jnp.inf)
        return (beams.t <= longest) & jnp.any(open_)

    def advance(beams: _Beams) -> _Beams:
        states, log_probs = step(beams.states, beams.last.reshape(-1), beams.t)
        log_probs = shaped(log_probs)
        count = log_probs.shape[-1]
        is_edge = jnp.arange(count) == EDGE
        ended = jnp.where(is_edge, 0.0, -jnp.inf)
        must_end = jnp.where(is_edge | (beams.t < longest), log_probs, -jnp.inf)
        more = jnp.where(beams.done[..., None], ended, must_end)
        every = (beams.scores[..., None] + more).reshape(rows, width * count)
        scores, places = lax.top_k(every, width)
        parents, last = places // count, places % count
        states = jax.tree.map(
            lambda a: keep(shaped(a), parents).reshape(a.shape), states
        )
        labels = keep(beams.labels, parents).at[:, :, beams.t].set(last, mode="drop")
        done = keep(beams.done, parents) | (last == EDGE)
        return _Beams(beams.t + 1, states, labels, last, scores, done)

    one = active[:, None] & (jnp.arange(width) == 0)
    start = _Beams(
        t=jnp.int32(0),
        states=states,
        labels=jnp.zeros((rows, width, longest), jnp.int32),
        last=jnp.full((rows, width), EDGE, jnp.int32),
        scores=jnp.where(one, 0.0, -jnp.inf).astype(jnp.float32),
        done=jnp.zeros((rows, width), bool),
    )
    beams = lax.while_loop(going_on, advance, start)
    return beams.labels, beams.scores
