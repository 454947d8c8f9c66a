"""Benchmark of long sequences: `python -m benchmarks.long`.

The gradient of one sequence of a million steps, stored, recomputed, in segments and
truncated; every way in a process of its own, whose memory is measured. The table goes
to docs/results.md.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from tolerance import assert_close

import ostinato as ost

from . import tables
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/long.json")
MARK = "long"
FEATURES, UNITS, CHUNK = 8, 32, 1000
SPEC = ost.RNNSpec("lstm", FEATURES, UNITS)
HEADS = ("way", "gradients reach", "seconds", "MiB at most", "MiB of the program")

Loss = Callable[[Any, Any], Any]


def _rnn(**options: Any) -> Loss:
    return lambda weights, x: jnp.mean(ost.rnn(SPEC, weights, x, **options).y ** 2)


def _segments(weights: Any, x: Any) -> Any:
    (params,) = ost.unpack_weights(weights, SPEC)
    cell = ost.cells.LSTM(FEATURES, UNITS)
    states = cell.initial_state(1, x.dtype)
    out = ost.recurrent_net(cell, x, states, params=params, segment_length="auto")
    return jnp.mean(out.outputs**2)


def _truncated(detach_every: int) -> Loss:
    def loss(weights: Any, x: Any) -> Any:
        def step(state: Any, chunk: Any) -> Any:
            y, state = ost.rnn(SPEC, weights, chunk, state)
            return state, jnp.mean(y**2)

        state = (jnp.zeros((1, 1, UNITS), x.dtype),) * 2
        chunks = x.reshape(-1, 1, CHUNK, FEATURES)
        _, losses = ost.tbptt(step, state, chunks, detach_every=detach_every)
        return losses.mean()

    return loss


WAYS: dict[str, tuple[str, Loss]] = {
    "`rnn`": ("all steps", _rnn()),
    "`rnn`, recompute": ("all steps", _rnn(recompute=True)),
    '`recurrent_net`, `segment_length="auto"`': ("all steps", _segments),
    "`tbptt` over `rnn`, all chunks": ("all steps", _truncated(10**9)),
    "`tbptt`, 10 chunks of 1000": ("10,000 steps", _truncated(10)),
    "`tbptt`, 1 chunk of 1000": ("1000 steps", _truncated(1)),
}


class Measured(NamedTuple):
    """The seconds of a gradient, and bytes: of the process at most, of the program."""

    seconds: float
    peak: int
    program: int


def main(
    steps: Annotated[int, typer.Option(min=CHUNK, help="Steps.")] = 1_000_000,
    only: Annotated[str, typer.Option(help="A part of the names of ways.")] = "",
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Measure time and memory of the gradient of a long sequence.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin(steps=steps)
        check()
        for way in (way for way in WAYS if only in way):
            stored.add(way, in_a_process(way, steps))
            print(*line(way, stored.rows[way]), flush=True)
    stored.show(text, MARK, page)


def check() -> None:
    """Check on fewer steps that all ways of the whole gradient agree."""
    weights, x = arguments(3 * CHUNK)
    ways = [loss for reach, loss in WAYS.values() if reach == "all steps"]
    first, *others = (jax.jit(jax.grad(loss))(weights, x) for loss in ways)
    for other in others:
        assert_close(other, first, terms=3 * CHUNK * UNITS)


def arguments(steps: int) -> tuple[Any, Any]:
    """Draw weights, and one sequence `[1, steps, FEATURES]`."""
    x = np.random.default_rng(0).standard_normal((1, steps, FEATURES), np.float32)
    return ost.init_weights(jax.random.key(0), SPEC), jnp.asarray(x)


def in_a_process(way: str, steps: int) -> Measured:
    """Measure one way in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(gradient, (way, steps))


def gradient(way: str, steps: int) -> Measured:
    """Compile the gradient, run it twice, and measure the second run."""
    weights, x = arguments(steps)
    compiled = jax.jit(jax.grad(WAYS[way][1])).lower(weights, x).compile()
    before = _status("VmRSS")
    jax.block_until_ready(compiled(weights, x))
    start = time.perf_counter()
    jax.block_until_ready(compiled(weights, x))
    seconds = time.perf_counter() - start
    program = compiled.memory_analysis().temp_size_in_bytes
    return Measured(seconds, _status("VmHWM") - before, program)


def _status(name: str) -> int:
    """Return an entry of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found)


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    said = (
        f"{stored.conditions('jax')}: the gradient of an LSTM of {UNITS} units over "
        f"one sequence of {stored.machine['steps']:,} steps of {FEATURES} features, "
        "float32."
    )
    rows = [line(way, row) for way, row in stored.rows.items()]
    return f"{said}\n\n{tables.markdown(HEADS, rows)}"


def line(way: str, row: Sequence[float]) -> tuple[str, ...]:
    """Format the measured time and memory of a way."""
    seconds, peak, program = row
    mib = (f"{size / 2**20:,.0f}" for size in (peak, program))
    return way, WAYS[way][0], f"{seconds:.1f}", *mib


if __name__ == "__main__":
    typer.run(main)
