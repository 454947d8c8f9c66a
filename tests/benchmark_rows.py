"""Made-up rows of benchmarks, and turns without pauses, for tests of benchmarks."""

import pytest

from benchmarks import floors, results
from benchmarks.results import Results, Row
from ostinato.apps.bench import timing
from ostinato.apps.bench.peers import OURS

PEAKS = floors.Peaks(
    threads=2,
    float32=2e11,
    bfloat16=4e11,
    read=[(2**14, 4e11), (2**20, 2e11), (2**26, 4e10)],
    dispatch=1e-5,
)


def made_row(name, ours, threads=2, mode="lstm", **sizes):
    """Make a row with rounds 1 % apart, torch 1.5 and scan 3 times as long."""
    around = [0.99, 1.0, 1.01]
    seconds = {OURS: ours, "torch": 1.5 * ours, "scan": 3 * ours}
    return Row(
        mode=mode,
        name=name,
        sizes=dict(T=100, N=32, H=256) | sizes,
        threads=threads,
        seconds={name: [s * a for a in around] for name, s in seconds.items()},
        skipped={"flax": "needs the package flax"},
        detail={OURS: "cpu"},
        floor=0.9 * ours,
    )


def made_results():
    """Make the results of a run with such rows."""
    made = [
        made_row(f"N{n}H256-{kind}", n * times, N=n)
        for n in (1, 32, 128)
        for kind, times in (("infer", 5e-4), ("train", 2e-3))
    ]
    made.append(made_row("N32H256-infer", 3e-2, threads=1))
    made.append(made_row("N1H64-step", 2e-5, mode="gru", N=1, H=64))
    peaks = {"2": PEAKS._asdict()}
    machine = results.machine() | {"peaks": peaks, "kernel_shares": {"f32": 0.97}}
    return Results(machine, {row.id: row for row in made})


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(timing, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(timing, "REST_SECONDS", 0.0)
