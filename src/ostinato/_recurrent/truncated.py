"""The function `tbptt`: truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .. import _checks


def tbptt(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    chunks: Any,
    *,
    detach_every: int,
    burn_in: int = 0,
) -> tuple[Any, Any]:
    """Run `step(carry, chunk) -> (carry, output)` with gradients cut between chunks.

    The values are those of `lax.scan(step, carry, chunks)`. In the backward pass
    gradients pass from a chunk to those before it, as far as the last multiple of
    `detach_every`. With several such parts the backward pass runs each again, so that
    memory holds what one part stores, however many chunks there are.

    Args:
        step: a function of the carry and one chunk, such as a call of `rnn` with the
            carry as its initial state, which returns the final state and a loss.
        carry: the carry before the first chunk, a pytree of arrays: zeros, or what an
            earlier call returned. It can be stored in a checkpoint between calls.
        chunks: a pytree of arrays with the chunks as their first axis, such as
            `[chunks, B, T, ...]`.
        detach_every: the number of chunks of a part. As many as there are chunks, or
            more, are full backpropagation.
        burn_in: the number of first chunks that only bring the carry up to date: they
            have no outputs and no gradients. Parts are counted after them.

    Returns:
        The carry after the last chunk, and the outputs of all chunks after the burn-in,
        stacked. Gradients of both reach what `step` closes over; those of the first
        part reach the initial `carry`, too, where there is no burn-in.

    Raises:
        TypeError: `chunks` has no arrays; a number is no integer; `step` returns no
            pair of a carry and an output.
        ValueError: the arrays of `chunks` differ in the first size; `detach_every` is
            less than 1; `burn_in` is negative or larger than the number of chunks.
        NotImplementedError: the number of chunks is symbolic.

    Holds under `jit`, `grad`, `jvp` and `vmap` where `step` does.

    References:
        Truncation: Williams and Peng, An Efficient Gradient-Based Algorithm for On-Line
        Training of Recurrent Network Trajectories (1990), doi:10.1162/neco.1990.2.4.490
        Burn-in: Kapturowski et al., Recurrent Experience Replay in Distributed
        Reinforcement Learning (2019), https://openreview.net/forum?id=r1lyTjAqYX

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import ostinato as ost
        >>> chunks = jnp.arange(1.0, 5.0)
        >>> def total(w, **options):
        ...     step = lambda carry, chunk: (carry + w * chunk, carry + w * chunk)
        ...     return ost.tbptt(step, jnp.zeros(()), chunks, **options)[1].sum()
        >>> [float(jax.grad(total)(1.0, detach_every=n)) for n in (1, 2, 4)]
        [10.0, 14.0, 20.0]
    """
    if not callable(step):
        raise TypeError(
            "`step` must be a function of a carry and a chunk, got "
            f"{_checks.describe(step)}"
        )
    size = _checks.check_size("detach_every", detach_every)
    first = _checks.check_size("burn_in", burn_in, 0)
    count = _count(chunks)
    if first > count:
        raise ValueError(
            f"`burn_in` must be at most the number of chunks, {count}, got {first}"
        )
    try:
        return _run(step, carry, chunks, count, size, first)
    except TypeError:
        _check_step(step, carry, chunks)  # here, as it traces the step once more
        raise


def _run(
    step: Callable, carry: Any, chunks: Any, count: int, size: int, first: int
) -> tuple[Any, Any]:
    if first:
        carry, _ = lax.scan(step, carry, jax.tree.map(lambda a: a[:first], chunks))
        carry = lax.stop_gradient(carry)

    def part(carry: Any, chunks: Any) -> tuple[Any, Any]:
        carry, outputs = lax.scan(step, carry, chunks)
        return lax.stop_gradient(carry), outputs

    # The last part is whole, or the rest; nothing comes after it, and what it stores is
    # read first in the backward pass.
    parts = max(0, (count - first - 1) // size)
    last = first + parts * size
    ending = jax.tree.map(lambda a: a[last:], chunks)
    if not parts:
        return lax.scan(step, carry, ending)
    blocks = jax.tree.map(
        lambda a: a[first:last].reshape(parts, size, *a.shape[1:]), chunks
    )
    carry, outputs = lax.scan(jax.checkpoint(part, prevent_cse=False), carry, blocks)
    carry, rest = lax.scan(step, carry, ending)
    return carry, jax.tree.map(
        lambda a, b: lax.concatenate([a.reshape(parts * size, *a.shape[2:]), b], 0),
        outputs,
        rest,
    )


def _check_step(step: Callable, carry: Any, chunks: Any) -> None:
    """Check that the step returns two values."""
    chunk = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), chunks)
    result = jax.eval_shape(step, carry, chunk)
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise TypeError(
            "`step` must return a tuple (carry, output), got "
            f"{_checks.describe(result)}"
        )


def _count(chunks: Any) -> int:
    """Return the number of chunks; check that all arrays have it."""
    leaves = jax.tree.leaves(chunks)
    if not leaves:
        raise TypeError(f"`chunks` must have an array, got {_checks.describe(chunks)}")
    for leaf in leaves:
        if not getattr(leaf, "shape", ()) or leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                "`chunks` must have arrays with the chunks as their first axis, "
                "equally many in each, got "
                f"{', '.join(map(_checks.describe, leaves))}"
            )
    count = leaves[0].shape[0]
    if not isinstance(count, int):
        raise NotImplementedError(
            f"`chunks` must have a fixed number of chunks, got {count}; take "
            "jax.lax.scan where it is a symbol, as in ragged.vmap and jax.export"
        )
    return count
