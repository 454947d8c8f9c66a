"""Linear recurrences in numpy, one sequence and one step at a time.

All arrays are `[B, T, ...]`; factors are `[B, T, *F]`, or `[B, T, *F, k]` for matrices.
"""

from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    h: np.ndarray
    h_n: np.ndarray


class Gradients(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    h_0: np.ndarray


def order(length, reverse):
    return range(length - 1, -1, -1) if reverse else range(length)


def run(a, b, h_0, lengths, resets, reverse=False, matrices=False) -> Run:
    h, h_n = np.zeros_like(b), h_0.copy()
    for i, length in enumerate(lengths):
        for t in order(length, reverse):
            state = np.zeros_like(h_0[i]) if resets[i, t] else h_n[i]
            h_n[i] = b[i, t] + apply(a[i, t], state, matrices)
            h[i, t] = h_n[i]
    return Run(h, h_n)


def apply(a, h, matrices):
    return np.einsum("...ij,...j->...i", a, h) if matrices else a * h


def gradients(
    a, b, h_0, lengths, resets, dh, dh_n, reverse=False, matrices=False
) -> Gradients:
    """Go back through the steps; products with `a` are not conjugated."""
    h, _ = run(a, b, h_0, lengths, resets, reverse, matrices)
    da, db, dh_0 = np.zeros_like(a), np.zeros_like(b), dh_n.copy()
    for i, length in enumerate(lengths):
        steps = list(order(length, reverse))
        for k in range(len(steps) - 1, -1, -1):
            t = steps[k]
            bar = db[i, t] = dh[i, t] + dh_0[i]
            before = h[i, steps[k - 1]] if k else h_0[i]
            if resets[i, t]:
                dh_0[i] = 0
            elif matrices:
                da[i, t] = bar[..., :, None] * before[..., None, :]
                dh_0[i] = np.einsum("...ij,...i->...j", a[i, t], bar)
            else:
                da[i, t] = bar * before
                dh_0[i] = a[i, t] * bar
    return Gradients(da, db, dh_0)
