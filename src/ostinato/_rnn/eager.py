"""How the primitives run outside of `jit`: as JAX's own, by a compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._typing import Array


def always_jitted(function: Callable) -> Callable:
    """Return `function`, jitted even under `jax.disable_jit`, like JAX's primitives."""

    def run(*args: Array, **params: Any) -> Any:
        with jax.disable_jit(False):
            return function(*args, **params)

    return run
