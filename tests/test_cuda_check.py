"""Verdicts on kernels, with trials that are only a few words of Python."""

import sys

import pytest

from ostinato._cuda import check, kernels, nvrtc
from ostinato._cuda.device import Gpu

GPU = Gpu("A GPU", (9, 0), 132, 232448, "13.0")
TEXT = kernels.TEXTS[0]
READY = "import sys; print('ready', flush=True); "


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
    assert trial(READY + "print('\"\"')") == (None, True)
    assert trial("never run") == (None, True)
    assert check.failures(kernels.TEXTS, GPU) == {}


@pytest.mark.filterwarnings("ignore:kernels of linear:RuntimeWarning")
@pytest.mark.parametrize(
    ("program", "words", "kept"),
    [
        (READY + "print('\"a wrong result\"')", "a wrong result; remove", True),
        (READY + "import os; os.abort()", "ended with signal 6", True),
        (READY + "sys.exit('out of memory')", "ended with an error: out of mem", True),
        (READY + "import time; time.sleep(60)", "did not end within 0.2 s", True),
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
        trial(READY + "print('\"they are wrong\"')")
    assert "they are wrong" in check.failure(TEXT, GPU, "unused")


def test_another_driver_or_gpu_is_tried_again(trial):
    right = READY + "print('\"\"')"
    assert trial(right)[0] is None
    with pytest.warns(RuntimeWarning):
        assert trial(READY + "print('\"no\"')", GPU._replace(driver="13.1"))[0]
    with pytest.warns(RuntimeWarning):
        assert trial(READY + "print('\"no\"')", GPU._replace(name="B GPU"))[0]


def test_a_trial_trusts_its_kernels(trial, monkeypatch):
    monkeypatch.setattr(check, "_in_trial", False)
    check.begin_trial()
    assert trial("sys.exit(1)") == (None, False)
