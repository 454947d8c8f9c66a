"""Tests of the benchmarks: equal problems for all contenders, and correct reports."""

import dataclasses
import functools as ft
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmark_rows import (
    PEAKS,
    made_results,
    made_row,
    short_turns,  # noqa: F401
)
from rich.console import Console

from benchmarks import (
    disturbed,
    floors,
    gpu,
    gpu_cells,
    gpu_networks,
    native,
    neighbours,
    results,
    rows,
    session,
)
from benchmarks.results import Results
from ostinato.apps.bench import equality, peers, timing
from ostinato.apps.bench.peers import OURS, Unsupported
from ostinato.apps.bench.problem import Problem, make_data

pytestmark = pytest.mark.usefixtures("jax_as_it_comes")
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


@pytest.fixture
def measured():
    return made_results()


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


def test_contenders_take_turns():
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


# ------------------------------------------------------------------- files and reports


@pytest.mark.parametrize("block", [0, 0.02])
def test_mean_times_are_per_call(block):
    called = []
    calls = {
        name: lambda name=name, s=s: (called.append(name), time.sleep(s))
        for name, s in {"quick": 0.001, "slow": 0.008}.items()
    }
    means = disturbed.mean_seconds(calls, 0.15, block)
    assert 0.001 < means["quick"] < means["slow"] < 0.1 and means["slow"] > 0.008
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
def test_run_adds_to_what_there_is_and_measures_peaks(tmp_path):
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
    for measured in stored.machine["peaks"].values():
        peaks = floors.Peaks(**measured)
        sizes = [size for size, _ in peaks.read]
        assert sizes == sorted(sizes)
        assert min(peaks.float32, peaks.bfloat16, peaks.dispatch) > 0
        assert all(peaks.bandwidth(size) > 0 for size in (1, 1e6, 1e12))


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


def test_shares_are_of_full_tiles_of_the_best_kernels(monkeypatch):
    """What is read is what the program prints."""
    text = (ROOT / "native/bench/kernels_bench.cc").read_text()
    keys = re.findall(r'\\"(\w+)\\": ', text)
    keys = keys[keys.index("isa") : keys.index("peak")]
    assert keys == "isa dtype tile cache rows depth gflops share".split()

    def product(isa, dtype, cache, rows, share):
        values = (isa, dtype, "k4", cache, rows, 64, 1.0, share)
        return dict(zip(keys, values, strict=True))

    products = [
        product("avx2", "f32", "L2", 6, 0.4),
        product("avx512", "f32", "L1", 6, 0.5),
        product("avx512", "f32", "L2", 1, 0.3),
        product("avx512", "f32", "L2", 6, 0.97),
        product("avx512", "f32", "L2", 6, 0.95),
        product("avx512", "bf16", "L2", 6, None),
        product("avx512_amx", "f32", "L2", 6, 0.2),
    ]
    monkeypatch.setattr(native, "_run", lambda sources: {"products": products})
    assert native.kernel_shares() == {"f32": 0.95}


def test_rows_are_chosen_by_name():
    chosen = session.select(["gru"], ["N1H*-step", "*-compile"], [])
    names = [problem.name for problem in chosen]
    compiles = ["N32H256-compile", "N32H256T1000-compile"]
    assert names == ["N1H64-step", "N1H256-step", *compiles]
    for options in (["elman"], [], []), ([], ["N1H65-*"], []), ([], [], ["B"]):
        with pytest.raises(ValueError, match="elman|N1H65|B"):
            session.select(*options)


