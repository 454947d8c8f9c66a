"""Element-wise cells on a GPU, next to XLA's loop, without the products of inputs.

The floor is the time of `a + b`, which moves three arrays, by the number of arrays that
a cell has to move.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ostinato as ost
from ostinato.apps.bench import timing

from . import linear, programs

ADD = "a + b"
DTYPES = ("float32", "bfloat16")
KINDS = ("infer", "train")
SIZES = {"N8T1000H256": (8, 1000, 256), "N128T500H512": (128, 500, 512)}


def rows(backend: str, rounds: int) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Yield the name of each row and the function that measures it."""
    names = itertools.product(linear.ELEMENTWISE, SIZES, DTYPES, KINDS)
    for cell, size, dtype, kind in names:
        run = ft.partial(loop, backend, rounds, cell, dtype, SIZES[size], kind)
        yield f"{cell}-{size}-{dtype}-{kind}", run


def loop(
    backend: str, rounds: int, name: str, dtype: str, shape: tuple, kind: str
) -> dict:
    """Return the seconds of each contender in each round, and the floor."""
    make, gates, moved, _ = linear.ELEMENTWISE[name]
    batch, steps, units = shape
    cell = make(units, units)
    params = cell.init(jax.random.key(0), jnp.dtype(dtype))
    states = cell.initial_state(batch, jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(  # noqa: E731
        rng.standard_normal((steps, batch, units)), dtype
    )
    x = draw() if gates == 1 else tuple(draw() for _ in range(gates))
    dy = draw()
    given = (params, x) if kind == "infer" else (params, x, dy)

    def run(params: Any, x: Any, *, backend: str) -> Any:
        step = lambda p, s, x, t: cell.step(p, s, x, t)  # noqa: E731
        return ost.recurrent_net(
            step, x, states, params=params, time_major=True, backend=backend
        ).outputs

    names = {linear.OURS: backend, "xla": "xla", linear.SCAN: "scan"}
    runs = {who: ft.partial(run, backend=each) for who, each in names.items()}
    if kind == "train":
        runs = {who: programs.training(each) for who, each in runs.items()}
    calls, needed = linear.compiled(runs, given, (steps * batch) ** 2)
    add = jax.jit(jnp.add)
    calls[ADD] = lambda: jax.block_until_ready(add(dy, dy))
    taken = timing.take_turns(calls, rounds)
    median = {who: float(np.median(each)) for who, each in taken.items()}
    arrays = gates + 1 if kind == "infer" else moved
    floor = median[ADD] * arrays / linear.ARRAYS["infer"]
    return {
        "median": median,
        "floor": floor,
        "ours/floor": median[linear.OURS] / floor,
        "xla/ours": median["xla"] / median[linear.OURS],
        "bytes": needed,
        "seconds": taken,
    }
