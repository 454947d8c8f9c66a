"""Benchmark of linear recurrences: `python -m benchmarks.linear`.

It compares `linear_recurrence` with `lax.scan` and `lax.associative_scan`, element-wise
cells with `lax.scan`, filters with scipy, advantages with `lax.scan`, and cells with
each other. Results are checked before anything is timed. The floor of a recurrence is
the time to move its arrays, each of them once, at the bandwidth that all threads reach
when they read memory; that of advantages includes a jitted call that does nothing.
"""

import functools as ft
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.signal
import typer
from jax import lax

import ostinato as ost
from ostinato import cells
from ostinato.apps.bench import timing

from . import floors, native, pictures, results, tables
from .programs import (
    compilations,
    compiled,
    in_a_row,
    memory_kept,
    training,
    wait,
)
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/linear.json")
MARK = "linear"
OURS, SCAN, ASSOCIATIVE, SCIPY = "ours", "lax.scan", "associative_scan", "scipy"
SIZES = {
    "N1T1000H256": (1, 1000, 256),
    "N8T1000H256": (8, 1000, 256),
    "N32T1000H256": (32, 1000, 256),
    "N8T10000H256": (8, 10_000, 256),
}
ARRAYS = {"infer": 3, "train": 8}  # that are read or written, each once
ELEMENTWISE = {  # the cell, its gates, the arrays that training moves, its functions
    "IndRNN": (cells.IndRNN, 1, 6, 0),
    "ParaGRU": (cells.ParaGRU, 3, 12, 3),
    "ParaLSTM": (cells.ParaLSTM, 3, 14, 4),
}
ELEMENTWISE_SIZES = {name: SIZES[name] for name in ("N8T1000H256", "N32T1000H256")}
SIGNALS = {"1 channel": (1, 100_000), "64 channels": (64, 20_000)}
ORDERS = (2, 6)
ROLLOUTS = {
    "N16T128": (16, 128),
    "N8T2048": (8, 2048),
    "N64T1000": (64, 1000),
    "N256T128": (256, 128),
    "N2048T20": (2048, 20),
    "N4096T128": (4096, 128),
}
CELLS = {
    "LSTM": cells.LSTM,
    "GRU": cells.GRU,
    "IndRNN": cells.IndRNN,
    "ParaGRU": cells.ParaGRU,
    "ParaLSTM": cells.ParaLSTM,
    "MinGRU": cells.MinGRU,
    "MinLSTM": cells.MinLSTM,
    "RGLRU": lambda size, _: cells.RGLRU(size, num_heads=4),
    "LRU": cells.LRU,
    "S5": cells.S5,
}
CELL_SIZE = (8, 1000, 256)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    only: Annotated[str, typer.Option(help="Part to measure, or all.")] = "all",
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time recurrences, filters, advantages and cells, and write their tables."""
    stored = Stored(out)
    parts = {
        "recurrences": recurrences,
        "elementwise": elementwise,
        "filters": filters,
        "advantages": advantages,
        "cells": all_cells,
    }
    if measure:
        stored.begin()
        for name, part in parts.items():
            if only in ("all", name):
                stored.add(name, part(rounds))
    stored.show(text, MARK, page)
    if page is not None and "cells" in stored.rows:
        kind = results.kind_of(stored.machine).lower()
        picture = page.parent / "images" / f"recurrences_{kind}.png"
        pictures.draw_cells(dict(map(step_times, stored.rows["cells"])), picture)


# ------------------------------------------------------------------------ recurrences


def by_scan(a: Any, b: Any) -> Any:
    """Return the states by a loop over time."""

    def step(h: Any, ab: Any) -> Any:
        h = ab[0] * h + ab[1]
        return h, h

    steps = jnp.swapaxes(a, 0, 1), jnp.swapaxes(b, 0, 1)
    return jnp.swapaxes(lax.scan(step, jnp.zeros_like(b[:, 0]), steps)[1], 0, 1)


def by_associative_scan(a: Any, b: Any) -> Any:
    """Return the states by an associative scan."""

    def join(left: Any, right: Any) -> Any:
        return right[0] * left[0], right[0] * left[1] + right[1]

    return lax.associative_scan(join, (a, b), axis=1)[1]


def ours(a: Any, b: Any) -> Any:
    """Return the states by `linear_recurrence`."""
    return ost.linear_recurrence(a, b).h


def recurrences(rounds: int, sizes: dict[str, tuple] = SIZES) -> list[dict]:
    """Measure the seconds of every size, forward and training, by contender."""
    peaks = native.peaks(_threads())
    bandwidth = peaks["read"][-1][1]
    runs = {OURS: ours, SCAN: by_scan, ASSOCIATIVE: by_associative_scan}
    rows, run_again = [], []
    for name, shape in sizes.items():
        rng = np.random.default_rng(0)
        a = jnp.asarray(rng.random(shape, np.float32))
        b, dy = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in "bd")
        for kind, count in ARRAYS.items():
            given = (a, b) if kind == "infer" else (a, b, dy)
            made = {
                who: run if kind == "infer" else training(run)
                for who, run in runs.items()
            }
            calls, needed = compiled(made, given, shape[1] ** 2)
            row = {"name": f"{name}-{kind}", "bytes": needed}
            row["compile"] = compilations(made[OURS], given)
            row["seconds"] = timing.take_turns(calls, rounds)
            row["again"] = in_a_row(calls[OURS])
            row["floor"] = count * b.nbytes / bandwidth
            rows.append(row)
            run_again.append(calls[OURS])
    with memory_kept():  # last, since what is kept serves later calls too
        for row, call in zip(rows, run_again, strict=True):
            row["kept"] = in_a_row(call)
            print(*recurrence_row(row), flush=True)
    return rows


def _threads() -> int:
    return len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------ element-wise


def elementwise(rounds: int, sizes: dict[str, tuple] = ELEMENTWISE_SIZES) -> list[dict]:
    """Measure the steps of element-wise cells, without the products of their inputs."""
    peaks = native.peaks(_threads())
    bandwidth = peaks["read"][-1][1]
    rows = []
    for (size, shape), (name, about) in itertools.product(
        sizes.items(), ELEMENTWISE.items()
    ):
        make, gates, moved, functions = about
        batch, steps, units = shape
        cell = make(units, units)
        params, states = cell.init(jax.random.key(0)), cell.initial_state(batch)
        rng = np.random.default_rng(0)
        x, dy = (
            tuple(
                jnp.asarray(rng.standard_normal((steps, batch, units), np.float32))
                for _ in range(count)
            )
            for count in (gates, 1)
        )
        x = x[0] if gates == 1 else x

        def ours(params: Any, x: Any, cell: Any = cell, states: Any = states) -> Any:
            step = lambda p, s, x, t: cell.step(p, s, x, t)  # noqa: E731
            out = ost.recurrent_net(step, x, states, params=params, time_major=True)
            return out.outputs

        def scan(params: Any, x: Any, cell: Any = cell, states: Any = states) -> Any:
            return lax.scan(lambda s, x: cell.step(params, s, x, 0), states, x)[1]

        for kind, count in (("infer", gates + 1), ("train", moved)):
            runs: dict[str, Callable] = {OURS: ours, SCAN: scan}
            given = (params, x)
            if kind == "train":
                runs = {who: training(run) for who, run in runs.items()}
                given = (*given, *dy)
            calls, needed = compiled(runs, given, (steps * batch) ** 2)
            row = {"name": f"{name}, {size}-{kind}", "bytes": needed}
            row["seconds"] = timing.take_turns(calls, rounds)
            row["floor"] = count * dy[0].nbytes / bandwidth
            each = functions if kind == "infer" else 2 * functions
            row["functions"] = each * dy[0].size / peaks["sigmoids"]
            rows.append(row)
            print(*elementwise_row(row), flush=True)
    return rows


# ----------------------------------------------------------------- filters, advantages


def filters(rounds: int, signals: dict[str, tuple] = SIGNALS) -> list[dict]:
    """Measure `lfilter` and scipy's, by signals, order and dtype."""
    rows = []
    for name, shape in signals.items():
        for order in ORDERS:
            for dtype in ("float32", "float64"):
                with jax.enable_x64(dtype == "float64"):
                    made: Any = scipy.signal.butter(order, 0.2)
                    b, a = (np.asarray(c, dtype) for c in made)
                    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
                    given = tuple(map(jnp.asarray, (b, a, x)))
                    program = jax.jit(ost.lfilter).lower(*given).compile()
                    want = scipy.signal.lfilter(b, a, x)
                    np.testing.assert_allclose(program(*given), want, atol=1e-3)
                    calls = {
                        OURS: ft.partial(wait, program, given),
                        SCIPY: ft.partial(scipy.signal.lfilter, b, a, x),
                    }
                    seconds = timing.take_turns(calls, rounds)
                row = {"name": f"{name}, order {order}, {dtype}", "seconds": seconds}
                rows.append(row)
                print(*filter_row(row), flush=True)
    return rows


