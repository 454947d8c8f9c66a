"""Benchmark of sessions of cells: `python -m benchmarks.cell_streams`.

A step of `ost.stream` of a cell, which the native loop runs, next to a jitted call of
the cell, and to the session of the fused operator where there is one. Results are
checked before anything is timed; the table goes to docs/results.md.
"""

import functools as ft
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import ostinato as ost
from ostinato import cells
from ostinato.apps.bench import processes

from . import results, tables
from .stored import Measure, Out, Page, Stored
from .streams import resident

OUT = Path("out/bench/cell_streams.json")
MARK = "cell streams"
CELLS: dict[str, Callable[[int], Any]] = {
    "LSTM": lambda units: cells.LSTM(units, units),
    "MI-LSTM": lambda units: cells.MILSTM(units, units),
    "layer-norm LSTM": lambda units: cells.LayerNormLSTM(units, units),
}
FUSED = {"LSTM": "lstm"}
SIZES = ((1, 64), (1, 256), (1, 1024), (100, 256), (10_000, 64))
OURS, JITTED, OPERATOR = "session", "jitted cell", "fused session"
HEADS = ("row", "µs a step", JITTED, OPERATOR, "MiB")


def main(
    cell: Annotated[list[str], typer.Option(help="Names of cells.")] = list(CELLS),  # noqa: B006
    streams: Annotated[
        list[int] | None, typer.Option(help="Numbers of streams. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of each contender.")] = 2,
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time a step of sessions of cells, and measure their memory.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin(threads=threads)
        for name in cell:
            for count, units in SIZES:
                if streams is None or count in streams:
                    row: dict[str, Any] = {
                        "seconds": seconds(name, count, units, rounds, threads),
                        "bytes": bytes_of_a_session(name, count, units),
                    }
                    title = f"{name}, N{count}H{units}"
                    stored.add(title, row)
                    print(*line(title, row), flush=True)
    stored.show(text, MARK, page)


def seconds(
    name: str, count: int, units: int, rounds: int, threads: int
) -> dict[str, list[float]]:
    """Check the results of all contenders, and time them in turns."""
    names = [OURS, JITTED, *([OPERATOR] if name in FUSED else [])]
    builders = {n: ft.partial(build, n, name, count, units, threads) for n in names}
    return processes.take_turns(builders, rounds).seconds


def build(
    contender: str, name: str, count: int, units: int, threads: int
) -> Callable[[], Any]:
    """Return the call of a contender, after a check of its results."""
    os.environ["OSTINATO_NUM_THREADS"] = str(threads)
    cell = CELLS[name](units)
    params = cell.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, units)).astype(np.float32)
    step = jax.jit(lambda states, x: cell(params, states, x, jnp.int32(0)))
    states = cell.initial_state(count)
    if contender == JITTED:
        kept = [states]

        def call() -> Any:
            kept[0], y = step(kept[0], x)
            return np.asarray(y)

        return call
    if contender == OPERATOR:
        spec = ost.RNNSpec(FUSED[name], units, units)
        session: Any = ost.stream(spec, ost.pack_weights([params], spec), count)
    else:
        session = ost.stream(cell, params, count, backend="cpu")
    for _ in range(3):
        states, want = step(states, x)
        np.testing.assert_allclose(session.step(x), want, atol=1e-5)
    return lambda: session.step(x)


def bytes_of_a_session(name: str, count: int, units: int) -> int:
    """Return what opening a session and running steps adds to a fresh process.

    The packed weights count; parameters, and what the library and JAX need for
    themselves, do not.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (name, count, units))


def _grown(name: str, count: int, units: int) -> int:
    cell = CELLS[name](units)
    params = cell.init(jax.random.key(0))
    small = CELLS[name](8)
    warm = ost.stream(small, small.init(jax.random.key(0)), 1)
    warm.step(np.zeros((1, 8)))
    x = np.zeros((count, units), np.float32)
    before = resident()
    session = ost.stream(cell, params, count)
    for _ in range(5):
        y = session.step(x)
    return max(0, resident() - before - x.nbytes - y.nbytes)


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    said = f"{stored.conditions('jax')}, {stored.machine['threads']} threads each."
    lines = [line(name, row) for name, row in stored.rows.items()]
    return f"{said}\n\n{tables.markdown(HEADS, lines)}"


def line(name: str, row: dict) -> tuple[str, ...]:
    """Format the time of a step, the others' over it, and the memory."""
    medians = {k: results.spread(v).median for k, v in row["seconds"].items()}
    ours = medians[OURS]
    others = (
        tables.ratio(medians[k] / ours) if k in medians else ""
        for k in (JITTED, OPERATOR)
    )
    digits = 1 if ours < 1e-4 else 0
    return name, f"{1e6 * ours:.{digits}f}", *others, f"{row['bytes'] / 2**20:.1f}"


if __name__ == "__main__":
    typer.run(main)
