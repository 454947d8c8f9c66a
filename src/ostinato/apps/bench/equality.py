"""The check that two contenders computed the same."""

import math

import jax.numpy as jnp
import numpy as np

from .problem import Problem, Results


class OtherResults(Exception):
    """A contender's results are not those of the reference."""


def check(problem: Problem, got: Results, want: Results) -> float:
    """Check that all results agree up to rounding.

    Args:
        problem: what was computed; its dtype and sizes decide what rounding may do.
        got: the results of a contender, which may lack some of those of `want`.
        want: the results of the reference.

    Returns:
        The largest difference that was found, see `difference`.

    Raises:
        OtherResults: a result differs by more than `tolerance`, or has another shape.
    """
    if unknown := sorted(got.keys() - want.keys()):
        raise OtherResults(f"{', '.join(unknown)}: not a result of this problem")
    allowed, largest = tolerance(problem), 0.0
    for name in got:
        if got[name].shape != want[name].shape:
            shapes = f"shape {got[name].shape}, want {want[name].shape}"
            raise OtherResults(f"{name}: {shapes}")
        found = difference(got[name], want[name])
        if not found <= allowed:  # NaN is not
            raise OtherResults(f"{name} differs by {found:.1e}, allowed {allowed:.1e}")
        largest = max(largest, found)
    return largest


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest difference of elements, over the largest element of `want`.

    That element counts as 1 if it is smaller. NaN in either array gives NaN.
    """
    wide = np.asarray(want, np.float64)
    scale = max(1.0, np.abs(wide).max(initial=0.0))
    return float(np.abs(np.asarray(got, np.float64) - wide).max(initial=0.0) / scale)


def tolerance(problem: Problem) -> float:
    """Return the difference that rounding explains.

    Sums are taken as trees over the longest accumulation. Of bfloat16, only the storing
    of results rounds, since sums are float32.
    """
    eps = float(jnp.finfo(problem.dtype).eps)
    roundings = 4.0 if problem.dtype == "float32" else 1.0
    return roundings * eps * (1.0 + math.log2(max(1, problem.terms)))
