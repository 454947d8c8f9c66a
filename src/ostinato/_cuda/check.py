"""Trials of kernels: a kernel runs here only after it has proved itself once.

A child process runs known cases with the kernels of one text, and compares them with
XLA. A result that is wrong, a crash or a hang disables the text on this kind of GPU.
The verdict is kept in a file, until the text, the compiler or the driver changes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax

from . import cache, nvrtc
from .device import Gpu
from .kernels import Text

START_LIMIT = 600.0
"""The seconds until a trial has to be ready: JAX starts, and XLA computes."""

LIMIT = 60.0
"""The seconds of the kernels, which are compiled by then; after these they hang."""

PLATFORM = "gpu"
"""Where JAX runs a trial; tests put another one in its place."""

_KILLED = 10.0  # seconds that a process takes to die

READY = "ready"
"""The line that a trial prints before it runs the first kernel.

What fails before says nothing about kernels, and is tried again by the next process.
"""
# Nor does what ends a process from outside: a user, a scheduler, a lack of memory.
_NAMES = ("SIGINT", "SIGTERM", "SIGKILL", "SIGHUP")  # Windows lacks the last two
_OUTSIDE = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "MemoryError")

_lock = threading.Lock()
_verdicts: dict[str, str] = {}  # by key: why a text is disabled, or ""
_tried: dict[str, Text] = {}  # by key, in this process
_in_trial = _is_ready = False


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
    found = {}
    for text in dict.fromkeys((*texts, *list(_tried.values()))):
        key = _key(text, gpu)
        verdict = _verdicts.get(key) or _stored(key)
        if verdict:
            found[text] = verdict
    return found


def report(trial: Callable[..., str], *arguments: Any) -> None:
    """Run a trial in a process of its own, and print what it says.

    The last line is JSON: the verdict, and whether it says something about kernels.
    """
    begin_trial()
    try:
        platform = jax.default_backend()
        if platform != PLATFORM:
            raise RuntimeError(f"JAX runs on the {platform}")
        verdict, final = trial(*arguments), True
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        verdict = f"their trial ended with an error: {type(error).__name__}: {text}"
        final = _is_ready and not any(each in verdict for each in _NO_MEMORY)
    print(json.dumps([verdict[:500], final]))


def begin_trial() -> None:
    """Let kernels run unproved in this process, which is their trial."""
    global _in_trial
    _in_trial = True
    if os.name == "posix":  # else all memory of a crash would be written to a file
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def ready() -> None:
    """Say that everything is compiled, and that kernels run from now on."""
    global _is_ready
    _is_ready = True
    print(READY, flush=True)


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of a trial; see `failure` for the arguments."""
    return [sys.executable, "-m", module, *arguments]


def _key(text: Text, gpu: Gpu) -> str:
    compiler = nvrtc.find().compiler
    version = "" if compiler is None else compiler.version
    code = text.key(gpu.arch, version)
    others = gpu.name, gpu.driver, jax.__version__, _sources()
    return cache.key(code, *others) + ".verdict"


@functools.cache
def _sources() -> str:
    """Return what stands for the code that lays arrays out and launches kernels."""
    package = Path(__file__).parents[1]
    files = (p.relative_to(package) for p in sorted(package.rglob("*.py")))
    texts = ((package / p).read_text("utf-8") for p in files if "cuda" in str(p))
    return cache.key(*texts)


def _stored(key: str) -> str | None:
    data = cache.load(key)
    return None if data is None else json.loads(data)


def _try(key: str, text: Text, module: str, case: Callable[[], bytes] | None) -> str:
    """Run a trial; return why it failed, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: Sequence[str] = text.definitions
        if case is not None:
            path = Path(folder) / "case"
            try:
                path.write_bytes(case())
            except nvrtc.CompileError as error:
                return f"NVRTC refuses them: {str(error).splitlines()[0]}"
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
    environment["JAX_PLATFORMS"] = "cuda,cpu"
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        try:
            child = subprocess.Popen(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except (OSError, TypeError, ValueError) as error:
            return f"no other process could be started: {error}", False
        try:
            limit, lines = _wait(child, output)
        finally:
            if child.poll() is None:
                # Left alone then: where the GPU hangs, its process may never end.
                child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_KILLED)
        is_ready = READY in lines
        if limit is not None:
            return f"their trial did not end within {limit:g} s", is_ready
        if child.returncode == 0:
            with contextlib.suppress(ValueError, IndexError):
                verdict, final = json.loads(lines[-1])
                return verdict, final
        errors.seek(0)
        last = " ".join(errors.read().strip().splitlines()[-1:])[:300]
    if child.returncode >= 0:
        return f"their trial ended with an error: {last}".rstrip(": "), is_ready
    by = -child.returncode
    verdict = f"their trial ended with signal {by}: {last}".rstrip(": ")
    return verdict, is_ready and by not in _OUTSIDE


def _wait(child: subprocess.Popen, output: IO[str]) -> tuple[float | None, list[str]]:
    """Wait for a trial; return the limit that it overran, or None, and its lines.

    Time in which this process stood still, too, does not count.
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
            return limit, lines
        time.sleep(0.02)
