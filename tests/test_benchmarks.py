"""Tests of the benchmarks: equal problems for all contenders, and correct reports."""

import dataclasses
import functools as ft
import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

import ostinato as ost
from benchmarks import (
    disturbed,
    floors,
    heads,
    layers,
    linear,
    long,
    native,
    neighbours,
    recurrent,
    results,
    rows,
    scaling,
    session,
    steps,
    streams,
)
from benchmarks.results import Results, Row
from ostinato.apps.bench import equality, peers, timing
from ostinato.apps.bench.peers import OURS, STREAM, Unsupported
from ostinato.apps.bench.problem import Problem, make_data

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "torch": ["torch"],
    "onnxruntime": ["onnxruntime", "onnx"],
    "flax": ["flax"],
}

# ------------------------------------------------------------------------- contenders

SMALL = dict(batch=3, steps=5, input_size=6, hidden_size=7)
RAGGED = SMALL | dict(ragged=True, bidirectional=True)
STEP = SMALL | dict(batch=1, steps=1)
BFLOAT16 = SMALL | dict(dtype="bfloat16")
GRADIENTS = (OURS, "torch", "flax")
DEEP = RAGGED | dict(num_layers=2)
TAKE_PART = [
    *itertools.product(rows.MODES, ["infer"], [RAGGED], ["torch", "onnxruntime"]),
    *itertools.product(["gru", "rnn_tanh"], ["train"], [RAGGED], GRADIENTS),
    *itertools.product(["lstm"], ["train"], [DEEP], GRADIENTS),
    *itertools.product(rows.MODES, ["step"], [STEP], results.CONTENDERS),
    *itertools.product(["lstm"], ["infer"], [BFLOAT16], [*GRADIENTS, "scan"]),
    ("lstm", "compile", SMALL, OURS),
]
TAKE_PART = [
    pytest.param(name, Problem(mode, kind, **sizes), id=f"{name}-{mode}-{kind}")
    for mode, kind, sizes, name in TAKE_PART
]


