"""Benchmark of ostinato next to torch while other programs use the machine.

`python -m benchmarks.disturbed` times rows in blocks, as `benchmarks.run` does, while
other programs take processor time (see `neighbours`), and then in turns of one call
each, where torch's threads keep spinning for some milliseconds after torch's call, on a
core that ostinato would use.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from . import neighbours

ROWS = (
    "lstm/N16H128-infer",
    "lstm/N32H256-infer",
    "lstm/N32H256-train",
    "gru/N32H256-train",
    "gru/N32H256-L2-bi-train",
)
TURNS = "turns"
KINDS = (*neighbours.KINDS, TURNS)
BLOCK_SECONDS = 0.3


def main(
    rows: Annotated[
        list[str] | None, typer.Option(help=f"Rows such as {ROWS[0]}. Default: a few.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(KINDS)}. Default: all.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Duration of each kind of each row.")
    ] = 6,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of both contenders.")
    ] = 2,
) -> None:
    """Print the mean times of ostinato and torch, and the ratio of torch's to ours."""
    kinds = [known for known in KINDS if known in (kind or KINDS)]
    if unknown := set(kind or ()) - set(kinds):
        text = f"{', '.join(unknown)}: not one of {', '.join(KINDS)}"
        raise typer.BadParameter(text)
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    # Set before any contender is loaded: most read their CPUs only once.
    os.sched_setaffinity(0, cpus)
    os.environ["OSTINATO_NUM_THREADS"] = str(len(cpus))
    from ostinato.apps.bench import timing
    from ostinato.apps.bench.peers import OURS
    from ostinato.apps.bench.problem import make_data

    from . import results, tables
    from . import rows as names

    heads = ("row", "neighbours", "ours", "over none", "torch", "over none", "ratio")
    lines = []
    for row in rows or ROWS:
        problem = names.row(*row.split("/"))
        contenders = [OURS, "torch"]
        data = make_data(problem)
        good = timing.checked(problem, data, contenders, len(cpus)).good
        calls = {name: good[name].call for name in contenders}
        alone: dict[str, float] = {}
        for name in kinds:
            with neighbours.running("none" if name == TURNS else name, cpus):
                block = 0 if name == TURNS else BLOCK_SECONDS
                means = mean_seconds(calls, seconds, block)
            if name == "none":
                alone = means
            cells = [row, name]
            for contender in contenders:
                mean, first = means[contender], alone.get(contender)
                cells += [tables.duration(mean), tables.ratio(first and mean / first)]
            torch_over_ours = means["torch"] / means[OURS]
            lines.append([*cells, tables.ratio(torch_over_ours)])
            print(" ".join(lines[-1]), flush=True)
    print(f"\n{results.machine()['cpu']}, {len(cpus)} threads; milliseconds\n")
    print(tables.markdown(heads, lines))


def mean_seconds(
    calls: Mapping[str, Callable[[], Any]], seconds: float, block: float
) -> dict[str, float]:
    """Return the mean time of a call of each; they take turns every `block` seconds."""
    spent, count = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for name, call in calls.items():
            if block > 0:
                time.sleep(0.03)  # until the other's idle threads stop spinning
                call()
            begin = time.perf_counter()
            while True:
                call()
                count[name] += 1
                took = time.perf_counter() - begin
                if took >= block:
                    break
            spent[name] += took
    return {name: spent[name] / count[name] for name in calls}


if __name__ == "__main__":
    typer.run(main)
