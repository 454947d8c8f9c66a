"""Benchmark of extreme sizes: `python -m benchmarks.extremes`.

It compares with `lax.scan` where a loop of ours could lose to it: many short sequences,
few features, large memories, many members. Results are checked before anything is
timed; the table goes to docs/results.md.
"""

import functools as ft
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

import ostinato as ost
from ostinato.apps.bench import timing

from . import linear, programs, results, tables
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/extremes.json")
MARK = "extremes"
OURS, SCAN = "ours", "lax.scan"
HEADS = ("step", "sizes", "pass", "ms", f"{SCAN} / ours")
Step = Callable[..., tuple[Any, Any]]


class Size(NamedTuple):
    """The numbers of sequences, steps, units and entries of a memory, all of a row.

    Attributes:
        members: how many sets of parameters are mapped; 0 is one that is not.
        ragged: whether sequences have different lengths.
    """

    batch: int
    steps: int
    units: int
    entries: int = 0
    members: int = 0
    ragged: bool = False

    def __str__(self) -> str:
        """Return the size as the name of a row has it."""
        name = f"N{self.batch}T{self.steps}H{self.units}"
        name += f"M{self.entries}" if self.entries else ""
        name += f" x {self.members}" if self.members else ""
        return name + ("-ragged" if self.ragged else "")


# ------------------------------------------------------------------------------ steps


def _tanh(p: Any, h: Any, x: Any, t: Any) -> Any:
    h = jnp.tanh(x @ p["w"] + h @ p["u"])
    return h, h


def _smoothing(p: Any, h: Any, x: Any, t: Any) -> Any:
    h = p["a"] * h + (1 - p["a"]) * x
    return h, h


def _trend(p: Any, states: Any, x: Any, t: Any) -> Any:
    """Smooth a level and its trend, as Holt (1957) does."""
    level, trend = states
    new = p["a"] * x + (1 - p["a"]) * (level + trend)
    trend = p["b"] * (new - level) + (1 - p["b"]) * trend
    return (new, trend), new + trend


def _ring(p: Any, states: Any, x: Any, t: Any) -> Any:
    """Read the state of many steps ago, and write the new one into its place."""
    h, memory = states
    at = t % memory.shape[1]
    old = lax.dynamic_index_in_dim(memory, at, 1, keepdims=False)
    h = jnp.tanh(x @ p["w"] + h @ p["u"] + 0.1 * old)
    return (h, lax.dynamic_update_index_in_dim(memory, h, at, 1)), h


def _writes(p: Any, states: Any, x: Any, t: Any) -> Any:
    """Read and write the entry that each sequence chooses for itself."""
    h, memory = states
    row, at = jnp.arange(h.shape[0]), jnp.argmax(h, -1) % memory.shape[1]
    h = jnp.tanh(x @ p["w"] + h @ p["u"] + 0.1 * memory[row, at])
    return (h, memory.at[row, at].set(h)), h


def _grid(p: Any, states: Any, x: Any, t: Any) -> Any:
    """Read and write the place of a grid that each sequence chooses for itself."""
    h, memory = states
    grid = memory.reshape(h.shape[0], 4, -1, h.shape[1])
    i, j = jnp.argmax(h, -1) % 4, jnp.argmin(h, -1) % grid.shape[2]
    at = jnp.arange(h.shape[0]), i, j
    h = jnp.tanh(x @ p["w"] + h @ p["u"] + 0.1 * grid[at])
    return (h, grid.at[at].set(h).reshape(memory.shape)), h


def _window(p: Any, states: Any, x: Any, t: Any) -> Any:
    """Read several entries from a place on, and write two."""
    h, memory = states
    at = t % memory.shape[1]
    old = lax.dynamic_slice_in_dim(memory, at, 4, 1)
    h = jnp.tanh(x @ p["w"] + h @ p["u"] + 0.1 * old.sum(1))
    new = jnp.stack([h, old[:, 0]], 1)
    return (h, lax.dynamic_update_slice_in_dim(memory, new, at, 1)), h


SHORT = [Size(20_000, 1, 8), Size(20_000, 16, 8), Size(4096, 4, 64), Size(256, 1, 64)]
MEMBERS = [Size(1, 100, 8, members=100), Size(4, 100, 32, members=100)]
MEMORY = [
    replaced
    for size in (Size(8, 100, 32, 16), Size(8, 100, 32, 64), Size(16, 100, 64, 500))
    for replaced in (size, size._replace(ragged=True))
]
ROWS: dict[str, tuple[Step, list[Size]]] = {
    "tanh": (_tanh, [*SHORT, Size(4, 5000, 3), *MEMBERS]),
    "smoothing": (_smoothing, [*SHORT, Size(2000, 100, 3)]),
    "level and trend": (_trend, [Size(20_000, 16, 1), Size(2000, 100, 3)]),
    "ring": (_ring, MEMORY),
    "own writes": (_writes, MEMORY),
    "grid": (_grid, MEMORY[-2:]),
    "window": (_window, MEMORY[-2:]),
}
RECURRENCES = [Size(20_000, 1, 8), Size(20_000, 64, 1), Size(5000, 128, 1)]
GRUS = [Size(20_000, 1, 8), Size(20_000, 16, 8), *MEMBERS]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    rows: Annotated[str, typer.Option(help="Pattern of the names of rows.")] = "*",
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time loops of extreme sizes next to `lax.scan`.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin()
        for name, runs, arguments, terms in contenders():
            if fnmatch(name, rows):
                for kind in ("infer", "train"):
                    row = seconds(runs, arguments, terms, kind, rounds)
                    stored.add(f"{name}, {kind}", row)
                    print(*line(f"{name}, {kind}", row), flush=True)
    stored.show(text, MARK, page)


