"""Tests of the benchmarks of networks: steps, cells, layers, heads, streams."""

from collections.abc import Callable

import jax
import pytest
import typer
from benchmark_contenders import cannot, fails, returns
from benchmark_rows import short_turns  # noqa: F401

import ostinato as ost
from benchmarks import (
    cell_streams,
    extremes,
    heads,
    layers,
    linear,
    long,
    native,
    programs,
    recurrent,
    results,
    scaling,
    step_peers,
    steps,
    stored,
    streams,
)
from ostinato.apps.bench import processes
from ostinato.apps.bench.peers import OURS, STREAM
from ostinato.apps.bench.problem import Problem

pytestmark = pytest.mark.usefixtures("jax_as_it_comes")
NETWORKS = steps.networks(4)


def stored_rows(tmp_path, rows, **more):
    """Return rows as a run stores them, read from the file that it leaves."""
    written = stored.Stored(tmp_path / "rows.json")
    written.begin(**more)
    for name, row in rows.items():
        written.add(name, row)
    return stored.Stored(written.path)


# -------------------------------------------------------------------- recurrent_net


# Without lengths, `test_peers_compute_the_same_networks` compares the only contender of
# the other networks.
WRITTEN_OUT = [(name, True) for name in NETWORKS]
WRITTEN_OUT += [(name, False) for name in ("LSTM", "GRU", "MI-LSTM")]


@pytest.mark.parametrize("name, ragged", WRITTEN_OUT)
def test_steps_written_out_equal_their_cells(name, ragged, monkeypatch):
    monkeypatch.setattr(recurrent, "STEPS", 5)  # the most that lengths are
    network, case = NETWORKS[name], recurrent.Case(3, 4, ragged=ragged)
    runs = recurrent.contenders(network, case)
    assert ("function" in runs) == (network.step is not None)
    assert ("cell" in runs or "fused" in runs) != network.hand_made
    assert ragged or len(runs) == 3
    recurrent.compiled(runs, recurrent.make(network, 5, case, 2), train=False)


def test_bytes_of_every_way_to_store_are_counted():
    counted = recurrent.stored_by(ost.cells.LSTM(8, 8), 1, (60, 2, 8, 1))
    assert counted["bytes"].keys() == counted["seconds"].keys()
    ways = [recurrent.SCAN, *(w for w in recurrent.WAYS if "energies" not in w)]
    assert [*counted["bytes"]] == ways
    needed = counted["bytes"]
    assert needed["states"] < needed["all"] < needed[recurrent.SCAN]


def test_tables_tell_times_and_shares(tmp_path):
    cell, function = "peephole LSTM, N1H64-infer", "LSTM, N1H64-train"
    fused = {"lax.scan": [0.004], "function": [0.002], "fused": [0.001]}
    rows = {
        cell: {"seconds": {"lax.scan": [0.002], "cell": [0.001]}},
        function: {"seconds": fused},
        "MI-LSTM, N8H64-compile": {
            "compile": {"lax.scan": [1, 0.9], "function": [0.3, 0.1], "cell": [9, 9]}
        },
        "b": {
            "bytes": {"all": 2**21, "states": 2**20},
            "seconds": {"all": [0.01], "states": [0.011]},
        },
    }
    text = recurrent.text(stored_rows(tmp_path, rows))
    assert f"| {cell} | 2.00 |  | 2.00 |" in text
    assert f"| {function} | 4.00 | 2.00 |  | 4.00 | 0.50 |" in text
    assert text.index(function) < text.index(cell)  # the order of the networks
    assert "| b | states | 1.0 | 50 % | 11.0 | 1.10 |" in text
    assert "| MI-LSTM, N8H64-compile | 1000.0 | 300.0 | 0.30 | 100.0 |  |" in text


def test_compilations_are_timed_twice(monkeypatch):
    monkeypatch.setattr(recurrent, "STEPS", 3)
    monkeypatch.setattr(recurrent, "CASES", {"N8H64": recurrent.Case(2, 4)})
    only = {"LSTM": NETWORKS["LSTM"]}
    monkeypatch.setattr(recurrent, "networks", lambda _: only)
    [(name, row)] = recurrent.compilations()
    assert name == "LSTM, N8H64-compile"
    assert set(row["compile"]) == {recurrent.SCAN, "function", recurrent.FUSED}
    assert all(0 < s for both in row["compile"].values() for s in both)


# -------------------------------------------------------------------- other libraries


REFERENCES: dict[str, Callable] = {}  # one of each network for all