def advantages(rounds: int, rollouts: dict[str, tuple] = ROLLOUTS) -> list[dict]:
    """Measure `gae` and the same by a loop, time first and batch first."""

    def by_loop(time_major: bool, r: Any, v: Any, last: Any, d: Any) -> Any:
        if not time_major:
            r, v, d = (jnp.swapaxes(x, 0, 1) for x in (r, v, d))
        delta = r + d * jnp.concatenate([v[1:], last[None]]) - v

        def step(a: Any, x: Any) -> Any:
            a = x[0] + 0.95 * x[1] * a
            return a, a

        found = lax.scan(step, jnp.zeros_like(last), (delta, d), reverse=True)[1]
        return found if time_major else jnp.swapaxes(found, 0, 1)

    def by_gae(time_major: bool, r: Any, v: Any, last: Any, d: Any) -> Any:
        options = dict(discounts=d, lambda_=0.95, time_major=time_major)
        return ost.gae(r, v, last, **options).advantages

    bandwidth, dispatch = native.peaks(_threads())["read"][-1][1], floors.dispatch()
    rows = []
    for name, (batch, steps) in rollouts.items():
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.random(shape, np.float32))  # noqa: E731, B023
        for order, shape in (("time", (steps, batch)), ("batch", (batch, steps))):
            given = draw(*shape), draw(*shape), draw(batch), draw(*shape)
            runs = {
                who: ft.partial(run, order == "time")
                for who, run in ((OURS, by_gae), (SCAN, by_loop))
            }
            calls, _ = compiled(runs, given, steps**2)
            seconds = timing.take_turns(calls, rounds)
            row = {"name": f"{name}, {order} first", "seconds": seconds}
            row["floor"] = dispatch + 4 * given[0].nbytes / bandwidth
            rows.append(row)
            print(*scan_row(row), flush=True)
    return rows


