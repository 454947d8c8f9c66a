"""Trials of kernels: a kernel runs here only after it has proved itself once.

A child process runs known cases with the kernels of one text, and compares them with
XLA. A result that is wrong, a crash or a hang disables the text on this kind of GPU.
The verdict is kept in a file, until the text, the compiler or the driver changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import jax

from . import cache, nvrtc
from .device import Gpu
from .kernels import Text

START_LIMIT = 600.0
"""The seconds until a trial has to be ready: JAX starts, and XLA computes."""

LIMIT = 60.0
"""The seconds of the kernels, after which they count as hung."""

_KILLED = 10.0  # seconds that a process takes to die

READY = "ready"
"""The line that a trial prints before it runs the first kernel.

What fails before says nothing about kernels, and is tried again by the next process.
"""

_lock = threading.Lock()
_verdicts: dict[str, str] = {}  # by key: why a text is disabled, or ""
_tried: dict[str, Text] = {}  # by key, in this process
_in_trial = False


def failure(
    text: Text, gpu: Gpu, module: str, case: Callable[[], bytes] | None = None
) -> str | None:
    """Return why a text is disabled on a kind of GPU; None if it passed its trial.

    Args:
        text: the kernels.
        gpu: where they run.
        module: the program of the trial, which takes the definitions of the text, or
            the name of a file.
        case: makes what stands in the file.
    """
    if _in_trial:
        return None
    key = _key(text, gpu)
    with _lock:
        if key not in _verdicts:
            known, _tried[key] = _stored(key), text
            _verdicts[key] = _try(key, text, module, case) if known is None else known
            if _verdicts[key]:
                warnings.warn(
                    f"kernels of {text} are disabled on {gpu.name}, and XLA runs their "
                    f"calls: {_verdicts[key]}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _verdicts[key] or None


def failures(texts: Sequence[Text], gpu: Gpu) -> dict[Text, str]:
    """Return the texts that are known to be disabled, and why, without any trial.

    Beside `texts`, these are the ones that this process has tried.
    """
    with _lock:
        tried = list(_tried.values())
    found = {}
    for text in dict.fromkeys((*texts, *tried)):
        key = _key(text, gpu)
        verdict = _verdicts.get(key) or _stored(key)
        if verdict:
            found[text] = verdict
    return found


def begin_trial() -> None:
    """Let kernels run unproved in this process, which is their trial."""
    global _in_trial
    _in_trial = True
    if os.name == "posix":  # else all memory of a crash would be written to a file
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of a trial; see `failure` for the arguments."""
    return [sys.executable, "-m", module, *arguments]


def _key(text: Text, gpu: Gpu) -> str:
    compiler = nvrtc.find().compiler
    version = "" if compiler is None else compiler.version
    code = text.key(gpu.arch, version)
    return cache.key(code, gpu.name, gpu.driver, jax.__version__) + ".verdict"


def _stored(key: str) -> str | None:
    data = cache.load(key)
    return None if data is None else json.loads(data)


def _try(key: str, text: Text, module: str, case: Callable[[], bytes] | None) -> str:
    """Run a trial; return why it failed, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: Sequence[str] = text.definitions
        if case is not None:
            path = Path(folder) / "case"
            path.write_bytes(case())
            arguments = [str(path)]
        verdict, final = _outcome(command(module, arguments))
    if not final:
        return f"the trial did not begin: {verdict}"
    cache.store(key, json.dumps(verdict).encode())
    path = cache.path_of(key)
    if verdict and path is not None:
        verdict += f"; remove {path} to try again"
    return verdict


def _outcome(arguments: Sequence[str]) -> tuple[str, bool]:
    """Return the verdict of a trial, and whether it says something about kernels."""
    environment = dict(os.environ)
    # The parent already holds most of the GPU's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.Popen(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        except OSError as error:
            return f"no other process could be started: {error}", False
        limit, lines = _wait(child, output)
        if limit is not None:
            return f"their trial did not end within {limit:g} s", READY in lines
        if child.returncode == 0 and lines:
            return json.loads(lines[-1]), True
        errors.seek(0)
        last = " ".join(errors.read().strip().splitlines()[-1:])[:300]
    how = f"signal {-child.returncode}" if child.returncode < 0 else "an error"
    return f"their trial ended with {how}: {last}".rstrip(": "), READY in lines


def _wait(child: subprocess.Popen, output: IO[str]) -> tuple[float | None, list[str]]:
    """Wait for a trial; return the limit that it overran, or None, and its lines.

    One that overruns is killed, and left alone: where the GPU hangs, its process may
    never end. Time in which this process stood still, too, does not count.
    """
    limit, waited, last = START_LIMIT, 0.0, time.monotonic()
    while True:
        ended = child.poll() is not None
        output.seek(0)
        lines = output.read().splitlines()
        if ended:
            return None, lines
        if limit == START_LIMIT and READY in lines:
            limit, waited = LIMIT, 0.0
        now = time.monotonic()
        waited, last = waited + min(now - last, 1.0), now
        if waited > limit:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_KILLED)
            return limit, lines
        time.sleep(0.02)
