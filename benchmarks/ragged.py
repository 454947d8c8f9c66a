"""Benchmark of `ragged.vmap` and padding: `python -m benchmarks.ragged --docs docs`."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import track
from tolerance import assert_close

from ostinato.apps.bench import timing

from . import ragged_models, ragged_report, results, tables
from .ragged_models import MODELS, Data, build, comparable, make_data

OUT = Path("out/bench/ragged.json")
KINDS = ("infer", "train")
RATIO = 5.3  # padding ratio of the table
RATIOS = (1.0, 1.5, 2.0, 3.0, 5.3, 7.0, 10.0)  # padding ratios of the picture
COMPILATIONS = 3


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(MODELS)}. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    sweep: Annotated[
        bool, typer.Option(help="Also vary the padding ratio, for the picture.")
    ] = True,
    out: Annotated[Path, typer.Option(help="File for the results.")] = OUT,
    docs: Annotated[
        Path | None, typer.Option(help="Folder for the table and the picture.")
    ] = None,
) -> None:
    """Check that both give the same results, then time them in turns."""
    if unknown := set(model or ()) - set(MODELS):
        raise typer.BadParameter(
            f"{', '.join(unknown)}: not one of {', '.join(MODELS)}"
        )
    ratios = RATIOS if sweep else (RATIO,)
    data = {ratio: make_data(ratio) for ratio in ratios}
    todo = [(r, n, k) for r in ratios for n in model or MODELS for k in KINDS]
    console, rows = tables.console(), []
    for ratio, name, kind in track(todo, console=console, transient=True):
        row = measure(name, kind, data[ratio], rounds, compile_too=ratio == RATIO)
        rows.append({"ratio": ratio, **row})
        console.print(ragged_report.line(rows[-1]))
    out.parent.mkdir(parents=True, exist_ok=True)
    measured = {"machine": results.machine(), "rows": rows}
    out.write_text(json.dumps(measured, indent=1) + "\n")
    if docs is not None:
        ragged_report.write(measured, docs, RATIO)


def measure(
    name: str, kind: str, data: Data, rounds: int, compile_too: bool
) -> dict[str, Any]:
    """Measure one kind of one model.

    Raises:
        AssertionError: the results of the two contenders differ.
    """
    built = build(MODELS[name], kind, data)
    seconds, calls = {}, {}
    for contender, (function, arguments) in built.items():
        compiled = compile_seconds(function, arguments, COMPILATIONS * compile_too)
        seconds[contender] = compiled
        calls[contender] = _call(jax.jit(function), arguments)
    got, want = (comparable(call()) for call in calls.values())
    for a, b in zip(got, want, strict=True):
        terms = ragged_models.LONGEST * ragged_models.D * ragged_models.BATCH
        assert_close(a, b, terms=terms, what=f"{name}, {kind}")
    turns = timing.take_turns(calls, rounds)
    return {
        "model": name,
        "kind": kind,
        "padding_ratio": data.padding_ratio,
        "seconds": turns,
        "compile_seconds": seconds,
    }


def compile_seconds(function: Callable, arguments: tuple, times: int) -> list[float]:
    """Return the seconds from the Python function to a program, `times` times."""
    seconds = []
    for _ in range(times):
        fresh = lambda *args: function(*args)  # noqa: E731, not yet in JAX's cache
        start = time.perf_counter()
        jax.jit(fresh).lower(*arguments).compile()
        seconds.append(time.perf_counter() - start)
    return seconds


def _call(function: Callable, arguments: tuple) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*arguments))


if __name__ == "__main__":
    typer.run(main)
