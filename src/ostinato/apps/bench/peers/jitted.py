"""The code that contenders that are JAX functions share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import ostinato as ost

from ..problem import Data, Problem
from .contender import Contender, results


def contender(
    problem: Problem,
    data: Data,
    forward: Callable[..., tuple[Any, Any]],
    params: Any,
    layers: Callable[[Any], list[ost.LayerWeights]],
    detail: str = "",
) -> Contender:
    """Make a contender of `forward(params, x, state, lengths) -> (y, state)`.

    It is jitted, with its gradient if the problem asks for one. `params` has the
    problem's dtype; `layers` splits parameters, or their gradients, by pseudo-layer.
    """
    dtype = jnp.dtype(problem.dtype)
    x, state, dy = jax.tree.map(
        lambda a: jnp.asarray(a, dtype), (data.x, data.state, data.dy)
    )
    lengths = None if data.lengths is None else jnp.asarray(data.lengths)

    def train(params, x, state, lengths, dy):
        (y, last), pullback = jax.vjp(
            lambda *args: tuple(forward(*args, lengths)), params, x, state
        )
        return y, last, pullback((dy, jax.tree.map(jnp.zeros_like, last)))

    def translated(returned):
        y, last, *grads = returned
        if grads:
            dparams, dx, dstate = grads[0]
            grads = [(layers(dparams), dx, dstate)]
        return results(problem, data, y, last, *grads)

    args = (params, x, state, lengths)
    run = train if problem.differentiates else forward
    args = (*args, dy) if problem.differentiates else args
    if problem.kind == "compile":
        return Contender(
            # A new function each time, since JAX caches compiled functions.
            call=lambda: jax.jit(lambda *args: run(*args)).lower(*args).compile(),
            results=lambda compiled: translated(compiled(*args)),
            detail=detail,
        )
    jitted = jax.jit(run)

    def call():
        returned = jitted(*args)
        returned[0].block_until_ready()  # all results of a call are ready together
        return returned

    return Contender(call, translated, detail)
