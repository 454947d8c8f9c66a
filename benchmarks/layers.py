"""Benchmark of the layers that take the place of others: `python -m benchmarks.layers`.

Each layer of `ostinato.nn.keras`, `.flax`, `.linen` and `.equinox` runs next to the one
whose place it takes, with the same parameters. Results are checked before anything is
timed; the tables go to docs/results.md.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from tolerance import assert_close

from ostinato.apps.bench import timing

from . import results, tables
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/layers.json")
MARK = "layers"
STEPS = (10, 30, 100)
BATCHES = (1, 16)
UNITS = (64, 128, 256)
KINDS = ("infer", "train")
OURS, THEIRS = "ours", "theirs"


class Pair(NamedTuple):
    """Two functions `run(params, x [N, T, H]) -> y`, and their parameters."""

    ours: Callable
    theirs: Callable
    params: Any


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    only: Annotated[str, typer.Option(help="A part of the names of layers.")] = "",
    batch: Annotated[list[int], typer.Option(help="Sequences.")] = list(BATCHES),  # noqa: B006
    steps: Annotated[list[int], typer.Option(help="Steps.")] = list(STEPS),  # noqa: B006
    units: Annotated[list[int], typer.Option(help="Units.")] = list(UNITS),  # noqa: B006
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time the layers next to those whose place they take.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin()
        for name in (name for name in LAYERS if only in name):
            for size in units:
                for n in batch:
                    for row, seconds in rows(name, n, steps, size, rounds):
                        stored.add(row, seconds)
                        print(*line(row, seconds), flush=True)
    stored.show(text, MARK, page)


# --------------------------------------------------------------------------- measuring


def rows(
    name: str, batch: int, steps: list[int], size: int, rounds: int
) -> Iterator[tuple[str, dict]]:
    """Yield the rows of one layer: their names, and the seconds of both contenders."""
    pair = LAYERS[name](size)
    for length in steps:
        for kind in KINDS:
            calls = checked(pair, batch, length, size, kind == "train")
            row = f"{name}, N{batch}H{size}T{length}-{kind}"
            yield row, timing.take_turns(calls, rounds)


def checked(
    pair: Pair, batch: int, steps: int, size: int, train: bool
) -> dict[str, Callable]:
    """Return compiled calls of both layers, whose results agree."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, batch, steps, size), np.float32)
    arguments: tuple[Any, ...] = (pair.params, jnp.asarray(x))
    runs = {OURS: pair.ours, THEIRS: pair.theirs}
    if train:
        runs = {name: training(run) for name, run in runs.items()}
        arguments = (*arguments, jnp.asarray(dy))
    calls: dict[str, Callable] = {}
    both = []
    for name, run in runs.items():
        program = jax.jit(run).lower(*arguments).compile()
        both.append(jax.tree.leaves(program(*arguments)))
        calls[name] = lambda p=program: jax.block_until_ready(p(*arguments))
    for a, b in zip(*both, strict=True):
        assert_close(a, b, terms=x.size * size)
    return calls


