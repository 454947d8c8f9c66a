"""The main benchmark: `python -m benchmarks.run --mode lstm --rows 'N32H256-*'`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

OUT = Path("out/bench/results.json")


def main(
    mode: Annotated[
        list[str] | None, typer.Option(help="lstm, gru or rnn_tanh. Default: all.")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="Names of rows, or patterns: 'N1*-infer'.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="Vary T, N, H or threads, in place of the table."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Peers to compare with. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each contender. Default: 2.")
    ] = None,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="File for the results.")
    ] = OUT,
    guard: Annotated[
        bool, typer.Option(help="First check that the kernels come near the peak.")
    ] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows in the file, do the rest.")
    ] = False,
) -> None:
    """Time the operator next to its peers, after a check that their results agree.

    Every row is saved when it is done; after Ctrl-C, --resume continues.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sizes = list(sweep or [])
    cpus = sorted(os.sched_getaffinity(0))
    if "threads" in sizes:
        sizes.remove("threads")
        _sweep_threads(len(cpus), mode, peer, rounds, out, resume)
        if not sizes:
            return
        resume = True
    threads = min(threads or 2, len(cpus))
    # Set before any contender is loaded: most read their CPUs only once.
    os.sched_setaffinity(0, cpus[:threads])
    os.environ["OSTINATO_NUM_THREADS"] = str(threads)
    from . import session, tables

    console = tables.console()
    try:
        problems = session.select(mode or [], rows or [], sizes)
        stored = session.begin(out, resume, guard, console)
    except ValueError as error:
        console.print(str(error), style="bold red")
        raise typer.Exit(1) from None
    session.run(problems, peer or [], rounds, threads, out, stored, console)


def _sweep_threads(
    cpus: int,
    mode: list[str] | None,
    peer: list[str] | None,
    rounds: int,
    out: Path,
    resume: bool,
) -> None:
    """Run one process per number of threads, which most libraries read only once."""
    counts = sorted({*(2**k for k in range(cpus.bit_length())), cpus})
    for threads in counts:
        command = [sys.executable, "-m", "benchmarks.run", f"--threads={threads}"]
        command += ["--no-guard"]
        command += ["--rows=N32H256-infer", "--rows=N32H256-train", f"--out={out}"]
        command += [f"--mode={name}" for name in mode or []]
        command += [f"--peer={name}" for name in peer or []]
        command += [f"--rounds={rounds}"] + ["--resume"] * resume
        if status := subprocess.run(command).returncode:
            raise typer.Exit(status)
        resume = True


if __name__ == "__main__":
    typer.run(main)