# ------------------------------------------------------------------------------- cells


def all_cells(rounds: int, size: tuple[int, int, int] = CELL_SIZE) -> list[dict]:
    """Measure every cell over whole sequences: seconds, and bytes of training."""
    batch, steps, units = size
    rows = []
    for name, make in CELLS.items():
        cell = make(units, units)
        params = cell.init(jax.random.key(0))
        states = cell.initial_state(batch)
        rng = np.random.default_rng(0)
        x, dy = (
            jnp.asarray(rng.standard_normal((batch, steps, units), np.float32))
            for _ in range(2)
        )

        def infer(params: Any, x: Any, cell: Any = cell, states: Any = states) -> Any:
            return ost.recurrent_net(cell, x, states, params=params).outputs

        forward = jax.jit(infer).lower(params, x).compile()
        both = jax.jit(training(infer)).lower(params, x, dy).compile()
        analysis = both.memory_analysis()
        assert analysis is not None  # it exists on a CPU
        calls = {
            "infer": ft.partial(wait, forward, (params, x)),
            "train": ft.partial(wait, both, (params, x, dy)),
        }
        for call in calls.values():
            call()
        seconds = timing.take_turns(calls, rounds)
        needed = analysis.temp_size_in_bytes
        row = {"name": name, "seconds": seconds, "bytes": needed, "size": size}
        rows.append(row)
        print(*cell_row(row), flush=True)
    return rows


