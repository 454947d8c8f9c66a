"""Verdicts on kernels, with trials that are only a few words of Python."""

import json
import sys

import pytest

from ostinato._cuda import check, kernels, nvrtc
from ostinato._cuda.device import Gpu

GPU = Gpu("A GPU", (9, 0), 132, 232448, "13.0")
TEXT = kernels.TEXTS[0]
KILL = "import os, signal; os.kill(os.getpid()"
READY = "import sys; print('ready', flush=True); "
SAY = "print('[\"{}\", {}]')"


def say(verdict, final="true"):
    return READY + SAY.format(verdict, final)


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Run a program as a trial; return the failure and whether a file keeps it."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    found = nvrtc.Found(nvrtc.Compiler(None, "1.0"), None)
    monkeypatch.setattr(nvrtc, "find", lambda: found)

    def run(program, gpu=GPU):
        monkeypatch.setattr(check, "_verdicts", {})
        monkeypatch.setattr(
            check, "command", lambda *_: [sys.executable, "-c", program]
        )
        failure = check.failure(TEXT, gpu, "unused")
        return failure, bool(list(tmp_path.glob("*.verdict")))

    return run


def test_success_is_kept(trial):
    assert trial(say("")) == (None, True)
    assert trial("never run") == (None, True)
    assert check.failures(kernels.TEXTS, GPU) == {}


@pytest.mark.filterwarnings("ignore:kernels of linear:RuntimeWarning")
@pytest.mark.parametrize(
    ("program", "words", "kept"),
    [
        (say("a wrong result"), "a wrong result; remove", True),
        (say("an error", "false"), "did not begin: an error", False),
        (READY + "print('no verdict')", "ended with an error", True),
        (READY + "print('[1]')", "ended with an error", True),
        (READY + "import os; os.abort()", "ended with signal 6", True),
        (READY + "sys.exit('out of memory')", "ended with an error: out of mem", True),
        (READY + "import time; time.sleep(60)", "did not end within 0.2 s", True),
        (
            READY + f"{KILL}, signal.SIGKILL)",
            "begin: their trial ended with sig",
            False,
        ),
        # Where a shell starts tests in the background, they inherit that it is ignored.
        (
            READY
            + "import signal\n"
            + "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            + f"{KILL}, signal.SIGINT)",
            "did not begin: their trial end",
            False,
        ),
        (READY + f"{KILL}, signal.SIGTERM)", "did not begin: their trial end", False),
        (READY + "sys.stderr.buffer.write(b'\\xff'); sys.exit(1)", "an error", True),
        ("import sys; sys.exit('no jax')", "did not begin: their trial ended", False),
        ("import time; time.sleep(60)", "did not begin: their trial did not", False),
        ("", "ended with an error", False),
    ],
)
def test_failures_are_told(program, words, kept, trial, monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.2)
    if not kept:
        monkeypatch.setattr(check, "START_LIMIT", 3.0)
    failure, stored = trial(program)
    assert words in failure and stored == kept
    assert (TEXT in check.failures(kernels.TEXTS, GPU)) is True
    assert check.failures(kernels.TEXTS, GPU._replace(name="another")) == {}


def test_disabled_kernels_are_warned_of_once(trial):
    with pytest.warns(RuntimeWarning, match=r"linear \(STORAGE=float.* on A GPU, and"):
        trial(say("they are wrong"))
    assert "they are wrong" in check.failure(TEXT, GPU, "unused")


def test_another_driver_or_gpu_is_tried_again(trial):
    assert trial(say(""))[0] is None
    with pytest.warns(RuntimeWarning):
        assert trial(say("no"), GPU._replace(driver="13.1"))[0]
    with pytest.warns(RuntimeWarning):
        assert trial(say("no"), GPU._replace(name="B GPU"))[0]


def test_a_trial_trusts_its_kernels(trial, monkeypatch):
    monkeypatch.setattr(check, "_in_trial", False)
    check.begin_trial()
    assert trial("sys.exit(1)") == (None, False)


def test_another_version_of_the_code_is_tried_again(trial, monkeypatch):
    assert trial(say(""))[0] is None
    monkeypatch.setattr(check, "_sources", lambda: "other packers")
    with pytest.warns(RuntimeWarning):
        assert trial(say("no"))[0]


def test_a_text_that_nvrtc_refuses_is_no_error(trial, monkeypatch):
    def case():
        raise nvrtc.CompileError("an unknown architecture\nand more")

    monkeypatch.setattr(check, "_verdicts", {})
    with pytest.warns(RuntimeWarning, match="NVRTC refuses them: an unknown arch"):
        failure = check.failure(TEXT, GPU, "unused", case)
    assert failure == "NVRTC refuses them: an unknown architecture"


def test_an_interrupted_parent_ends_its_trial(trial, monkeypatch, tmp_path):
    def interrupt(child, output):
        waited.append(child)
        raise KeyboardInterrupt

    waited = []
    monkeypatch.setattr(check, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trial("import time; time.sleep(60)")
    assert waited[0].returncode == -9
    assert not list(tmp_path.glob("*.verdict"))


def test_a_python_without_a_program_is_told(trial, monkeypatch):
    monkeypatch.setattr(check, "command", lambda *_: [None])
    monkeypatch.setattr(check, "_verdicts", {})
    with pytest.warns(RuntimeWarning, match="no other process could be started"):
        check.failure(TEXT, GPU, "unused")


@pytest.mark.parametrize(
    ("error", "is_ready", "final"),
    [
        (RuntimeError("an illegal address\nFor simplicity, JAX"), True, True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("no cuBLAS"), False, False),
    ],
)
def test_errors_of_a_trial(error, is_ready, final, monkeypatch, capsys):
    def trial():
        if is_ready:
            check.ready()
        raise error

    monkeypatch.setattr(check, "_in_trial", False)
    monkeypatch.setattr(check, "_is_ready", False)
    monkeypatch.setattr(check, "PLATFORM", "cpu")
    check.report(trial)
    verdict, told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == final
    assert (
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        in verdict
    )
    assert "For simplicity" not in verdict


def test_a_trial_without_a_gpu_says_nothing_about_kernels(monkeypatch, capsys):
    monkeypatch.setattr(check, "_in_trial", False)
    check.report(lambda: "never run")
    verdict, final = json.loads(capsys.readouterr().out)
    assert verdict.endswith("JAX runs on the cpu") and not final
