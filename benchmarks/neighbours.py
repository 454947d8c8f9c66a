"""Programs that take processor time from the program that is measured.

`python -m benchmarks.neighbours steal 0` interrupts whatever runs on processor 0 at
random moments, as a hypervisor does that lends the core to another machine.
`python -m benchmarks.neighbours spin` keeps a processor busy at normal priority.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from . import ROOT

STOLEN_SHARE = 0.25  # of the time of each processor
BURST_SECONDS = (0.001, 0.008)

KINDS = ("none", "stolen", "busy 1", "busy 2")


@contextlib.contextmanager
def running(kind: str, cpus: Sequence[int]) -> Iterator[None]:
    """Run the neighbours of one of `KINDS` on `cpus`.

    Raises:
        PermissionError: stealing processor time needs privileges.
    """
    if kind == "stolen":
        arguments = [["steal", str(cpu)] for cpu in cpus]
    else:
        arguments = [["spin"]] * (0 if kind == "none" else int(kind.split()[1]))
    command = [sys.executable, "-m", "benchmarks.neighbours"]
    with contextlib.ExitStack() as stack:
        for given in arguments:
            child = subprocess.Popen(
                [*command, *given], stdout=subprocess.PIPE, cwd=ROOT
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            assert child.stdout is not None
            if not child.stdout.readline():
                raise PermissionError(
                    "to steal processor time, run as root or with CAP_SYS_NICE"
                )
        yield


def steal(cpu: int) -> None:
    """Occupy `cpu` in random bursts, for STOLEN_SHARE of the time on average."""
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        os.nice(-20)
    print("at work", flush=True)
    rng = random.Random(cpu)
    while _has_parent():
        burst = rng.uniform(*BURST_SECONDS)
        time.sleep(burst * (1 / STOLEN_SHARE - 1) * rng.uniform(0, 2))
        end = time.perf_counter() + burst
        while time.perf_counter() < end:
            pass


def spin() -> None:
    """Keep a processor busy."""
    print("at work", flush=True)
    while _has_parent():
        for _ in range(100_000):
            pass


_PARENT = os.getppid()


def _has_parent() -> bool:
    return os.getppid() == _PARENT


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["steal", cpu] if cpu.isdecimal():
            steal(int(cpu))
        case ["spin"]:
            spin()
        case _:
            sys.exit(__doc__)
