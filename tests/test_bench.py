"""`ostinato bench`: its options, a run, its files, and how it ends."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys

import g2p_command
import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ostinato import cli
from ostinato.apps.bench import (
    equality,
    machine,
    page,
    peers,
    picture,
    results,
    session,
    settings,
    timing,
    view,
)
from ostinato.apps.bench.problem import Problem
from ostinato.apps.errors import UserError

RUNNER = CliRunner()
OPTIONS = dict(mode="lstm,gru", batch="2, 1", steps="3", hidden="4", ragged=False)
OPTIONS |= dict(peers=None, seconds=0.01)
TINY = "--mode gru --batch 2 --steps 3 --hidden 4 --seconds 0.001".split()
SUFFIXES = ["html", "json", "png"]


@pytest.fixture(autouse=True)
def _plain_jax_and_short_turns(monkeypatch):
    monkeypatch.setattr(timing, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(timing, "REST_SECONDS", 0.0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def bench(*arguments):
    return RUNNER.invoke(cli.app, ["bench", *map(str, arguments)])


def one_line(result, code=2):
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("ostinato: ") and result.stderr.count("\n") == 1
    return result.stderr


def made(kind="train", skipped=None, **seconds):
    """Make a row with times in milliseconds, in rounds 10 % apart."""
    problem = Problem("gru", kind, batch=2, steps=3, input_size=4, hidden_size=4)
    times = {name: [ms * 9e-4, ms * 1e-3, ms * 11e-4] for name, ms in seconds.items()}
    differences = dict.fromkeys(times, 1e-6)
    return results.Row(problem, "cpu", times, differences, 1e-5, skipped or {})


# ---------------------------------------------------------------------------- options


def test_every_combination_is_a_problem():
    found = settings.read(**OPTIONS)
    assert len(found.problems) == len(set(found.problems)) == 2 * 2 * 2
    assert found.contenders == [peers.OURS, peers.XLA, *peers.PEERS]
    assert {(p.mode, p.batch) for p in found.problems} == {
        (mode, batch) for mode in ("lstm", "gru") for batch in (1, 2)
    }
    assert all(p.input_size == p.hidden_size == 4 for p in found.problems)
    found = settings.read(**OPTIONS | dict(peers="scan", ragged=True))
    assert found.contenders[2:] == ["scan"]
    assert all(problem.ragged for problem in found.problems)


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("mode", "elman", "`mode` must be names among lstm, gru.*got 'elman'"),
        ("mode", "gru,", "`mode` must be names.*got ''"),
        ("batch", "0", "`batch` must be numbers from 1.*got '0'"),
        ("batch", "1,-2", "got '-2'"),
        ("steps", "ten", "`steps` must be numbers.*got 'ten'"),
        ("hidden", "4" * 5000, "`hidden` must be numbers"),
        ("hidden", "²", "`hidden` must be numbers"),
        ("hidden", "999999", "too large together.*an array of .* GiB, 4 are allowed"),
        ("peers", "tf", "`peers` must be names among torch, onnxruntime, .*got 'tf'"),
        ("seconds", 0.0, "`seconds` must be a number above 0, got 0"),
        ("seconds", float("nan"), "above 0, got nan"),
        ("seconds", float("inf"), "above 0, got inf"),
    ],
)
def test_wrong_values_say_what_was_wanted(option, value, message):
    with pytest.raises(UserError, match=message):
        settings.read(**OPTIONS | {option: value})


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="`torch`, which is not.*pip install torch"):
        settings.read(**OPTIONS | dict(peers="scan,torch"))


# -------------------------------------------------------------------------------- runs


def test_all_that_are_installed_are_measured(tmp_path):
    result = bench(*TINY, "--out", tmp_path / "new", "--ragged")
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(tmp_path / "new")) == [f"bench.{s}" for s in SUFFIXES]
    stored = json.loads((tmp_path / "new" / "bench.json").read_text())
    infer, train = stored["rows"]
    assert infer["problem"]["kind"] == "infer" and train["problem"]["ragged"]
    assert {"ostinato", "scan"} <= train["seconds"].keys()
    for row in stored["rows"]:
        assert not [r for r in row["skipped"].values() if timing.OTHER_RESULTS in r]
        assert {*row["seconds"], *row["skipped"]} == {
            peers.OURS,
            peers.XLA,
            *peers.PEERS,
        }
        assert all(len(s) >= session.LEAST_ROUNDS for s in row["seconds"].values())
        assert row["seconds"].keys() == row["differences"].keys()
        assert max(row["differences"].values()) <= row["allowed"] < 1e-4
    assert "gru/N2H4T3-ragged-infer: " in result.stdout
    assert "bench.html" in result.stdout


def test_mistakes_are_one_line(tmp_path):
    out = tmp_path / "out"
    assert "`steps` must be" in one_line(bench("--steps", "-1", "--out", out))
    assert not out.exists()
    out.write_text("a file")
    assert "cannot make the folder" in one_line(bench(*TINY, "--out", out))


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path, monkeypatch):
    def not_allowed(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", not_allowed)
    message = one_line(bench(*TINY, "--out", tmp_path))
    assert f"cannot write in the folder {tmp_path}: Permission denied" in message


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_package_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = one_line(bench())
    assert f"`{package}`" in message and "pip install 'ostinato[demo]'" in message


def test_wrong_results_end_the_run(tmp_path, monkeypatch):
    right = peers.reference
    monkeypatch.setattr(
        peers,
        "reference",
        lambda *args: {name: a + 1e-3 for name, a in right(*args).items()},
    )
    result = bench(*TINY, "--peers", "none", "--out", tmp_path)
    message = one_line(result, code=1)
    assert re.search("wrong results, please report: y differs by .*allowed", message)
    assert os.listdir(tmp_path) == []


def test_a_peer_that_fails_is_left_out(tmp_path, monkeypatch):
    build = peers.build

    def fails(name, *rest):
        if name == "scan":
            raise OSError("no such library")
        return build(name, *rest)

    options = settings.read(**OPTIONS | dict(mode="gru", batch="1", peers="scan"))
    monkeypatch.setattr(peers, "reference", lambda *_: {})
    monkeypatch.setattr(equality, "check", lambda *_: 0.0)
    monkeypatch.setattr(peers, "build", fails)
    shown = Console(file=io.StringIO(), width=80)
    rows = session.run(options, tmp_path, console=shown)
    assert all(row.seconds.keys() <= {peers.OURS, peers.XLA} for row in rows)
    assert "without scan: failed: OSError: no such library" in shown.file.getvalue()


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    command = [sys.executable, "-u", "-m", "ostinato", "bench", *TINY, "--peers=none"]
    sources = [str(g2p_command.SOURCES), os.environ.get("PYTHONPATH", "")]
    g2p_command.heed_interrupts()
    process = subprocess.Popen(
        [*command, "--steps=3,4,5,6,7,8,9", f"--out={tmp_path}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert any(line.startswith("14 rows") for line in process.stdout)
        assert any(line.startswith("gru/N2H4T3-infer") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert g2p_command.wait(process, g2p_command.ENDS) is not None
    finally:
        process.kill()
    last = process.communicate()[0].splitlines()[-1]
    assert process.returncode == 130, last
    assert re.match(r"interrupted; .* has \d+ rows?$", last)
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) >= 1
    assert sorted(os.listdir(tmp_path)) == [f"bench.{s}" for s in SUFFIXES]


# ------------------------------------------------------------------------------- files


def test_the_page_needs_no_other_file_and_escapes_what_it_says():
    rows = [made("infer", ostinato=2.0, scan=5.0, torch=1.0)]
    rows += [made(ostinato=2.0, scan=5.0, skipped={"torch": "broken: <b>"})]
    here = machine.describe() | {"cpu": "<script> & co"}
    drawn = picture.draw(rows, here)
    assert drawn.startswith(b"\x89PNG")
    text = page.text(rows, here, drawn)
    assert "<script>" not in text and "&lt;script&gt; &amp; co" in text
    assert "without torch: broken: &lt;b&gt; (gru/N2H4T3-train)" in text
    assert "2.00 ms ±5 %" in text and "5.00 <small>(2.50x)</small>" in text
    assert re.findall('(?:src|href)="(.{10})', text) == ["data:image"]


def test_a_terminal_shows_the_table_as_it_grows():
    shown = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    options = settings.read(**OPTIONS | dict(mode="gru", batch="1"))
    row = made(ostinato=2.0, xla=3.0, onnxruntime=1.0, torch=250.0, flax=2.4, scan=1.9)
    with view.View(shown, options, machine.describe()) as display:
        display.draw([row], "timing gru")
        display.finish([row, made(ostinato=1.0, skipped={"flax": "no"})])
    text = shown.file.getvalue()
    assert "timing gru (1 of 2 rows)" in text
    line = next(one for one in text.splitlines() if " gru training" in one)
    want = ["2.00", "ms", "±5", "%", "1.50", "125.0", "0.500", "1.20", "0.950"]
    assert line.split()[2:] == want
    assert len(line) < 80
    after = text.rpartition("\x1b[?25h")[2]  # the cursor is back
    assert after.split("\n")[-2:] == ["without flax: no (gru/N2H4T3-train)", ""]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_that_cannot_be_shown_ends_nothing(terminal):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    shown = Console(file=Full(), width=80, force_terminal=terminal)
    options, row = settings.read(**OPTIONS), made(ostinato=2.0)
    with view.View(shown, options, machine.describe()) as display:
        display.draw([row], "timing gru")
        display.done([row])
        display.finish([row])
    assert shown.quiet


def test_labels_name_the_sizes_that_differ():
    problems = settings.read(**OPTIONS | dict(mode="gru")).problems
    labels = [results.label(problem, problems) for problem in problems]
    assert labels[:2] == ["gru N=2 inference", "gru N=2 training"]
    assert results.common(problems) == "T = 3, H = 4, equal lengths, float32"
    other = dataclasses.replace(problems[0], steps=9)
    assert results.label(other, [*problems, other]) == "gru N=2 T=9 inference"
