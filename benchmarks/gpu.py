"""Benchmark of the kernels of GPUs: `python -m benchmarks.gpu`, on a machine with one.

First linear recurrences are compared with `lax.scan` and with XLA's associative scan,
then element-wise cells with XLA's loop, and networks with cuDNN; results are checked
before anything is timed. The floor is the time of `a + b`, which reads two arrays and
writes one, by the number of arrays that a recurrence has to move. Then come the tools
of compute-sanitizer, where that is installed, on the trials of a few texts, and the
trials of all texts. Those of the rows before have run by then, since no kernel runs
before its trial.

Every row is one line of JSON, written when it is done, and so is a row that fails. A
row that the time does not reach is left for `--resume`, which leaves out those that the
file has, and repeats those that failed.
"""

import contextlib
import functools as ft
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import ostinato as ost
from ostinato._cuda import check, kernels, plan
from ostinato._linear import cuda
from ostinato._rnn import cuda as rnn_cuda
from ostinato.apps.bench import timing

from . import gpu_cells, gpu_networks, linear

OUT = Path("out/bench/gpu.jsonl")
SIZES = {
    "N64T1000H512": (64, 1000, 512),
    "N512T200H1024": (512, 200, 1024),
    "N8T1000H256": (8, 1000, 256),
    "N1T100000H64": (1, 100_000, 64),
    "N1T1000000H1": (1, 1_000_000, 1),
}
DTYPES = ("float32", "bfloat16", "float64")
KINDS = ("infer", "train")
ADD = "a + b"
LIMIT = 300  # seconds of a trial
SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck")
# Of one block and of clusters, forward and backward.
CHECKED = tuple(
    text(plan.RnnPlan(mode, dtype, units, cluster, 1, 1))
    for mode, dtype, units, cluster in (
        ("lstm", "bfloat16", 32, 1),
        ("gru", "float32", 128, 2),
        ("rnn_tanh", "bfloat16", 32, 1),
        ("slstm", "float32", 128, 2),
    )
    for text in (kernels.recurrent, kernels.recurrent_backward)
)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    seconds: Annotated[
        float, typer.Option(help="No row begins after so many seconds.")
    ] = 500.0,
    backend: Annotated[str, typer.Option(help="Backend to measure.")] = "cuda",
    out: Annotated[Path, typer.Option(dir_okay=False, help="File for the rows.")] = OUT,
    resume: Annotated[
        bool, typer.Option(help="Keep the rows of the file, and measure others.")
    ] = False,
) -> None:
    """Time linear recurrences, cells and networks, then try all kernels."""
    end = time.monotonic() + seconds
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if resume and out.exists() else []
    known = {row["name"] for row in map(json.loads, lines) if "error" not in row}
    with out.open("a" if resume else "w") as file:
        for name, run in _rows(backend, rounds):
            if name in known or time.monotonic() > end:
                continue
            try:
                row = {"name": name} | run()
            except Exception as error:  # the other rows are measured all the same
                row = {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}
            for to in (file, None):
                print(json.dumps(row), file=to, flush=True)


def _rows(backend: str, rounds: int) -> Iterator[tuple[str, Any]]:
    """Yield the name of each row and the function that measures it."""
    yield "machine", _machine
    for dtype in DTYPES:
        for size, shape in SIZES.items():
            for kind in KINDS:
                name = f"{size}-{dtype}-{kind}"
                yield name, ft.partial(recurrence, backend, rounds, dtype, shape, kind)
    yield from gpu_cells.rows(backend, rounds)
    yield from gpu_networks.rows(backend, rounds)
    if backend != "cuda":
        return
    checked = [(kernels.TEXTS[0], cuda.TRIAL)]
    checked += [(text, rnn_cuda.TRIAL) for text in CHECKED]
    for tool in TOOLS if shutil.which(SANITIZER) else ():
        before = (SANITIZER, "--tool", tool, "--error-exitcode", "9")
        for text, module in checked:
            yield f"{tool}/{text}", ft.partial(trial, text, module, before)
    tried = [(text, cuda.TRIAL) for text in kernels.TEXTS]
    tried += [(text, rnn_cuda.TRIAL) for text in kernels.RECURRENT_TEXTS]
    for text, module in tried:
        yield f"trial/{text}", ft.partial(trial, text, module)


def _machine() -> dict:
    device = jax.devices()[0]
    status = ost.backends()["cuda"].detail
    return {"device": device.device_kind, "jax": jax.__version__, "cuda": status}


def trial(text: kernels.Text, module: str, before: tuple[str, ...] = ()) -> dict:
    """Return what the trial of a text, by a module, says, and the end of its errors.

    A tool of `before` runs it.
    """
    command = [*before, *check.command(module, text.definitions)]
    # This process may already hold most of the GPU's memory.
    given = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=told, stderr=errors, env=given)
        try:
            code = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = f"no end within {LIMIT} s"
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)  # where the GPU hangs, it may never end
        told.seek(0)
        errors.seek(0)
        return {
            "code": code,
            "verdict": told.read().splitlines()[-3:],
            "errors": errors.read()[-1000:],
        }


def recurrence(
    backend: str, rounds: int, dtype: str, shape: tuple[int, ...], kind: str
) -> dict:
    """Return the seconds of each contender in each round, and the floor."""
    with jax.enable_x64(dtype == "float64"):
        return _recurrence(backend, rounds, dtype, shape, kind)


def _recurrence(
    backend: str, rounds: int, dtype: str, shape: tuple[int, ...], kind: str
) -> dict:
    rng = np.random.default_rng(0)
    draw = lambda array: jnp.asarray(array, dtype)  # noqa: E731
    a = draw(rng.random(shape))
    b, dy = (draw(rng.standard_normal(shape)) for _ in "bd")
    given = (a, b) if kind == "infer" else (a, b, dy)

    def ours(a: Any, b: Any) -> Any:
        return ost.linear_recurrence(a, b, backend=backend).h

    def by_xla(a: Any, b: Any) -> Any:
        return ost.linear_recurrence(a, b, backend="xla").h

    runs = {linear.OURS: ours, "xla": by_xla}
    if shape[1] <= 1000 and dtype != "bfloat16":  # which a loop rounds at every step
        runs[linear.SCAN] = linear.by_scan
    if kind == "train":
        runs = {name: linear.training(run) for name, run in runs.items()}
    calls, needed = linear.compiled(runs, given, shape[1])
    add = jax.jit(jnp.add)
    calls[ADD] = lambda: jax.block_until_ready(add(a, b))
    taken = timing.take_turns(calls, rounds)
    median = {name: float(np.median(each)) for name, each in taken.items()}
    floor = median[ADD] * linear.ARRAYS[kind] / linear.ARRAYS["infer"]
    return {
        "median": median,
        "floor": floor,
        "ours/floor": median[linear.OURS] / floor,
        "xla/ours": median["xla"] / median[linear.OURS],
        "bytes": needed,
        "seconds": taken,
    }


if __name__ == "__main__":
    typer.run(main)
