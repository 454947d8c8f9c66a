"""Decoding of CTC scores: the best path, or the best sum over paths.

CTC gives every frame a distribution over phonemes and a blank (label 0). A path spells
the pronunciation that remains when repeated labels are merged and blanks dropped. Many
paths spell the same pronunciation: `greedy` reads the best path, `beam` sums over all.

References:
    Graves et al., Connectionist Temporal Classification (2006),
    doi:10.1145/1143844.1143891
"""

import math

import numpy as np

from .ranking import Labels

BLANK = 0
WIDTH = 8
MIN_PROB = 1e-4  # less likely symbols hardly change the result


def greedy(log_probs: np.ndarray) -> Labels:
    """Return the labels of the best path through the frames, ``[F, V]``."""
    best = log_probs.argmax(-1)
    changed = np.diff(best, prepend=BLANK) != 0
    return tuple(int(symbol) for symbol in best[changed & (best != BLANK)])


def beam(
    log_probs: np.ndarray, width: int = WIDTH, min_prob: float = MIN_PROB
) -> list[tuple[Labels, float]]:
    """Find the most likely label sequences, summed over their paths.

    Args:
        log_probs: ``[F, V]`` with the blank first; each row's probabilities sum to 1.
        width: prefixes kept after every frame; a large enough number is exact.
        min_prob: less likely symbols of a frame are not tried.

    Returns:
        At most `width` pairs of labels and log probability, best first.
    """
    # For each prefix, the total probability of the paths that spell it and end in a
    # blank, and of those that do not.
    kept: list[tuple[Labels, float, float]] = [((), 1.0, 0.0)]
    log_scale = 0.0
    for frame in np.exp(log_probs.astype(np.float64)):
        symbols = [(s, p) for s, p in enumerate(frame.tolist()) if p > min_prob and s]
        kept = _grow(kept, float(frame[BLANK]), symbols)[:width]
        top = kept[0][1] + kept[0][2]
        kept = [(prefix, blank / top, label / top) for prefix, blank, label in kept]
        log_scale += math.log(top)
    return [(prefix, math.log(b + n) + log_scale) for prefix, b, n in kept]


def _grow(kept: list, p_blank: float, symbols: list[tuple[int, float]]) -> list:
    """Extend the prefixes by one frame and return them all, best first."""
    probs = dict(symbols)
    blanks: dict[Labels, float] = {}
    labels: dict[Labels, float] = {}
    for prefix, blank, label in kept:
        last = prefix[-1] if prefix else BLANK
        either = blank + label
        blanks[prefix] = either * p_blank
        labels[prefix] = labels.get(prefix, 0.0) + label * probs.get(last, 0.0)
        for symbol, p in symbols:
            longer = (*prefix, symbol)
            before = blank if symbol == last else either
            labels[longer] = labels.get(longer, 0.0) + before * p
    grown = [(prefix, blanks.get(prefix, 0.0), p) for prefix, p in labels.items()]
    alive = [item for item in grown if item[1] + item[2] > 0]
    return sorted(alive, key=lambda item: -(item[1] + item[2]))