@pytest.fixture(autouse=True)
def _jax_as_it_comes():
    """Restore JAX's defaults, since the peers are not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@ft.cache
def reference(problem):
    return peers.reference(problem, make_data(problem), threads=1)


@pytest.mark.peers
@pytest.mark.parametrize("name, problem", TAKE_PART)
def test_contender_computes_the_same(name, problem):
    for package in PACKAGES.get(name, []):
        pytest.importorskip(package, reason=f"needs {package}, from the extra `peers`")
    contender = peers.build(name, problem, make_data(problem), threads=1)
    got = contender.results(contender.call())
    equality.check(problem, got, reference(problem))
    grads = {"dx", "dw_ih", "dw_hh", "db_ih", "dh_0"} if problem.differentiates else ()
    assert got.keys() >= {"y", "h_n", *grads}


@pytest.mark.peers
@pytest.mark.parametrize(
    "name, kind, sizes",
    [
        ("onnxruntime", "train", {}),
        ("onnxruntime", "infer", dict(dtype="bfloat16")),
        ("onnxruntime", "infer", dict(num_layers=2)),
        ("torch", "compile", {}),
        ("prepared", "train", {}),
        ("prepared", "infer", dict(batch=2)),
        ("stream", "infer", {}),
    ],
)
def test_contender_says_what_it_cannot(name, kind, sizes):
    for package in PACKAGES.get(name, []):
        pytest.importorskip(package, reason=f"needs {package}, from the extra `peers`")
    problem = Problem("lstm", kind, **(SMALL | sizes))
    with pytest.raises(Unsupported):
        peers.build(name, problem, make_data(problem), threads=1)


def test_sessions_are_measured(monkeypatch):
    monkeypatch.setattr(streams, "CONTENDERS", (STREAM, OURS))
    problem = Problem("gru", "step", **STEP)
    row = {"seconds": streams.seconds(problem, 2, 1), "bytes": 3 << 20}
    assert [len(s) for s in row["seconds"].values()] == [2, 2]
    name, time, ratio, memory = streams.line("gru", row)
    assert float(time) > 0 and float(ratio) > 0 and memory == "3.0"
    stored = {"machine": results.machine() | {"threads": 1}, "rows": {"gru": row}}
    assert f"| gru | {time} | {ratio} | 3.0 |" in streams.text(stored)


def test_scaling_is_reported_next_to_one_process():
    seconds = {setup.name: [0.1, 0.1, 0.3] for setup in scaling.SETUPS}
    seconds["2 processes x 1 thread"] = [0.15]
    machine = results.machine()
    text = scaling.text({"machine": machine, "hidden": 8, "seconds": seconds})
    assert "| 2 processes x 1 thread | 64 | 150.0 | 853 | 1.50 |" in text
    assert "2 processes x 2 devices | 64 | 100.0 | 2,560 | 1.00 |" in text


def test_the_gradient_of_a_long_sequence_is_measured(monkeypatch):
    monkeypatch.setattr(long, "CHUNK", 20)
    long.check()
    monkeypatch.setitem(long.WAYS, "wrong", ("all steps", lambda w, x: w.sum()))
    with pytest.raises(AssertionError):
        long.check()
    way = "`tbptt`, 10 chunks of 1000"
    row = long.gradient(way, 400)
    assert row.seconds > 0 and row.program > 0
    rows = {way: list(row._replace(seconds=1.25, peak=2 << 20, program=1 << 20))}
    stored = {"machine": results.machine(), "rows": rows, "steps": 400}
    assert f"| {way} | 10,000 steps | 1.2 | 2 | 1 |" in long.text(stored)


def test_wrong_results_are_found():
    problem = Problem("rnn_tanh", "infer", **SMALL)
    want = reference(problem)
    equality.check(problem, want, want)
    with pytest.raises(equality.OtherResults, match="h_n"):
        equality.check(problem, want | {"h_n": want["h_n"] + 1e-4}, want)


def test_a_contender_with_other_results_is_not_timed(monkeypatch):
    problem = Problem("rnn_tanh", "infer", **SMALL)
    wrong = dataclasses.replace(problem, mode="gru")
    want, build = reference(problem), peers.build

    def build_or_swap(name, problem, data, threads):
        mine = problem if name == OURS else wrong
        return build("scan", mine, make_data(mine), threads)

    monkeypatch.setattr(peers, "build", build_or_swap)
    monkeypatch.setattr(peers, "reference", lambda *_: want)
    found = timing.checked(problem, make_data(problem), [OURS, "torch"], 1)
    assert list(found.good) == list(found.differences) == [OURS]
    assert found.skipped["torch"].startswith(timing.OTHER_RESULTS)


def test_contenders_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(timing, "REST_SECONDS", 0.0)
    called = []
    names = ("a", "b", "c")
    calls = {name: ft.partial(called.append, name) for name in names}
    seconds = timing.take_turns(calls, rounds=3)
    assert {name: len(s) for name, s in seconds.items()} == dict.fromkeys(names, 3)
    assert "".join(called[6:]) == "abc" + "bca" + "cab"  # after the warm-up


# ------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("mode", rows.MODES)
def test_names_lead_to_rows(mode):
    for problem in rows.table(mode):
        assert rows.row(mode, problem.name) == problem
    for size in rows.SWEEPS:
        values = {getattr(p, rows._FIELDS[size][0]) for p in rows.sweep(mode, size)}
        assert values == set(rows.SWEEPS[size])


def test_goals_are_those_of_torch_over_ours():
    assert rows.goal("lstm", "N32H256-infer") == (1.04, 1.12)
    assert rows.goal("gru", "N64H512-ragged-train") == (2.4, None)
    assert rows.goal("rnn_tanh", "N1H64-step") is None


# ----------------------------------------------------------------------------- floors

PEAKS = floors.Peaks(
    threads=2,
    float32=2e11,
    bfloat16=4e11,
    read=[(2**14, 4e11), (2**20, 2e11), (2**26, 4e10)],
    dispatch=1e-5,
)


def floor(**sizes):
    base = dict(batch=32, steps=100, input_size=256, hidden_size=256)
    problem = Problem(**(dict(mode="lstm", kind="infer") | base | sizes))
    return floors.floor(problem, make_data(problem).lengths, PEAKS)


@pytest.mark.parametrize("kind", ["infer", "train"])
@pytest.mark.parametrize("size", ["batch", "steps", "hidden_size"])
def test_floor_grows_with_every_size(kind, size):
    values = [floor(kind=kind, **{size: n}) for n in (1, 2, 16, 64)]
    assert all(a < b for a, b in itertools.pairwise([PEAKS.dispatch, *values]))


def test_floor_counts_what_must_be_done():
    # Products with 4 * 256 rows of weights: two forward, four more backward.
    product = 2 * 4 * 256 * 256 * 32 * 100 / 2e11
    assert floor() == pytest.approx(PEAKS.dispatch + 2 * product)
    assert floor(kind="train") == pytest.approx(PEAKS.dispatch + 6 * product)
    assert floor(ragged=True) < floor()
    # One sequence: each step reads 1 MB, split between two threads.
    reading = 4 * 4 * 256 * 256 / 2e11
    one = floor(batch=1)
    assert one == pytest.approx(PEAKS.dispatch + product / 32 + 100 * reading)
    assert floor(kind="compile") is None


def test_peaks_are_measured():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    peaks = floors.Peaks(**native.peaks(1), dispatch=1e-5)
    sizes = [size for size, _ in peaks.read]
    assert sizes == sorted(sizes)
    assert 0 < peaks.float32 <= peaks.bfloat16 * 1.1
    assert all(peaks.bandwidth(size) > 0 for size in (1, 1e6, 1e12))


# ------------------------------------------------------------------- files and reports


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


@pytest.fixture
def measured():
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


@pytest.mark.parametrize("block", [0, 0.02])
def test_mean_times_are_per_call(block):
    called = []
    calls = {
        name: lambda name=name, s=s: (called.append(name), time.sleep(s))
        for name, s in {"quick": 0.001, "slow": 0.008}.items()
    }
    means = disturbed.mean_seconds(calls, 0.15, block)
    assert 0.001 < means["quick"] < 0.006 < means["slow"] < 0.1
    if block == 0:  # turns of one call
        assert called == ["quick", "slow"] * (len(called) // 2)


def test_neighbours_work_as_long_as_they_are_wanted(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *a, **k: started.append(popen(*a, **k)) or started[-1],
    )
    with neighbours.running("busy 2", [0, 1]):
        assert [process.poll() for process in started] == [None, None]
    assert None not in [process.poll() for process in started]
    with neighbours.running("none", [0, 1]):
        assert len(started) == 2


def test_stealing_wants_privileges(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PermissionError, match="CAP_SYS_NICE"):
        with neighbours.running("stolen", [0]):
            pass


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_run_adds_to_what_there_is(tmp_path):
    out = tmp_path / "results.json"
    before = made_row("N1H256-step", 1e-5, mode="gru")
    results.save(out, Results(results.machine(), {before.id: before}))
    command = [sys.executable, "-m", "benchmarks.run", "--mode=lstm", "--no-guard"]
    command += ["--rows=N1H64-st*", "--peer=scan", "--rounds=1", "--resume"]
    done = subprocess.run(
        [*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored = results.load(out)
    first, second = stored.rows.values()
    assert first == before
    assert second.name == "N1H64-step" and second.seconds.keys() == {OURS, "scan"}
    assert second.floor > 0 and stored.machine["peaks"]


def test_results_of_two_machines_are_not_mixed(tmp_path, measured):
    out = tmp_path / "results.json"
    measured.machine["cpu"] = "another"
    results.save(out, measured)
    with pytest.raises(ValueError, match="another cpu"):
        session.begin(out, resume=True, guard=False, console=Console())


@pytest.mark.parametrize("shares", [{"f32": 0.97}, {"f32": 0.97, "bf16": 0.6}])
def test_kernels_are_guarded(tmp_path, monkeypatch, shares):
    monkeypatch.setattr(native, "kernel_shares", lambda: shares)
    begin = ft.partial(session.begin, tmp_path / "new", False, True, Console())
    if min(shares.values()) < native.LEAST_SHARE:
        with pytest.raises(ValueError, match="below 85 %"):
            begin()
    else:
        assert begin().machine["kernel_shares"] == shares


def test_rows_are_chosen_by_name():
    chosen = session.select(["gru"], ["N1H*-step", "*-compile"], [])
    names = [problem.name for problem in chosen]
    compiles = ["N32H256-compile", "N32H256T1000-compile"]
    assert names == ["N1H64-step", "N1H256-step", *compiles]
    for options in (["elman"], [], []), ([], ["N1H65-*"], []), ([], [], ["B"]):
        with pytest.raises(ValueError, match="elman|N1H65|B"):
            session.select(*options)


# -------------------------------------------------------------------- recurrent_net


@pytest.mark.parametrize("name", list(steps.networks(4)))
def test_steps_written_out_equal_their_cells(name):
    network = steps.networks(4)[name]
    runs = recurrent.contenders(network, 3)
    assert ("function" in runs) == (network.step is not None)
    assert ("cell" in runs) != network.hand_made
    recurrent.compiled(runs, recurrent.make(network, 5, 3, 4), train=False)


def test_bytes_of_every_way_to_store_are_counted():
    counted = recurrent.stored_by(ost.cells.LSTM(8, 8), 1, (60, 2, 8, 1))
    assert counted["bytes"].keys() == counted["seconds"].keys()
    ways = [recurrent.SCAN, *(w for w in recurrent.WAYS if "energies" not in w)]
    assert [*counted["bytes"]] == ways
    needed = counted["bytes"]
    assert needed["states"] < needed["all"] < needed[recurrent.SCAN]


def test_tables_tell_times_and_shares():
    stored = {
        "machine": results.machine(),
        "speed": [
            {"name": "a", "seconds": {"lax.scan": [0.002], "cell": [0.001]}},
        ],
        "memory": [
            {
                "name": "b",
                "bytes": {"all": 2**21, "states": 2**20},
                "seconds": {"all": [0.01], "states": [0.011]},
            }
        ],
    }
    text = recurrent.text(stored)
    assert "| a | 2.00 |  | 2.00 |" in text
    assert "| b | states | 1.0 | 50 % | 11.0 | 1.10 |" in text


# ----------------------------------------------------------------- linear recurrences


def test_recurrences_filters_and_advantages_are_compared(monkeypatch):
    monkeypatch.setattr(native, "peaks", lambda threads: {"read": [(1, 1e9)]})
    monkeypatch.setattr(linear, "ORDERS", (2,))
    monkeypatch.setattr(linear, "CELLS", {"MinGRU": linear.cells.MinGRU})
    with jax.enable_x64(False):
        stored = {
            "machine": results.machine(),
            "recurrences": linear.recurrences(1, {"small": (2, 9, 4)}),
            "filters": linear.filters(1, {"one": (1, 20)}),
            "advantages": linear.advantages(1, {"few": (2, 9)}),
            "cells": linear.all_cells(1, (2, 9, 4)),
        }
    assert [row["name"] for row in stored["recurrences"]] == [
        "small-infer",
        "small-train",
    ]
    assert stored["recurrences"][0]["floor"] == 3 * 2 * 9 * 4 * 4 / 1e9
    text = linear.text(stored)
    for head in (
        "| small-train |",
        "| one, order 2, float64 |",
        "| few, time first |",
        "| MinGRU |",
    ):
        assert head in text


# ----------------------------------------------------------------------------- layers


@pytest.mark.parametrize("name", ["nnx GRUCell", "linen ScannedRNN"])
def test_layers_take_the_place_of_others(name):
    pytest.importorskip("flax", reason="needs the extra `flax`")
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        calls = layers.checked(layers.LAYERS[name](4), 2, 5, 4, train=True)
    assert [*calls] == [layers.OURS, layers.THEIRS]


def test_the_table_of_layers_tells_milliseconds_and_ratios():
    seconds = {"ours": [0.001, 0.002, 0.003], "theirs": [0.003]}
    stored = {"machine": results.machine(), "rows": {"a-infer": seconds}}
    stored["rows"]["a-train"] = {"ours": [0.001], "theirs": [0.002]}
    assert layers.text(stored).endswith("| a | 3.00 | 1.50 | 2.00 | 2.00 |")


# ------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("mode", ["lstm", "gru", "slstm"])
@pytest.mark.parametrize("skip", [False, True])
def test_networks_of_heads_compute_what_a_scan_does(mode, skip):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        spec = heads.network(mode, 6, 3, skip)
        calls = heads.checked(spec, 2, 5, train=True)
    assert [*calls] == [heads.OURS, heads.SCAN, heads.DENSE]


def test_the_table_of_heads_tells_milliseconds_and_ratios():
    seconds = {heads.OURS: [0.001, 0.002, 0.003], heads.SCAN: [0.003]}
    stored = {"machine": results.machine(), "rows": {"a-infer": seconds}}
    assert heads.text(stored).endswith("| a-infer | 2.00 | 1.50 |  |  |")
