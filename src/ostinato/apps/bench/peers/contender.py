"""A contender: a call to time, and its results in a common layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Data, Problem, Results


class Unsupported(Exception):
    """The reason why a contender cannot run a problem."""


@dataclass(frozen=True)
class Contender:
    """A call to time, and a translation of its results.

    `call` returns when its results are ready; `results` translates them and is not
    timed. `detail` names the backend, for a contender that has several.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Results]
    detail: str = ""


def results(
    problem: Problem, data: Data, y: Any, state: Any, grads: Any = None
) -> Results:
    """Return results by name in the common layout; `grads` is `(layers, x, state)`.

    The padding of `y`, which libraries fill differently, is set to 0, and weights that
    a contender does not have (None) are left out.
    """
    y = _single(y).reshape(data.dy.shape).copy()
    if data.lengths is not None:
        y[np.arange(problem.steps)[:, None] >= data.lengths] = 0
    named = {"y": y, **_states("n", state)}
    if grads is not None:
        layers, dx, dstate = grads
        for field in ("w_ih", "w_hh", "b_ih", "b_hh"):
            tensors = [getattr(layer, field) for layer in layers]
            if tensors[0] is not None:
                parts = [_single(tensor).ravel() for tensor in tensors]
                named[f"d{field}"] = np.concatenate(parts)
        named["dx"] = dx
        named |= {f"d{name}": a for name, a in _states("0", dstate).items()}
    return {name: _single(array) for name, array in named.items()}


def _single(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def _states(suffix: str, state: Any) -> dict[str, Any]:
    pair = state if isinstance(state, tuple) else (state,)
    return {f"{name}_{suffix}": a for name, a in zip("hc", pair, strict=False)}
