"""The choice among the candidates of a search, by more than one opinion."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.optimize

Labels = tuple[int, ...]

FIRST_WEIGHT = 0.5  # of every opinion, until the end of the run fits better ones
LEAST_SCALE = 0.1  # of the score, by which the weights are divided
PULL = 1.0  # towards the first weights, as a loss to add to that of all words


class Candidate(NamedTuple):
    """Labels that a search found, with their log probabilities."""

    labels: Labels
    score: float  # log probability in the search
    opinions: tuple[float, ...]  # of the models that `Reader.opinions` names


def rank(
    found: Sequence[Sequence[Candidate]], weights: Sequence[float]
) -> list[Labels]:
    """Choose the best candidate of every word.

    Args:
        found: the candidates of every word, from `Reader.beam`.
        weights: the weight of each opinion, relative to the score.
    """

    def total(candidate: Candidate) -> float:
        opinions = zip(weights, candidate.opinions, strict=True)
        return candidate.score + sum(w * opinion for w, opinion in opinions)

    return [max(candidates, key=total).labels for candidates in found]


def fit(
    found: Sequence[Sequence[Candidate]],
    correct: Sequence[Sequence[bool]],
    opinions: int,
    total: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> tuple[float, ...]:
    """Return the weights under which correct candidates are the most likely.

    The probability of a candidate is the softmax, over those of its word, of a sum of
    score and opinions, each with its weight. Unlike the number of errors, it changes
    smoothly with the weights, so that few words tell more about them.

    Args:
        found: the candidates of every word, from `Reader.beam`.
        correct: whether each candidate is correct; words without a correct one tell
            nothing.
        opinions: the number of opinions of a candidate.
        total: a function that adds up arrays over all processes, each of which has
            some of the words.

    Returns:
        The weight of each opinion, relative to the score, at least 0.
    """
    words = [
        (np.array([(c.score, *c.opinions) for c in candidates]), np.array(good))
        for candidates, good in zip(found, correct, strict=True)
        if any(good)
    ]
    most = max((len(good) for _, good in words), default=1)
    terms = np.zeros((len(words), most, 1 + opinions))
    logits_of_all = np.full((len(words), most), -np.inf)
    logits_of_good = np.full((len(words), most), -np.inf)
    for i, (of_word, good) in enumerate(words):
        terms[i, : len(good)] = of_word - of_word[0]
        logits_of_all[i, : len(good)] = 0
        logits_of_good[i, : len(good)] = np.where(good, 0, -np.inf)
    first = np.array([1.0] + [FIRST_WEIGHT] * opinions)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = terms @ weights
        lost, gradient = 0.0, np.zeros_like(weights)
        for sign, mask in ((1, logits_of_all), (-1, logits_of_good)):
            log_sum = np.logaddexp.reduce(logits + mask, axis=1, keepdims=True)
            lost += sign * log_sum.sum()
            share = np.exp(logits + mask - log_sum)
            gradient += sign * np.einsum("nk,nkf->f", share, terms)
        lost, *gradient = total(np.array([lost, *gradient])).tolist()
        away = weights - first
        return lost + PULL * away @ away, np.array(gradient) + 2 * PULL * away

    bounds = [(LEAST_SCALE, None)] + [(0, None)] * opinions
    fitted = scipy.optimize.minimize(
        loss, first, jac=True, bounds=bounds, method="L-BFGS-B"
    )
    scale, *weights = fitted.x.tolist()
    return tuple(round(weight / scale, 3) for weight in weights)
