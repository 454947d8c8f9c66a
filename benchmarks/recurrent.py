"""Benchmark of `recurrent_net` and `lax.scan`: `python -m benchmarks.recurrent`.

It measures how long step functions and cells take to compile, and their speed, then the
memory and the time of every way to store less. Results are checked before anything is
timed; the tables go to docs/results.md.
"""

import enum
import time
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
from ostinato import cells
from ostinato.apps.bench import timing

from . import programs, results, tables
from .steps import Network, attention, networks
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/recurrent.json")
MARK = "recurrent"
STEPS = 100
ENTRIES = 20  # of the memory that attention reads
# T, N, H, and the entries of the memory that attention reads.
MEMORY_SIZES = (500, 32, 256, 20)
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "not `gates`": {"recompute": ("gates",)},
    "not `gates`, `energies`": {"recompute": ("gates", "energies")},
    "states": {"recompute": True},
    "some states": {"segment_length": "auto"},
}
SCAN, FUSED = "lax.scan", "fused"


class Part(enum.StrEnum):
    """A part of the benchmark."""

    COMPILE = "compile"
    SPEED = "speed"
    MEMORY = "memory"


class Case(NamedTuple):
    """Sizes and types of the sequences of a row.

    Attributes:
        batch: the number of sequences.
        size: the number of inputs, units, and features of a memory.
        dtype: of all arrays.
        ragged: whether sequences have different lengths.
    """

    batch: int
    size: int
    dtype: Any = jnp.float32
    ragged: bool = False

    def lengths(self) -> Any:
        """Draw the lengths of the sequences, int32 `[N]`; None if they are equal."""
        if not self.ragged:
            return None
        drawn = np.random.default_rng(2).integers(1, STEPS, self.batch, endpoint=True)
        return jnp.asarray(drawn, jnp.int32)


CASES = {
    "N1H64": Case(1, 64),
    "N8H64": Case(8, 64),
    "N32H256": Case(32, 256),
    "N1H256": Case(1, 256),
    "N32H256-ragged": Case(32, 256, ragged=True),
    "N32H256-bfloat16": Case(32, 256, jnp.bfloat16),
}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    only: Annotated[
        Part | None, typer.Option(help="What to measure; the default is all.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Pattern of the rows of speed.")] = "*",
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time `recurrent_net`, and count the bytes that it stores."""
    stored = Stored(out)
    if measure:
        stored.begin()
        parts = {
            # First, since a step that has run is known.
            Part.COMPILE: compilations(),
            Part.SPEED: speed(rounds, rows),
            Part.MEMORY: memory(rounds),
        }
        for part in parts if only is None else (only,):
            for name, row in parts[part]:
                stored.add(name, row)
    stored.show(text, MARK, page)


# ---------------------------------------------------------------------------- compile


def compilations() -> Iterator[tuple[str, dict]]:
    """Yield the seconds to trace and compile a training step, by contender."""
    label = "N8H64"
    case = CASES[label]
    for name, network in networks(case.size).items():
        arguments = make(network, STEPS, case, ENTRIES)
        found = {
            who: compiling(run, arguments)
            for who, run in contenders(network, case).items()
        }
        row = f"{name}, {label}-compile"
        print(*compile_row(row, {"compile": found}), flush=True)
        yield row, {"compile": found}


def compiling(run: Callable, arguments: Any) -> list[float]:
    """Return the seconds that a training step takes for the first time, then again."""
    seconds = []
    dy = jnp.ones_like(jax.eval_shape(run, *arguments))
    for _ in range(2):
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(training(run)).lower(*arguments, dy).compile()
        seconds.append(time.perf_counter() - start)
    return seconds


# ------------------------------------------------------------------------------ speed


def speed(rounds: int, pattern: str = "*") -> Iterator[tuple[str, dict]]:
    """Yield the seconds of networks, forward and training, by contender."""
    for row, case, network in rows_of_speed():
        if fnmatch(row, pattern):
            runs = contenders(network, case)
            arguments = make(network, STEPS, case, ENTRIES)
            calls, _ = compiled(runs, arguments, row.endswith("train"))
            found = {"seconds": timing.take_turns(calls, rounds)}
            print(*speed_row(row, found), flush=True)
            yield row, found


def rows_of_speed() -> Iterator[tuple[str, Case, Network]]:
    """Yield the name of every row, and what it measures, in the order of the table."""
    for label, case in CASES.items():
        for name, network in networks(case.size).items():
            for kind in ("infer", "train"):
                yield f"{name}, {label}-{kind}", case, network


def contenders(network: Network, case: Case) -> dict[str, Callable]:
    """Return functions `run(params, x, memory) -> outputs`, time first, by name."""
    states = network.cell.initial_state(case.batch, case.dtype)
    lengths = case.lengths()
    runs: dict[str, Callable] = {SCAN: scanned(network.step_on, states, lengths)}
    options = {"seq_lengths": lengths, "padding": "zero"}
    if network.step is not None:
        runs["function"] = ours(network.step_on, states, **options)
    if not network.hand_made:
        fused = isinstance(network.cell, cells.LSTM | cells.GRU)
        runs[FUSED if fused else "cell"] = ours(network.cell_on, states, **options)
    return runs


def scanned(step_of: Callable, states: Any, lengths: Any = None) -> Callable:
    """Return a function that runs the step by `lax.scan`."""

    def run(params: Any, x: Any, memory: Any) -> Any:
        step = step_of(memory)

        def body(old: Any, at: Any) -> Any:
            new, y = step(params, old, *at)
            if lengths is None:
                return new, y
            valid = (at[1] < lengths)[:, None]
            new = jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, old)
            return new, jnp.where(valid, y, 0)

        return lax.scan(body, states, (x, lax.iota(jnp.int32, len(x))))[1]

    return run


def ours(step_of: Callable, states: Any, **options: Any) -> Callable:
    """Return a function that runs the step by `recurrent_net`."""

    def run(params: Any, x: Any, memory: Any) -> Any:
        return ost.recurrent_net(
            step_of(memory), x, states, params=params, time_major=True, **options
        ).outputs

    return run


def training(run: Callable) -> Callable:
    """Return a function that runs `run` and all gradients for a cotangent `dy`."""

    def train(params: Any, x: Any, memory: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(run, params, x, memory)
        return y, pullback(dy)

    return train


# ----------------------------------------------------------------------------- memory


def memory(rounds: int) -> Iterator[tuple[str, dict]]:
    """Yield temporary bytes and seconds of a training step, by what is stored."""
    size = MEMORY_SIZES[2]
    for name, cell in {
        "LSTM": cells.LSTM(size, size),
        "MI-LSTM": cells.MILSTM(size, size),
        "attention LSTM": attention(size),
    }.items():
        found = stored_by(cell, rounds, MEMORY_SIZES)
        for line in memory_rows(name, found):
            print(*line, flush=True)
        yield name, found


def stored_by(cell: Any, rounds: int, sizes: tuple[int, int, int, int]) -> dict:
    """Measure `bytes` and `seconds` of one cell, for all `WAYS` that apply to it."""
    steps, batch, hidden, entries = sizes
    network = Network(None, cell, cell.init)
    arguments = make(network, steps, Case(batch, hidden), entries)
    states = cell.initial_state(batch)
    runs = {SCAN: scanned(network.cell_on, states)}
    runs |= {
        way: ours(network.cell_on, states, **options)
        for way, options in WAYS.items()
        if isinstance(cell, cells.Attention) or "energies" not in way
    }
    calls, needed = compiled(runs, arguments, train=True)
    return {"bytes": needed, "seconds": timing.take_turns(calls, rounds)}


# ---------------------------------------------------------------------------- common


def make(network: Network, steps: int, case: Case, entries: int = 1) -> Any:
    """Draw parameters, inputs, and a memory for attention."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((*shape, case.size), np.float32)  # noqa: E731
    arrays = (
        network.init(jax.random.key(0)),
        draw(steps, case.batch),
        draw(case.batch, entries),
    )
    return jax.tree.map(lambda a: jnp.asarray(a, case.dtype), arrays)


