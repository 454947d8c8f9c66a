"""Benchmark of updates on several devices: `python -m benchmarks.scaling`.

Updates of the CTC model of `train g2p` in processes that share each batch, next to one
process, and with as many words for each device (weak scaling). The losses are compared
before anything is timed; the table goes to docs/results.md.
"""

import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from . import results, tables
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/scaling.json")
MARK = "scaling"
UPDATES = 10  # of a turn
LETTERS = 8  # of every word, so that all batches have one shape
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
HEADS = ("run", "words a device", "ms an update", "words/s", "over one process")


class Setup(NamedTuple):
    """Processes with so many devices and threads each, and the words of a batch."""

    name: str
    processes: int
    devices: int
    threads: int
    words: int


SETUPS = (
    Setup("1 process x 2 threads", 1, 1, 2, 128),
    Setup("2 processes x 1 thread", 2, 1, 1, 128),
    Setup("1 process x 2 threads, large batches", 1, 1, 2, 1024),
    Setup("2 processes x 1 thread, large batches", 2, 1, 1, 1024),
    Setup("1 device, 1 thread", 1, 1, 1, 64),
    Setup("2 devices: 2 processes x 1 thread", 2, 1, 1, 128),
    Setup("4 emulated devices: 2 processes x 2 devices", 2, 2, 1, 256),
)
FIRST = {setup.name: SETUPS[i // 2 * 2].name for i, setup in enumerate(SETUPS[:4])}
FIRST |= {setup.name: SETUPS[4].name for setup in SETUPS[4:]}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each run.")] = 5,
    hidden: Annotated[int, typer.Option(min=1, help="Units a direction.")] = 128,
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time updates of one process and of several."""
    stored = Stored(out)
    if measure:
        stored.begin(hidden=hidden)
        for name, found in seconds(rounds, hidden).items():
            stored.add(name, found)
    stored.show(text, MARK, page)


def seconds(rounds: int, hidden: int) -> dict[str, list[float]]:
    """Return the seconds of an update in every turn of every setup.

    All processes are started first; then the setups take turns.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Any]] = {}
    known: dict[int, list[float]] = {}
    for setup in SETUPS:
        port, ends = free_port(), [spawn.Pipe() for _ in range(setup.processes)]
        pipes[setup.name] = [ours for ours, _ in ends]
        for process, (_, theirs) in enumerate(ends):
            arguments = theirs, setup, process, port, hidden
            spawn.Process(target=_take_part, args=arguments, daemon=True).start()
        for pipe in pipes[setup.name]:  # the same words give the same losses
            losses = pipe.recv()
            wanted = known.setdefault(setup.words, losses)
            np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        print(f"ready: {setup.name}", flush=True)
    found: dict[str, list[float]] = {setup.name: [] for setup in SETUPS}
    for name in rounds * list(pipes):
        for pipe in pipes[name]:
            pipe.send("go")
        found[name].append(max(pipe.recv() for pipe in pipes[name]))
    for pipe in sum(pipes.values(), []):
        pipe.send("end")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _take_part(pipe: Any, setup: Setup, process: int, port: int, hidden: int) -> None:
    """Make updates, say the losses, and time more of them when told."""
    # Processes are not pinned: the thread that communicates needs a core, too.
    os.environ["OSTINATO_NUM_THREADS"] = str(setup.threads)
    if setup.threads == 1:
        os.environ["XLA_FLAGS"] = ONE_THREAD
    from ostinato.apps import training
    from ostinato.apps.devices import Devices, connect
    from ostinato.apps.g2p import data
    from ostinato.apps.g2p.job import Job
    from ostinato.apps.g2p.settings import Settings

    address = f"127.0.0.1:{port}", setup.processes, process
    connect(setup.processes > 1, *(address if setup.processes > 1 else ()))
    devices = Devices(setup.devices)
    words = {w: p for w, p in data.read_cmudict().items() if len(w) == LETTERS}
    settings = Settings.choose(
        epochs=1, hidden=hidden, layers=2, batch=setup.words, buckets=1
    )
    job = Job(settings, data.split(words))
    state = training.init_state(0, job.init)
    state = training.State(0, *devices.replicate(state[1:]))
    batches = list(job.epoch(0))[:UPDATES]

    def turn() -> list[float]:
        nonlocal state
        losses = []
        for batch in batches:
            state, told = training.update(
                state,
                devices.split(batch),
                1e-3,
                devices.clock(0.0),
                loss=job.loss,
                seed=0,
                everywhere=devices.everywhere,
            )
            losses.append(float(np.asarray(told)[0]))
        return losses

    pipe.send(turn())
    try:
        while pipe.recv() == "go":
            begin = time.perf_counter()
            turn()
            pipe.send((time.perf_counter() - begin) / len(batches))
    except EOFError:
        return  # the parent ended


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    said = (
        f"{stored.conditions('jax')}: 2 layers x {stored.machine['hidden']} units each "
        f"way, words of {LETTERS} letters."
    )
    medians = {k: results.spread(v).median for k, v in stored.rows.items()}
    lines = [
        (
            setup.name,
            f"{setup.words // (setup.processes * setup.devices)}",
            tables.duration(medians[setup.name]),
            f"{setup.words / medians[setup.name]:,.0f}",
            tables.ratio(medians[setup.name] / medians[FIRST[setup.name]]),
        )
        for setup in SETUPS
    ]
    return f"{said}\n\n{tables.markdown(HEADS, lines)}"


if __name__ == "__main__":
    typer.run(main)