@pytest.mark.peers
@pytest.mark.parametrize("who", [step_peers.OURS, step_peers.TORCH, step_peers.NNX])
@pytest.mark.parametrize("name", NETWORKS)
def test_peers_compute_the_same_networks(who, name, monkeypatch):
    if who != step_peers.OURS:
        pytest.importorskip("torch" if who == step_peers.TORCH else "flax")
    of_jax = step_peers.of_jax

    def of_jax_once(run, *rest):
        if not run.__qualname__.startswith("scanned."):
            return of_jax(run, *rest)
        if name not in REFERENCES:
            REFERENCES[name] = of_jax(run, *rest)
        return REFERENCES[name]

    monkeypatch.setattr(step_peers, "of_jax", of_jax_once)
    monkeypatch.setattr(recurrent, "STEPS", 3)
    with jax.enable_x64(False):
        call = step_peers.build(who, name, recurrent.Case(2, 4), True, threads=1)
        y, *gradients = jax.tree.leaves(call())
    assert y.shape[:2] == (3, 2) and len(gradients) >= 6


def test_a_peer_with_other_results_is_refused(monkeypatch):
    monkeypatch.setattr(recurrent, "STEPS", 3)
    wrong = lambda *args: lambda params, x, memory: 2 * x  # noqa: E731
    monkeypatch.setattr(recurrent, "ours", wrong)
    with pytest.raises(AssertionError), jax.enable_x64(False):
        step_peers.build(step_peers.OURS, "LSTM", recurrent.Case(2, 4), False, 1)


def test_the_table_of_peers_tells_ratios_and_the_floor(tmp_path):
    seconds = {step_peers.OURS: [0.002], "torch": [0.003], "nnx.RNN": [0.004]}
    rows = {"a": {"seconds": seconds, step_peers.FLOOR: 0.001}}
    text = step_peers.text(stored_rows(tmp_path, rows))
    assert text.endswith("| a | 2.00 |  | 1.50 |  | 2.00 | 0.50 |")


def test_contenders_take_turns_in_processes():
    timed = processes.take_turns({"a": returns, "b": cannot}, rounds=2)
    assert len(timed.seconds.pop("a")) == 2 and not timed.seconds
    assert timed.skipped == {"b": "no such step"}
    with pytest.raises(RuntimeError, match="process of c"):
        processes.take_turns({"c": fails}, rounds=1)


# ---------------------------------------------------------------------- rows in files


def test_rows_join_those_in_the_file(tmp_path, capsys):
    first = stored_rows(tmp_path, {"a": 1, "b": 2})
    second = stored_rows(tmp_path, {"b": 3})
    assert first.rows == {"a": 1, "b": 2} and second.rows == {"a": 1, "b": 3}
    page = tmp_path / "page.md"
    mark = f"m {results.kind_of(second.machine)}"
    page.write_text(f"<!-- {mark}: begin -->\nold\n<!-- {mark}: end -->\n")
    second.show(lambda stored: str(stored.rows), "m", page)
    assert "old" not in page.read_text() and str(second.rows) in page.read_text()
    assert str(second.rows) in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="no rows"):
        stored.Stored(tmp_path / "none.json").show(str, "m", None)


# ----------------------------------------------------------------- linear recurrences


PEAKS = {"read": [(1, 1e9)], "sigmoids": 1e9}


