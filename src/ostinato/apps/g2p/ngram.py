"""An n-gram model: the probability of a sequence of symbols, learned by counting.

Sequences come in one row: integers above 0, and an `EDGE` behind each sequence.

References:
    Kneser & Ney, Improved Backing-Off for M-gram Language Modeling (1995),
    doi:10.1109/ICASSP.1995.479394. Interpolated: Chen & Goodman (1999),
    doi:10.1006/csla.1999.0128.
"""

from typing import NamedTuple

import numpy as np

EDGE = 0  # marks the end of a sequence, and whatever comes before its start
LEAST_DISCOUNT = 0.1  # so that something is left for n-grams that were not seen


class _Level(NamedTuple):
    """Counts of one order.

    A context is the place of the context that is shorter by its first symbol, times
    `base`, plus that symbol; an n-gram is the place of its context, times `base`, plus
    its last symbol. Both are sorted.
    """

    contexts: np.ndarray
    grams: np.ndarray
    share: np.ndarray  # of its context's counts that an n-gram has, less the discount
    left: np.ndarray  # share of the counts of a context that is discounted


class NGram:
    """An interpolated Kneser-Ney model of sequences of symbols.

    Args:
        row: the sequences to learn from.
        order: the n of the largest n-grams.
    """

    def __init__(self, row: np.ndarray, order: int) -> None:
        self.order = order
        self._symbols = np.unique(row)  # with the edge, which comes first
        self._base = len(self._symbols) + 1  # the last one is for unknown symbols
        windows = self._windows(row)
        counted, context = [], np.zeros(len(windows), np.int64)
        contexts = np.zeros(1, np.int64)
        for n in range(order):
            if n:
                code = context * self._base + windows[:, -1 - n]
                contexts, context = np.unique(code, return_inverse=True)
            code = context * self._base + windows[:, -1]
            grams, gram, counts = np.unique(
                code, return_inverse=True, return_counts=True
            )
            counted.append((contexts, grams, gram, counts))
        self._levels = []
        for n, (contexts, grams, gram, counts) in enumerate(counted):
            if n + 1 < order:  # how many different symbols are seen before it
                _, longer, of, _ = counted[n + 1]
                suffix = np.zeros(len(longer), np.int64)
                suffix[of] = gram
                counts = np.bincount(suffix, minlength=len(grams))
            self._levels.append(_level(contexts, grams, counts, self._base))

    def log_prob(self, row: np.ndarray) -> np.ndarray:
        """Return the natural log of the probability of every sequence and its end."""
        windows = self._windows(row)
        prob = np.full(len(windows), 1 / self._base)
        context, known = np.zeros(len(windows), np.int64), np.ones(len(windows), bool)
        for n, level in enumerate(self._levels):
            if n:
                code = context * self._base + windows[:, -1 - n]
                context, seen = _find(level.contexts, code)
                known &= seen
            gram, seen = _find(level.grams, context * self._base + windows[:, -1])
            mixed = np.where(seen, level.share[gram], 0) + level.left[context] * prob
            prob = np.where(known, mixed, prob)
        owner = np.cumsum(row == EDGE) - (row == EDGE)
        return np.bincount(owner, np.log(prob))

    def _windows(self, row: np.ndarray) -> np.ndarray:
        """Return the last `order` symbols at every place, as ids, ``[N, order]``."""
        place, seen = _find(self._symbols, row)
        ids = np.where(seen, place, self._base - 1)
        places = np.arange(len(row))
        start = np.maximum.accumulate(np.where(np.roll(row == EDGE, 1), places, 0))
        back = places[:, None] - np.arange(self.order)[::-1]
        return np.where(back >= start[:, None], ids[np.maximum(back, 0)], EDGE)


def _level(
    contexts: np.ndarray, grams: np.ndarray, counts: np.ndarray, base: int
) -> _Level:
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    discount = max(once / max(once + 2 * twice, 1), LEAST_DISCOUNT)
    of = grams // base
    total = np.bincount(of, counts, minlength=len(contexts))
    left = discount * np.bincount(of, minlength=len(contexts)) / total
    return _Level(contexts, grams, (counts - discount) / total[of], left)


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of every wanted key, and whether it is there; sorted `keys`."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    seen = keys[place] == wanted
    return np.where(seen, place, 0), seen