def test_rows_of_gpus_are_written_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SIZES", {"N2T9H3": (2, 9, 3)})
    sizes = {"N2T4H3": (2, 4, 3, False), "N2T4H3-ragged": (2, 4, 3, True)}
    monkeypatch.setattr(gpu_networks, "SIZES", sizes)
    monkeypatch.setattr(gpu_networks, "MODES", ("gru",))
    monkeypatch.setattr(gpu_cells, "SIZES", {"N2T9H3": (2, 9, 3)})
    monkeypatch.setattr(gpu_cells, "DTYPES", ("float32",))
    out = tmp_path / "gpu.jsonl"
    gpu.main(rounds=1, seconds=0, backend="xla", out=out)
    assert out.read_text() == ""
    gpu.main(rounds=1, backend="xla", out=out)
    rows_ = [json.loads(line) for line in out.read_text().splitlines()]
    recurrences = len(gpu.DTYPES) * len(gpu.KINDS)
    recurrences += len(gpu_cells.linear.ELEMENTWISE) * len(gpu_cells.KINDS)
    networks = len(sizes) * len(gpu_networks.DTYPES) * len(gpu_networks.KINDS)
    assert len(rows_) == 1 + recurrences + networks
    assert all(row["ours/floor"] > 0 for row in rows_[1 : 1 + recurrences])
    for row in rows_[1 + recurrences :]:
        assert row["xla/ours"] > 0 and not row["errors"]
    gpu.main(rounds=1, backend="xla", out=out, resume=True)
    assert len(out.read_text().splitlines()) == len(rows_)


def test_rows_of_gpus_that_fail_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SIZES", {"N2T9H3": (2, 9, 3)})
    monkeypatch.setattr(gpu_networks, "MODES", ())
    monkeypatch.setattr(gpu_cells, "DTYPES", ())
    monkeypatch.setattr(gpu, "recurrence", lambda *_: 1 / 0)
    out = tmp_path / "gpu.jsonl"
    gpu.main(rounds=1, backend="xla", out=out)
    _, *rows_ = map(json.loads, out.read_text().splitlines())
    assert len(rows_) == len(gpu.DTYPES) * len(gpu.KINDS)
    assert all("ZeroDivisionError" in row["error"] for row in rows_)
    monkeypatch.setattr(gpu, "recurrence", lambda *_: {"median": 1})
    gpu.main(rounds=1, backend="xla", out=out, resume=True)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in again] == [
        row["name"] for row in (_, *rows_, *rows_)
    ]
    assert all(row["median"] == 1 for row in again[1 + len(rows_) :])


def test_a_trial_that_hangs_is_a_row_too(monkeypatch):
    hang = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    monkeypatch.setattr(gpu.check, "command", lambda *_: hang)
    monkeypatch.setattr(gpu, "LIMIT", 0.5)
    row = gpu.trial(gpu.kernels.TEXTS[0], "unused")
    assert row["code"] == "no end within 0.5 s"


def test_rows_of_gpus_end_with_tools_and_trials(monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/{name}")
    names = [name for name, _ in gpu._rows("cuda", 1)]
    assert len(set(names)) == len(names)
    first = {kind: names.index(next(n for n in names if n.startswith(kind)))
             for kind in ("lstm", "memcheck", "trial")}  # fmt: skip
    assert sorted(first, key=first.__getitem__) == ["lstm", "memcheck", "trial"]
    tools = 3 * (1 + len(gpu.CHECKED))
    assert first["trial"] - first["memcheck"] == tools
    assert set(gpu.CHECKED) <= set(gpu.kernels.RECURRENT_TEXTS)


@pytest.mark.parametrize("ragged", [False, True])
def test_torch_runs_what_a_gpu_would(ragged):
    torch = pytest.importorskip("torch")
    shape = (3, 5, 4, ragged)
    for mode in ("lstm", "gru", "rnn_tanh"):
        for kind in ("infer", "train"):
            call = gpu_networks.torch_call(mode, "float32", shape, kind, "cpu")
            assert call is not None and call() is None
    assert gpu_networks.torch_call("slstm", "float32", shape, "infer", "cpu") is None
    if not torch.cuda.is_available():
        assert gpu_networks.torch_call("gru", "float32", shape, "infer") is None