def test_recurrences_filters_and_advantages_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "peaks", lambda threads: PEAKS)
    monkeypatch.setattr(programs, "IN_A_ROW", 2)
    monkeypatch.setattr(linear, "ORDERS", (2,))
    monkeypatch.setattr(programs, "COMPILATIONS", 1)
    monkeypatch.setattr(linear, "CELLS", {"MinGRU": linear.cells.MinGRU})
    with jax.enable_x64(False):
        rows = {
            "recurrences": linear.recurrences(1, {"small": (2, 9, 4)}),
            "elementwise": linear.elementwise(1, {"small": (2, 9, 4)}),
            "filters": linear.filters(1, {"one": (1, 20)}),
            "advantages": linear.advantages(1, {"few": (2, 9)}),
            "cells": linear.all_cells(1, (2, 9, 4)),
        }
    assert [row["name"] for row in rows["recurrences"]] == [
        "small-infer",
        "small-train",
    ]
    assert rows["recurrences"][0]["floor"] == 3 * 2 * 9 * 4 * 4 / 1e9
    functions = {row["name"]: row["functions"] for row in rows["elementwise"]}
    assert functions["ParaGRU, small-train"] == 6 * 2 * 9 * 4 / 1e9
    text = linear.text(stored_rows(tmp_path, rows))
    for head in (
        "| small-train |",
        "| ParaGRU, small-train |",
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


def test_the_table_of_layers_tells_milliseconds_and_ratios(tmp_path):
    seconds = {"ours": [0.001, 0.002, 0.003], "theirs": [0.003]}
    rows = {"a-infer": seconds, "a-train": {"ours": [0.001], "theirs": [0.002]}}
    assert layers.text(stored_rows(tmp_path, rows)).endswith(
        "| a | 3.00 | 1.50 | 2.00 | 2.00 |"
    )


# ------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("mode", ["lstm", "gru", "slstm"])
@pytest.mark.parametrize("skip", [False, True])
def test_networks_of_heads_compute_what_a_scan_does(mode, skip):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        spec = heads.network(mode, 6, 3, skip)
        calls = heads.checked(spec, 2, 5, train=True)
    assert [*calls] == [heads.OURS, heads.SCAN, heads.DENSE]


def test_the_table_of_heads_tells_milliseconds_and_ratios(tmp_path):
    seconds = {heads.OURS: [0.001, 0.002, 0.003], heads.SCAN: [0.003]}
    found = stored_rows(tmp_path, {"a-infer": seconds})
    assert heads.text(found).endswith("| a-infer | 2.00 | 1.50 |  |  |  |")


# ---------------------------------------------------------------------- extreme sizes


def shrunk(sizes):
    """Return sizes of rows with few sequences and steps."""
    made = (s._replace(batch=min(s.batch, 3), steps=min(s.steps, 4)) for s in sizes)
    return list(dict.fromkeys(made))


def test_all_rows_of_extreme_sizes_have_the_same_results(monkeypatch):
    rows = {name: (step, shrunk(s)) for name, (step, s) in extremes.ROWS.items()}
    monkeypatch.setattr(extremes, "ROWS", rows)
    for name in ("RECURRENCES", "GRUS"):
        monkeypatch.setattr(extremes, name, shrunk(getattr(extremes, name)))
    names = []
    for name, runs, given, terms in extremes.contenders():
        programs.compiled(runs, given, terms)
        names.append(name)
    assert any("-ragged" in name for name in names)
    assert any(" x 100" in name for name in names)


def test_a_row_of_extreme_sizes_is_checked_and_timed(tmp_path):
    row = next(row for row in extremes.contenders() if row[0] == "tanh, N256T1H64")
    name, runs, given, terms = row
    rows = {
        f"{name}, {kind}": extremes.seconds(runs, given, terms, kind, 1)
        for kind in ("infer", "train")
    }
    text = extremes.text(stored_rows(tmp_path, rows))
    assert text.count("| tanh | N256T1H64 | ") == 2
    wrong = {**runs, extremes.OURS: lambda *a: 1.01 * runs[extremes.OURS](*a)}
    with pytest.raises(AssertionError, match="ours"):
        extremes.seconds(wrong, given, terms, "infer", 1)
    assert str(extremes.Size(3, 4, 5, 2, 7, True)) == "N3T4H5M2 x 7-ragged"


# ---------------------------------------------------------- sessions, long sequences


def test_scaling_is_reported_next_to_one_process(tmp_path):
    rows = {setup.name: [0.1, 0.1, 0.3] for setup in scaling.FIRST}
    rows["2 processes x 1 thread"] = [0.15]
    text = scaling.text(stored_rows(tmp_path, rows, hidden=8))
    assert "| 2 processes x 1 thread | 64 | 150.0 | 853 | 1.50 |" in text
    assert "2 processes x 2 devices | 64 | 100.0 | 2,560 | 1.00 |" in text


def test_sessions_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(streams, "CONTENDERS", (STREAM, OURS))
    problem = Problem("gru", "step", 1, 1, 6, 7)
    row = {"seconds": streams.seconds(problem, 2, 1), "bytes": 3 << 20}
    assert [len(s) for s in row["seconds"].values()] == [2, 2]
    name, time, ratio, memory = streams.line("gru", row)
    assert float(time) > 0 and float(ratio) > 0 and memory == "3.0"
    found = stored_rows(tmp_path, {"gru": row}, threads=1)
    assert f"| gru | {time} | {ratio} | 3.0 |" in streams.text(found)


def test_sessions_of_cells_are_measured(tmp_path):
    row = {"seconds": cell_streams.seconds("LSTM", 3, 8, 2, 1), "bytes": 3 << 20}
    assert [len(s) for s in row["seconds"].values()] == [2, 2, 2]
    name, time, jitted, fused, memory = cell_streams.line("LSTM", row)
    assert min(float(time), float(jitted), float(fused)) > 0 and memory == "3.0"
    found = stored_rows(tmp_path, {"LSTM": row}, threads=1)
    assert f"| LSTM | {time} | {jitted} | {fused} | 3.0 |" in cell_streams.text(found)


def test_the_gradient_of_a_long_sequence_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(long, "CHUNK", 20)
    long.check()
    wrong = {"wrong": ("all steps", lambda w, x: w.sum())}
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(long, "WAYS", {"`rnn`": long.WAYS["`rnn`"], **wrong})
        long.check()
    way = "`tbptt`, 10 chunks of 1000"
    row = long.gradient(way, 400)
    assert row.seconds > 0 and row.program > 0
    rows = {way: list(row._replace(seconds=1.25, peak=2 << 20, program=1 << 20))}
    text = long.text(stored_rows(tmp_path, rows, steps=400))
    assert f"| {way} | 10,000 steps | 1.2 | 2 | 1 |" in text