def seconds(
    runs: dict[str, Callable], arguments: Any, terms: int, kind: str, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every turn by contender, forward or with all gradients."""
    if kind == "train":
        runs = {who: _with_gradients(run) for who, run in runs.items()}
    calls, _ = programs.compiled(runs, arguments, terms)
    return timing.take_turns(calls, rounds)


def _with_gradients(run: Callable) -> Callable:
    """Return a function of the loss, the sum of squares, and its gradients."""
    loss = lambda *arguments: jnp.sum(run(*arguments) ** 2)  # noqa: E731
    return lambda *arguments: jax.grad(loss, (0, 1))(*arguments)


# ------------------------------------------------------------------------- contenders


def contenders() -> Iterator[tuple[str, dict[str, Callable], tuple[Any, Any], int]]:
    """Yield of each row its name, functions, arguments, and the terms of sums."""
    for name, (step, sizes) in ROWS.items():
        for size in sizes:
            runs = {
                SCAN: ft.partial(_scanned, step, size),
                OURS: ft.partial(_ours, step, size),
            }
            yield _row(f"{name}, {size}", size, _params(size), runs)
    for size in RECURRENCES:
        decay = jax.nn.sigmoid(_draw(1, size.batch, size.steps, size.units))
        runs = {SCAN: linear.by_scan, OURS: linear.ours}
        yield _row(f"`linear_recurrence`, {size}", size, decay, runs)
    for size in GRUS:
        spec = ost.RNNSpec("gru", size.units, size.units)
        keys = jax.random.split(jax.random.key(0), max(1, size.members))
        weights = jax.vmap(lambda key, spec=spec: ost.init_weights(key, spec))(keys)
        runs = {
            SCAN: lambda w, x, spec=spec: ost.rnn(spec, w, x, backend="xla").y,
            OURS: lambda w, x, spec=spec: ost.rnn(spec, w, x).y,
        }
        weights = weights if size.members else weights[0]
        yield _row(f"`rnn`, GRU, {size}", size, weights, runs)


def _row(name: str, size: Size, params: Any, runs: dict[str, Callable]) -> Any:
    x = _draw(2, size.batch, size.steps, size.units)
    if size.members:
        runs = {who: jax.vmap(run, (0, None)) for who, run in runs.items()}
    return name, runs, (params, x), size.steps * size.batch * size.units


def _draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def _params(size: Size) -> dict[str, Any]:
    shape = (size.members,) if size.members else ()
    square = (*shape, size.units, size.units)
    scale = 0.5 / np.sqrt(size.units)
    return {
        "w": scale * _draw(3, *square),
        "u": scale * _draw(4, *square),
        "a": jnp.full((*shape, size.units), 0.3),
        "b": jnp.full((*shape, size.units), 0.1),
    }


def _states(step: Step, size: Size) -> Any:
    h = jnp.zeros((size.batch, size.units))
    if size.entries:
        return h, jnp.zeros((size.batch, size.entries, size.units))
    return (h, h) if step is _trend else h


def _lengths(size: Size) -> Any:
    if not size.ragged:
        return None
    drawn = np.random.default_rng(5).integers(1, size.steps, size.batch, endpoint=True)
    return jnp.asarray(drawn, jnp.int32)


def _ours(step: Step, size: Size, params: Any, x: Any) -> Any:
    options = dict(params=params, seq_lengths=_lengths(size), padding="zero")
    return ost.recurrent_net(step, x, _states(step, size), **options).outputs


def _scanned(step: Step, size: Size, params: Any, x: Any) -> Any:
    lengths = _lengths(size)

    def body(old: Any, at: Any) -> Any:
        new, y = step(params, old, *at)
        if lengths is None:
            return new, y
        valid = at[1] < lengths
        pick = lambda a, b: jnp.where(valid.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        return jax.tree.map(pick, new, old), pick(y, jnp.zeros_like(y))

    steps = jnp.swapaxes(x, 0, 1), jnp.arange(size.steps)
    return jnp.swapaxes(lax.scan(body, _states(step, size), steps)[1], 0, 1)


# ----------------------------------------------------------------------------- tables


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    rows = [line(name, row) for name, row in stored.rows.items()]
    return f"{stored.conditions('jax')}.\n\n{tables.markdown(HEADS, rows)}"


def line(name: str, row: dict[str, list[float]]) -> tuple[str, ...]:
    """Format our milliseconds, and the time of `lax.scan` over ours."""
    step, size, kind = name.rsplit(", ", 2)
    own, scan = (results.spread(row[who]).median for who in (OURS, SCAN))
    return step, size, kind, tables.duration(own), tables.ratio(scan / own)


if __name__ == "__main__":
    typer.run(main)
