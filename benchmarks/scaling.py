"""Benchmark of updates on several devices: `python -m benchmarks.scaling`.

Updates of the CTC model of `train g2p` in processes that share each batch, next to one
process, and with as many words for each device (weak scaling). The losses are compared
before anything is timed; the table goes to docs/results.md.
"""

import os
import shutil
import socket
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from . import results, tables
from .scaling_process import LETTERS, Setup
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/scaling.json")
MARK = "scaling"
MPIEXEC = ("mpiexec", "--bind-to", "none", "-n")  # Open MPI's, which pins otherwise
HEADS = ("run", "words a device", "ms an update", "words/s", "over one process")


ONE, LARGE, WEAK = (
    Setup("1 process x 2 threads", 1, 1, 2, 128),
    Setup("1 process x 2 threads, large batches", 1, 1, 2, 1024),
    Setup("1 device, 1 thread", 1, 1, 1, 64),
)
FIRST = {  # each next to what it is compared with
    ONE: ONE,
    Setup("2 processes x 1 thread", 2, 1, 1, 128): ONE,
    Setup("2 processes x 1 thread, MPI", 2, 1, 1, 128, mpi=True): ONE,
    LARGE: LARGE,
    Setup("2 processes x 1 thread, large batches", 2, 1, 1, 1024): LARGE,
    WEAK: WEAK,
    Setup("2 devices: 2 processes x 1 thread", 2, 1, 1, 128): WEAK,
    Setup("2 devices: 2 processes x 1 thread, MPI", 2, 1, 1, 128, mpi=True): WEAK,
    Setup("4 emulated devices: 2 processes x 2 devices", 2, 2, 1, 256): WEAK,
}


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
    pipes: dict[str, list[Any]] = {}
    known: dict[int, list[float]] = {}
    with Listener(("127.0.0.1", 0)) as listener:
        for setup in FIRST:
            if setup.mpi and not has_mpi():
                print(f"without MPI, or its wrapper, there is no row {setup.name!r}")
                continue
            pipes[setup.name] = start(setup, listener, hidden)
            for pipe in pipes[setup.name]:  # the same words give the same losses
                losses = pipe.recv()
                wanted = known.setdefault(setup.words, losses)
                np.testing.assert_allclose(losses, wanted, rtol=1e-4)
            print(f"ready: {setup.name}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in pipes}
    for name in rounds * list(pipes):
        for pipe in pipes[name]:
            pipe.send("go")
        found[name].append(max(pipe.recv() for pipe in pipes[name]))
    for pipe in sum(pipes.values(), []):
        pipe.send("end")
    return found


def start(setup: Setup, listener: Listener, hidden: int) -> list[Any]:
    """Start the processes of a setup; return a connection to each."""
    host, port = listener.address
    command = [sys.executable, "-m", "benchmarks.scaling_process", str(host), str(port)]
    count, coordinator = setup.processes, f"127.0.0.1:{free_port()}"
    addresses: list[Any] = [(coordinator, count, i) for i in range(count)]
    if count == 1 or setup.mpi:  # which numbers its processes, and JAX finds them
        addresses = [()] * count
    launched = [[*MPIEXEC, str(count), *command]] if setup.mpi else count * [command]
    collectives = "mpi" if setup.mpi else "gloo"
    environment = os.environ | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": collectives}
    for each in launched:
        subprocess.Popen(each, env=environment, stdin=subprocess.DEVNULL)
    pipes = [listener.accept() for _ in range(count)]
    for pipe, address in zip(pipes, addresses, strict=True):
        pipe.send((setup, address, hidden))
    return pipes


def has_mpi() -> bool:
    """Return whether JAX can use MPI: it is there, and its wrapper for JAX, too."""
    if "MPITRAMPOLINE_LIB" not in os.environ or shutil.which(MPIEXEC[0]) is None:
        return False
    tried = subprocess.run([*MPIEXEC, "1", "true"], capture_output=True, check=False)
    return tried.returncode == 0  # it is 1 for a user whom MPI refuses


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
            tables.ratio(medians[setup.name] / medians[first.name]),
        )
        for setup, first in FIRST.items()
        if setup.name in medians
    ]
    return f"{said}\n\n{tables.markdown(HEADS, lines)}"


if __name__ == "__main__":
    typer.run(main)
