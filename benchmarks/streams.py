"""Benchmark of sessions: `python -m benchmarks.streams`.

A step of `ost.stream` next to a jitted `rnn_step` and ONNX Runtime, from one stream to
10,000. Results are checked before anything is timed; the table goes to
docs/results.md.
"""

import functools as ft
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

import ostinato as ost
from ostinato.apps.bench import processes, timing
from ostinato.apps.bench.peers import OURS, STREAM, Unsupported
from ostinato.apps.bench.problem import Problem, make_data

from . import results, tables
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/streams.json")
MARK = "streams"
CONTENDERS = (STREAM, OURS, "onnxruntime")
MODES = ("lstm", "gru")
SIZES = (  # streams, units
    *((1, units) for units in (16, 32, 64, 128, 256, 512, 1024)),
    *((16, units) for units in (64, 256)),
    *((100, units) for units in (64, 256)),
    *((10_000, units) for units in (64, 256)),
)
HEADS = ("row", "µs a step", "jitted rnn_step", "onnxruntime", "MiB")


def main(
    mode: Annotated[list[str], typer.Option(help="lstm, gru.")] = list(MODES),  # noqa: B006
    streams: Annotated[
        list[int] | None, typer.Option(help="Numbers of streams. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of each contender.")] = 2,
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time a step of sessions, and measure their memory.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin(threads=threads)
        for name in mode:
            for count, units in SIZES:
                if streams is None or count in streams:
                    problem = Problem(name, "step", count, 1, units, units)
                    row = {"seconds": seconds(problem, rounds, threads)}
                    row["bytes"] = bytes_of_a_session(problem)
                    stored.add(f"{name} {problem.name}", row)
                    print(*line(problem.name, row), flush=True)
    stored.show(text, MARK, page)


def seconds(problem: Problem, rounds: int, threads: int) -> dict[str, list[float]]:
    """Check the results of all contenders, and time them in turns."""
    builders = {name: ft.partial(build, name, problem, threads) for name in CONTENDERS}
    timed = processes.take_turns(builders, rounds)
    for name, reason in timed.skipped.items():
        print(f"{problem.name}: without {name}: {reason}")
    return timed.seconds


def build(name: str, problem: Problem, threads: int) -> Callable:
    """Return the call of a contender, after a check of its results.

    Raises:
        Unsupported: it cannot run the problem.
    """
    os.environ["OSTINATO_NUM_THREADS"] = str(threads)
    names = dict.fromkeys((OURS, name))  # `checked` raises if ours is wrong
    found = timing.checked(problem, make_data(problem), list(names), threads)
    if name in found.skipped:
        raise Unsupported(found.skipped[name])
    return found.good[name].call


def bytes_of_a_session(problem: Problem) -> int:
    """Return what opening a session and running steps adds to a fresh process.

    Weights, and what the library and JAX need for themselves, are not counted.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (problem,))


def _grown(problem: Problem) -> int:
    weights = ost.init_weights(jax.random.key(0), problem.spec)
    prepared = ost.prepare(problem.spec, weights)
    ost.stream(problem.spec, prepared, 1).step(np.zeros((1, problem.input_size)))
    before = resident()
    session = ost.stream(problem.spec, prepared, problem.batch)
    x = np.zeros((problem.batch, problem.input_size), np.float32)
    own = resident() - before  # the inputs are the caller's
    for _ in range(5):
        y = session.step(x)
    return max(own, resident() - before - x.nbytes - y.nbytes)


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    said = stored.conditions("jax", "onnxruntime")
    threads = stored.machine["threads"]
    lines = [line(name, row) for name, row in stored.rows.items()]
    return f"{said}, {threads} threads each.\n\n{tables.markdown(HEADS, lines)}"


def line(name: str, row: dict) -> tuple[str, ...]:
    """Format the time of a step, the others' over it, and the memory."""
    medians = {k: results.spread(v).median for k, v in row["seconds"].items()}
    ours = medians[STREAM]
    others = (
        tables.ratio(medians[k] / ours) if k in medians else "" for k in CONTENDERS[1:]
    )
    digits = 1 if ours < 1e-4 else 0
    return name, f"{1e6 * ours:.{digits}f}", *others, f"{row['bytes'] / 2**20:.1f}"


if __name__ == "__main__":
    typer.run(main)
