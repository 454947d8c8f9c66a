"""Tests of signals at chosen moments; see also `interrupt_tries.py`."""

import signal
import subprocess
import sys

import g2p_command
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato import interrupts
from ostinato.apps import files
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import checkpoint
from ostinato.apps.report import CURVE_FILE
from ostinato.apps.tensors import RESUME_FILE


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return g2p_command.make_packages(tmp_path_factory.mktemp("packages"))


def interrupt(process, marker, number):
    """Send a signal when a line contains the marker.

    Return the code, the output, and whether the process ended before its time was up.
    """
    lines = []
    for line in process.stdout:
        lines.append(line)
        if marker in line:
            break
    else:
        pytest.fail(f"no {marker!r} in {lines}")
    process.send_signal(number)
    seconds = g2p_command.wait(process, g2p_command.ENDS)
    assert seconds is not None
    text = "".join(lines) + process.communicate()[0]
    assert not [word for word in g2p_command.BAD if word in text], text
    in_time = seconds < interrupts.GRACE - 2 * g2p_command.TICK
    return process.returncode, text, in_time


def whole_files(folder, in_time=True):
    """Return the files in the folder of a run; check that each is written in full.

    The picture comes last: a slow machine may not have had the time for it.
    """
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    parts = [name for name in names if name.endswith(files.PART)]
    assert not [name for name in parts if in_time or CURVE_FILE not in name]
    return names.difference(parts)


def test_while_modules_are_imported(packages, tmp_path):
    run = g2p_command.start(packages, tmp_path / "out", python=("-X", "importtime"))
    code, *_ = interrupt(run, " jax.nn", signal.SIGINT)
    assert code == 130 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["init", "_gradient"])
def test_while_the_first_functions_are_compiled(packages, tmp_path, name):
    run = g2p_command.start(packages, tmp_path, JAX_LOG_COMPILES="1")
    code, text, _ = interrupt(run, f"Compiling jit({name})", signal.SIGTERM)
    assert code == 143 and "interrupted before anything was learned" in text
    assert whole_files(tmp_path) == set()


def test_before_the_first_evaluation(packages, tmp_path):
    run = g2p_command.start(packages, tmp_path, JAX_LOG_COMPILES="1")
    code, text, _ = interrupt(run, "Compiling jit(_log_probs)", signal.SIGHUP)
    assert code == 129 and "go on with --resume" in text
    assert checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]["step"] == 14
    assert checkpoint.load_model(tmp_path).figures["best"] is None


def test_between_updates(packages, tmp_path):
    run = g2p_command.start(packages, tmp_path, "--epochs", "1000")
    code, text, in_time = interrupt(run, "epoch  1.0", signal.SIGTERM)
    assert code == 143 and "go on with --resume" in text
    step = checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]["step"]
    assert step >= 14
    assert checkpoint.load_model(tmp_path).figures["best"]["updates"] <= step
    assert CURVE_FILE in whole_files(tmp_path, in_time) or not in_time


def test_while_files_are_written(tmp_path):
    packages = g2p_command.make_packages(tmp_path / "packages", fsync_seconds=0.2)
    run = g2p_command.start(packages, tmp_path / "out")
    code, text, in_time = interrupt(run, "writing", signal.SIGTERM)
    assert code == 143 and "go on with --resume" in text
    # Of a busy machine, the signal may come after the files, while updates go on.
    assert checkpoint.FILES.read(tmp_path / "out" / RESUME_FILE)[1]["step"] >= 14
    whole_files(tmp_path / "out", in_time)


def test_while_a_disk_does_not_answer(tmp_path):
    packages = g2p_command.make_packages(tmp_path / "packages", fsync_seconds=60)
    out = tmp_path / "out"
    code, *_ = interrupt(g2p_command.start(packages, out), "writing", signal.SIGINT)
    assert code == 130
    with pytest.raises(UserError, match="there is no"):
        checkpoint.load_model(out)
    assert len(list(out.iterdir())) == 1  # the unfinished file
    files.make_folder(out, [checkpoint.MODEL_FILE])
    assert not list(out.iterdir())


def test_while_a_finished_process_ends():
    """Python restores default handlers before it deletes what modules hold."""
    program = """
import os, signal
from ostinato import interrupts
interrupts.arm()
interrupts.finish()
class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)
last = Last()
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_other_programs_keep_their_signals():
    code = (
        "import signal; before = [signal.getsignal(n) for n in (2, 15)]; "
        "import ostinato, threading; "
        "assert before == [signal.getsignal(n) for n in (2, 15)]; "
        "assert signal.set_wakeup_fd(-1) == -1 and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ALONE = """
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("interrupts", sys.argv[1])
interrupts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupts)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)  # as nohup may have started the tests
"""


IGNORED = """
ignored, other = (getattr(signal, name) for name in sys.argv[2:])
signal.signal(ignored, signal.SIG_IGN)  # as of a parent such as nohup
interrupts.arm()
os.kill(os.getpid(), ignored)
time.sleep(0.3)
print("alive")
os.kill(os.getpid(), other)
time.sleep(30)
"""


KEEPING = """
def keep():
    time.sleep(0.6)
    print("kept")
interrupts.arm()
with interrupts.keeping(keep):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
print("left")
time.sleep(30)
"""


def run_alone(program, *arguments):
    """Run a program with the module alone, as `ostinato` takes long to import."""
    command = [sys.executable, "-c", ALONE + program, interrupts.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "ignored, other, code", [("SIGHUP", "SIGTERM", 143), ("SIGINT", "SIGHUP", 129)]
)
def test_a_signal_that_the_parent_ignores_stays_ignored(ignored, other, code):
    assert run_alone(IGNORED, ignored, other) == (code, "alive\n", "")


def test_what_is_being_saved_is_not_left_before_it_is():
    """The main thread stops at the end of the context while another one saves."""
    assert run_alone(KEEPING) == (143, "kept\n", "")


FORGOTTEN = """
interrupts.arm()
with interrupts.keeping(lambda: print("kept")):
    pass
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""


FAILED = """
def keep():
    raise OSError("no space")
interrupts.arm()
with interrupts.keeping(keep):
    print("begun")
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(30)
"""


SLOW = """
interrupts.GRACE = 0.3
interrupts.arm()
with interrupts.keeping(lambda: (time.sleep(2), print("kept"))):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


LATE = """
read = os.read
os.read = lambda *given: (read(*given), time.sleep(0.3))[0]
interrupts.arm()
os.kill(os.getpid(), signal.SIGTERM)
interrupts.finish()
time.sleep(0.6)
print("left")
"""


def test_what_is_no_longer_to_be_saved_is_not():
    assert run_alone(FORGOTTEN) == (143, "", "")


def test_an_error_of_saving_is_told_and_what_was_printed_is_flushed(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert run_alone(FAILED) == (129, "begun\n", "ostinato: no space\n")


def test_saving_that_takes_too_long_is_given_up():
    assert run_alone(SLOW) == (130, "", "")


def test_a_signal_just_before_the_end_does_not_change_it():
    assert run_alone(LATE) == (0, "left\n", "")
