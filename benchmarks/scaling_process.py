"""One of the processes that `benchmarks.scaling` times.

It gets a setup from the process that started it, makes updates, tells their losses,
and then times more of them whenever it is told to.
"""

import os
import sys
import time
from multiprocessing.connection import Client
from typing import Any, NamedTuple

import numpy as np

UPDATES = 10  # of a turn
LETTERS = 8  # of every word, so that all batches have one shape
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Setup(NamedTuple):
    """Processes with so many devices and threads each, and the words of a batch."""

    name: str
    processes: int
    devices: int
    threads: int
    words: int
    mpi: bool = False  # whether processes communicate by MPI in place of gloo


def take_part(pipe: Any) -> None:
    """Make updates, say the losses, and time more of them when told."""
    setup, address, hidden = pipe.recv()
    # Processes are not pinned: the thread that communicates needs a core, too.
    os.environ["OSTINATO_NUM_THREADS"] = str(setup.threads)
    if setup.threads == 1:
        os.environ["XLA_FLAGS"] = ONE_THREAD
    from ostinato.apps import memory, training
    from ostinato.apps.devices import Devices, connect
    from ostinato.apps.g2p import data
    from ostinato.apps.g2p.job import Job
    from ostinato.apps.g2p.settings import Settings

    memory.keep()  # as the command does
    connect(setup.processes > 1, *address)
    devices = Devices(setup.devices)
    devices.check_same("")  # as a run begins
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


if __name__ == "__main__":
    with Client((sys.argv[1], int(sys.argv[2]))) as connection:
        take_part(connection)