def training(run: Callable) -> Callable:
    """Return a function that runs `run` and gradients of parameters for `dy`."""

    def train(params: Any, x: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(lambda params: run(params, x), params)
        return y, pullback(dy)

    return train


# ------------------------------------------------------------------------------ layers


def _keras(kind: str) -> Callable[[int], Pair]:
    def make(size: int) -> Pair:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        import keras

        from ostinato.nn import keras as ours

        first, second = (
            getattr(library, kind)(size, return_sequences=True)
            for library in (ours, keras.layers)
        )
        for layer in (first, second):
            layer.build((None, None, size))

        def run_of(layer: Any) -> Callable:
            rest = [v.value for v in layer.non_trainable_variables]
            return lambda params, x: layer.stateless_call(params, rest, x)[0]

        params = [v.value for v in second.trainable_variables]
        return Pair(run_of(first), run_of(second), params)

    return make


def _flax(kind: str) -> Callable[[int], Pair]:
    def make(size: int) -> Pair:
        from flax import nnx

        from ostinato.nn import flax as ours

        def run_of(library: Any) -> tuple[Callable, Any]:
            cell = getattr(nnx, kind)(size, size, rngs=nnx.Rngs(0))
            layer = library.RNN(cell, rngs=nnx.Rngs(0))
            graph, params, rest = nnx.split(layer, nnx.Param, ...)

            def run(params: Any, x: Any) -> Any:
                carry = jnp.zeros((len(x), size))
                layer = nnx.merge(graph, params, rest)
                carry = carry if kind == "GRUCell" else (carry, carry)
                return layer(x, initial_carry=carry)

            return run, params

        (first, _), (second, params) = run_of(ours), run_of(nnx)
        return Pair(first, second, params)

    return make


def _linen(kind: str) -> Callable[[int], Pair]:
    def make(size: int) -> Pair:
        from flax import linen

        from ostinato.nn import linen as ours

        layers = [lib.RNN(getattr(linen, kind)(size)) for lib in (ours, linen)]
        params = layers[1].init(jax.random.key(0), jnp.zeros((1, 1, size)))
        return Pair(layers[0].apply, layers[1].apply, params)

    return make


def _scanned(size: int) -> Pair:
    from flax import linen

    from ostinato.nn import linen as ours

    class Theirs(linen.Module):
        """A layer on `linen.scan`, as programs of reinforcement learning have it."""

        @linen.compact
        def __call__(self, carry: Any, at: Any) -> Any:
            x, reset = at
            carry = jnp.where(reset[:, None], jnp.zeros_like(carry), carry)
            return linen.GRUCell(carry.shape[-1])(carry, x)

    scan: Callable = linen.scan
    theirs = scan(Theirs, variable_broadcast="params", split_rngs={"params": False})()

    def run_of(layer: Any) -> Callable:
        def run(params: Any, x: Any) -> Any:
            x = jnp.swapaxes(x, 0, 1)
            resets = jnp.zeros(x.shape[:2], bool)
            carry = jnp.zeros((x.shape[1], size))
            return jnp.swapaxes(layer.apply(params, carry, (x, resets))[1], 0, 1)

        return run

    at = jnp.zeros((1, 1, size)), jnp.zeros((1, 1), bool)
    params = theirs.init(jax.random.key(0), jnp.zeros((1, size)), at)
    return Pair(run_of(ours.ScannedRNN()), run_of(theirs), params)


def _equinox(kind: str) -> Callable[[int], Pair]:
    def make(size: int) -> Pair:
        import equinox as eqx

        from ostinato.nn import equinox as ours

        params = getattr(eqx.nn, kind)(size, size, key=jax.random.key(0))

        def theirs(cell: Any, xs: Any) -> Any:
            def step(state: Any, x: Any) -> Any:
                state = cell(x, state)
                return state, state[0] if kind == "LSTMCell" else state

            zeros = jnp.zeros(size)
            first = (zeros, zeros) if kind == "LSTMCell" else zeros
            return jax.lax.scan(step, first, xs)

        def run_of(scan: Callable) -> Callable:
            return lambda cell, x: jax.vmap(lambda xs: scan(cell, xs)[1])(x)

        return Pair(run_of(ours.scan), run_of(theirs), params)

    return make


LAYERS: dict[str, Callable[[int], Pair]] = {
    **{f"keras {kind}": _keras(kind) for kind in ("LSTM", "GRU", "SimpleRNN")},
    **{
        f"nnx {kind}": _flax(kind)
        for kind in ("LSTMCell", "OptimizedLSTMCell", "GRUCell")
    },
    **{f"linen {kind}": _linen(kind) for kind in ("OptimizedLSTMCell", "GRUCell")},
    "linen ScannedRNN": _scanned,
    **{f"equinox {kind}": _equinox(kind) for kind in ("LSTMCell", "GRUCell")},
}


# --------------------------------------------------------------------------- reporting


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    heads = ("layer", *(f"{k}: {what}" for k in KINDS for what in ("ms", "ratio")))
    lines: dict[str, list[str]] = {}
    for row, seconds in stored.rows.items():  # of one name, in the order of KINDS
        name, _, _ = row.rpartition("-")
        _, theirs, _, ratio = line(row, seconds)
        lines.setdefault(name, [name]).extend((theirs, ratio))
    said = stored.conditions("jax")
    return f"{said}.\n\n{tables.markdown(heads, lines.values())}"


def line(row: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """Format the milliseconds of both contenders, and their ratio."""
    theirs, ours = (results.spread(seconds[who]).median for who in (THEIRS, OURS))
    return (
        row,
        tables.duration(theirs),
        tables.duration(ours),
        tables.ratio(theirs / ours),
    )


if __name__ == "__main__":
    typer.run(main)