# ------------------------------------------------------------------------------ tables


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    parts = [f"{stored.conditions('jax')}."]
    heads = {
        "recurrences": ("recurrence", OURS, "in a row", "memory kept", "floor",
                        "memory kept/floor", SCAN, ASSOCIATIVE, "compile ms", "MiB"),
        "elementwise": ("element-wise", OURS, "floor", "functions", "ours/larger",
                        SCAN),
        "filters": ("filter", OURS, SCIPY),
        "advantages": ("advantages", OURS, "floor", "ours/floor", SCAN),
        "cells": ("cell", "infer µs/step", "train µs/step", "MiB"),
    }  # fmt: skip
    lines = {
        "recurrences": recurrence_row,
        "elementwise": elementwise_row,
        "filters": filter_row,
        "advantages": scan_row,
        "cells": cell_row,
    }
    for name, head in heads.items():
        if name in stored.rows:
            parts.append(tables.markdown(head, map(lines[name], stored.rows[name])))
    return "\n\n".join(parts)


def medians(row: dict) -> dict[str, float]:
    """Return the median seconds of each contender."""
    return {who: results.spread(s).median for who, s in row["seconds"].items()}


def recurrence_row(row: dict) -> tuple[str, ...]:
    """Format our milliseconds, and the times of others over ours."""
    found = medians(row)
    return (
        row["name"],
        tables.duration(found[OURS]),
        tables.duration(row["again"]),
        tables.duration(row["kept"]),
        tables.duration(row["floor"]),
        tables.ratio(row["kept"] / row["floor"]),
        *(tables.ratio(found[who] / found[OURS]) for who in (SCAN, ASSOCIATIVE)),
        f"{row['compile'] * 1e3:.0f}",
        f"{row['bytes'][OURS] / 2**20:.1f}",
    )


def scan_row(row: dict) -> tuple[str, ...]:
    """Format our milliseconds, the floor, and the time of the loop over ours."""
    found = medians(row)
    return (
        row["name"],
        tables.duration(found[OURS]),
        tables.duration(row["floor"]),
        tables.ratio(found[OURS] / row["floor"]),
        tables.ratio(found[SCAN] / found[OURS]),
    )


def elementwise_row(row: dict) -> tuple[str, ...]:
    """Format our milliseconds, both bounds, and ours over the larger of them."""
    name, ours, floor, _, scan = scan_row(row)
    over = medians(row)[OURS] / max(row["floor"], row["functions"])
    functions = tables.duration(row["functions"]) if row["functions"] else ""
    return name, ours, floor, functions, tables.ratio(over), scan


def filter_row(row: dict) -> tuple[str, ...]:
    """Format our milliseconds, and the time of scipy over ours."""
    found = medians(row)
    ratio = tables.ratio(found[SCIPY] / found[OURS])
    return row["name"], tables.duration(found[OURS]), ratio


def step_times(row: dict) -> tuple[str, dict[str, float]]:
    """Return the name of a cell, and the microseconds of a step of all sequences."""
    found, steps = medians(row), row["size"][1]
    return row["name"], {kind: each / steps * 1e6 for kind, each in found.items()}


def cell_row(row: dict) -> tuple[str, ...]:
    """Format microseconds of a step of all sequences, and bytes of training."""
    name, found = step_times(row)
    each = (f"{found[kind]:.2f}" for kind in ("infer", "train"))
    return name, *each, f"{row['bytes'] / 2**20:.0f}"


if __name__ == "__main__":
    typer.run(main)
