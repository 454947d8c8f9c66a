"""Beam search for a step-by-step decoder, many words at once, under jax.jit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EDGE = 0  # the label that marks the start and the end of a sequence


class _Beams(NamedTuple):
    """The hypotheses kept for every word: W of each, best first."""

    t: jax.Array  # labels written so far
    states: Any  # of the decoder, leaves [words * W, ...]
    labels: jax.Array  # [words, W, longest], EDGE where nothing is written yet
    last: jax.Array  # [words, W]
    scores: jax.Array  # [words, W], log probabilities; -inf marks an unused entry
    done: jax.Array  # [words, W], True once the edge has been written


def beam_search(
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]],
    states: Any,
    *,
    active: jax.Array,
    width: int,
    most: jax.Array,
    longest: int,
) -> tuple[jax.Array, jax.Array]:
    """Find the most likely label sequences of every word of a batch.

    In every step each hypothesis is continued with every label, and the `width` most
    likely results are kept, finished hypotheses included. A `width` of 1 makes the
    search greedy, a large enough one makes it exact. It stops when all hypotheses have
    ended.

    Args:
        step: ``step(states, labels, t) -> (states, log_probs)`` continues
            ``N = words * width`` hypotheses: it turns their last labels ``[N]`` into
            the log probabilities of the next ones ``[N, L]``. Label 0 is the edge.
        states: the initial states, leaves ``[words * width, ...]``.
        active: bool ``[words]``, False for entries without a word; they get no results.
        width: hypotheses kept for each word.
        most: ``[words]``, the labels of each word's longest sequence, the edge not
            counted; then it must end.
        longest: the largest that a number in `most` may be.

    Returns:
        Labels ``[words, width, longest]``, 0 past the end, and log probabilities
        ``[words, width]``, including that of the edge, best first; -inf where there are
        fewer sequences than `width`.
    """
    words = len(active)

    def shaped(a: jax.Array) -> jax.Array:
        return a.reshape(words, width, *a.shape[1:])

    def keep(a: jax.Array, parents: jax.Array) -> jax.Array:
        return jax.vmap(lambda of_word, places: of_word[places])(a, parents)

    def going_on(beams: _Beams) -> jax.Array:
        open_ = ~beams.done & (beams.scores > -jnp.inf)
        return (beams.t <= longest) & jnp.any(open_)

    def advance(beams: _Beams) -> _Beams:
        states, log_probs = step(beams.states, beams.last.reshape(-1), beams.t)
        log_probs = shaped(log_probs)
        count = log_probs.shape[-1]
        is_edge = jnp.arange(count) == EDGE
        ended = jnp.where(is_edge, 0.0, -jnp.inf)
        may_go_on = (beams.t < most)[:, None, None]
        must_end = jnp.where(is_edge | may_go_on, log_probs, -jnp.inf)
        more = jnp.where(beams.done[..., None], ended, must_end)
        every = (beams.scores[..., None] + more).reshape(words, width * count)
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
        labels=jnp.zeros((words, width, longest), jnp.int32),
        last=jnp.full((words, width), EDGE, jnp.int32),
        scores=jnp.where(one, 0.0, -jnp.inf).astype(jnp.float32),
        done=jnp.zeros((words, width), bool),
    )
    beams = lax.while_loop(going_on, advance, start)
    return beams.labels, beams.scores