def compiled(runs: dict[str, Callable], arguments: Any, train: bool) -> Any:
    """Compile `runs` and check that their results agree.

    Returns:
        Calls that wait for their results, and the temporary bytes, both by name.
    """
    _, x, _ = arguments
    if train:
        y = jax.eval_shape(next(iter(runs.values())), *arguments)
        dy = np.random.default_rng(1).standard_normal(y.shape, np.float32)
        runs = {name: training(run) for name, run in runs.items()}
        arguments = (*arguments, jnp.asarray(dy, y.dtype))
    return programs.compiled(runs, arguments, x.size)


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    parts, rows = [f"{stored.conditions('jax')}."], stored.rows
    compiles = [compile_row(name, r) for name, r in rows.items() if "compile" in r]
    if compiles:
        heads = ("network", SCAN, "ours", f"ours / {SCAN}", "again", "fused")
        parts.append(tables.markdown(heads, compiles))
    speeds = [speed_row(row, rows[row]) for row, *_ in rows_of_speed() if row in rows]
    if speeds:
        heads = ("network", SCAN, "function", "cell", FUSED, "function / fused")
        parts.append(tables.markdown(heads, speeds))
    lines = [
        line for name, row in rows.items() if "bytes" in row
        for line in memory_rows(name, row)
    ]  # fmt: skip
    if lines:
        heads = ("network", "stored", "MiB", "share", "ms", "time")
        parts.append(tables.markdown(heads, lines))
    return "\n\n".join(parts)


def compile_row(name: str, row: dict) -> tuple[str, ...]:
    """Format the seconds of `lax.scan`, and those of ours, whose share of it is that of
    the first time.
    """
    seconds = row["compile"]
    own = seconds.get("function", seconds.get("cell"))
    fused = seconds.get(FUSED, (None,))[0]
    return (
        name,
        tables.duration(seconds[SCAN][0]),
        tables.duration(own[0]),
        tables.ratio(own[0] / seconds[SCAN][0]),
        tables.duration(own[1]),
        tables.duration(fused),
    )


def speed_row(name: str, row: dict) -> tuple[str, ...]:
    """Format the milliseconds of `lax.scan`, its time over each of ours, and the speed
    of a function compared with that of the fused operator.
    """
    medians = {who: results.spread(s).median for who, s in row["seconds"].items()}
    ratios = [
        tables.ratio(medians[a] / medians[b] if {a, b} <= medians.keys() else None)
        for a, b in (
            *((SCAN, who) for who in ("function", "cell", FUSED)),
            (FUSED, "function"),
        )
    ]
    return (name, tables.duration(medians[SCAN]), *ratios)


def memory_rows(name: str, row: dict) -> list[tuple[str, ...]]:
    """Format a line for every way to store less, compared with storing all."""
    medians = {way: results.spread(s).median for way, s in row["seconds"].items()}
    return [
        (
            name,
            way,
            f"{size / 2**20:.1f}",
            f"{100 * size / row['bytes']['all']:.0f} %",
            tables.duration(medians[way]),
            tables.ratio(medians[way] / medians["all"]),
        )
        for way, size in row["bytes"].items()
    ]


if __name__ == "__main__":
    typer.run(main)
