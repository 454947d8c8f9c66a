"""A scan over the tokens of all examples that starts again at each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def scan_tokens(join: Callable[[Any, Any], Any], elements: Any, reverse: bool) -> Any:
    """Return `lax.associative_scan` of arrays along their first axis.

    It goes step by step where the number of tokens is symbolic, as under `jax.export`:
    JAX has no associative scan there.

    Args:
        join: the function of two trees of arrays `[k, ...]`; where the second one
            starts an example, it takes nothing from the first.
        elements: the tree of arrays, of which the first token starts an example.
        reverse: begin with the last token, which starts an example then.
    """
    leaves = jax.tree.leaves(elements)
    if isinstance(leaves[0].shape[0], int):
        return lax.associative_scan(join, elements, reverse=reverse)

    def step(before: Any, token: Any) -> Any:
        after = join(before, jax.tree.map(lambda x: x[None], token))
        return after, jax.tree.map(lambda x: x[0], after)

    start = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), elements)
    return lax.scan(step, start, elements, reverse=reverse)[1]
