"""`jax.debug_nans`, `jax.debug_infs` and `jax.disable_jit` around `ragged.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

_Results = TypeVar("_Results")


def with_checked_results(compute: Callable[[], _Results]) -> _Results:
    """Return `compute()`; look for NaN and inf in its results, as in those of a `jit`.

    JAX looks at every operation outside of `jit`. Constants of its own functions are
    NaN or infinite, and so are values of padding.

    Raises:
        FloatingPointError: a flag is on, and results have what it forbids. That of the
            operation which made it, if one did.
    """
    nans, infs = (getattr(jax.config, f"jax_debug_{n}") for n in ("nans", "infs"))
    if not (nans or infs):
        return compute()
    with jax.debug_nans(False), jax.debug_infs(False):
        results = compute()
        leaves = [x for x in jax.tree.leaves(results) if _can_be_looked_at(x)]
        forbidden = [("nan", jnp.isnan)] * nans + [("inf", jnp.isinf)] * infs
        found = [name for name, test in forbidden if any(test(x).any() for x in leaves)]
    if found:
        compute()  # operation by operation
        name = found[0]
        raise FloatingPointError(f"invalid value ({name}) in results of ragged.vmap")
    return results


def _can_be_looked_at(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, np.inexact)
