"""Runs on several devices and in several processes: the loss curve of one."""

import os
import re
import signal
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import compile_options
import g2p_command
import jax
import numpy as np
import pytest
from g2p_words import (
    language,
    plain_jax,  # noqa: F401
    quiet,
    train_tiny,
)
from job_runs import empty_pictures, models_made_once  # noqa: F401
from test_cli import one_line, ostinato

from benchmarks import scaling
from ostinato.apps import devices as devices_module
from ostinato.apps import session
from ostinato.apps.devices import Devices, connect
from ostinato.apps.errors import UserError
from ostinato.apps.forecast import use
from ostinato.apps.forecast.train import train
from ostinato.apps.report import CSV_FILE
from ostinato.apps.tensors import MODEL_FILE, RESUME_FILE

SIZES = dict(look_back=8, horizon=8, segment=4, hidden=4, batch=16)
TINY = "--look-back 8 --horizon 8 --segment 4 --hidden 4 --batch 16".split()
CURVE = ("epoch", "updates", "loss", "learning_rate")
ENDS = 30.0  # most seconds until the other process has ended, on a busy machine


@pytest.fixture(scope="module")
def waves(tmp_path_factory):
    """Write two waves."""
    path = tmp_path_factory.mktemp("data") / "waves.csv"
    lines = ["when,a,b"]
    for hour in range(200):
        when = datetime(2020, 1, 1) + timedelta(hours=hour)
        lines.append(f"{when},{np.sin(0.7 * hour):.6f},{5 + np.cos(0.3 * hour):.6f}")
    path.write_text("\n".join(lines))
    return path


def curve(folder, names=(*CURVE, "mse", "mae")):
    """Return columns of `metrics.csv` that do not depend on the clock."""
    table = np.genfromtxt(folder / CSV_FILE, delimiter=",", names=True)
    return np.stack([table[name] for name in names])


# ------------------------------------------------------------------- several devices


@pytest.mark.usefixtures("empty_pictures")
def test_two_devices_have_the_loss_curve_of_one(waves, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for out, devices in ((one, None), (two, 2)):
        train(waves, out, epochs=2, devices=devices, console=quiet(), **SIZES)
    np.testing.assert_allclose(curve(two), curve(one), rtol=1e-4)
    want, got = (use.FILES.read(out / RESUME_FILE)[0] for out in (one, two))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"ragged": True}], ids=["padded", "ragged"])
def test_words_on_two_devices_have_the_loss_curve_of_one(tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    words = {w: p for w, p in language(120).items() if len(w) == 3}
    options |= dict(dropout=0.2, layers=2, dictionary=words, epochs=2, hidden=4)
    for out, devices in ((one, None), (two, 2)):
        train_tiny(out, devices=devices, **options)
    names = (*CURVE, "dev_per")
    np.testing.assert_allclose(curve(two, names), curve(one, names), rtol=1e-4)


def test_devices_that_do_not_fit(waves, tmp_path):
    many = len(jax.devices()) + 1
    message = f"`devices` must be at most {many - 1}, the devices of this process"
    with pytest.raises(UserError, match=message):
        train(waves, tmp_path, devices=many, **SIZES)
    with pytest.raises(UserError, match="`devices` must be at least 1, got 0"):
        Devices(0)
    with pytest.raises(UserError, match="`batch` must be a multiple of 2, the number"):
        train(waves, tmp_path, devices=2, **SIZES | {"batch": 15})


def test_mpi_takes_one_device_of_each_process(monkeypatch):
    monkeypatch.setattr(devices_module, "_uses_mpi", lambda: True)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="must be 1 where JAX uses MPI, got 2; sta"):
        Devices(2)


@pytest.mark.parametrize("last, code", [("", 0), ("raise ValueError", 1)])
def test_a_process_that_used_mpi_ends_before_jax_uses_it_again(last, code):
    program = f"""
import atexit, os
from ostinato.apps import devices
class Communicator:
    def __del__(self):
        os._exit(99)  # as MPI aborts
atexit.register(devices._end)
communicator = Communicator()
print("written")
{last}
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (code, "written\n"), done.stderr


def test_processes_that_find_no_others_end_with_an_error_under_mpi():
    command = [sys.executable, "-m", "ostinato", "train", "forecast", "no.csv"]
    mpi = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}
    environment = {k: v for k, v in os.environ.items() if "MPI_" not in k} | mpi
    done = subprocess.run(
        [*command, "--distributed"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "could not connect the processes" in done.stderr
    assert done.returncode == 2


def test_addresses_that_are_incomplete():
    with pytest.raises(UserError, match="must have all of --coordinator HOST:PORT"):
        connect(True, "127.0.0.1:1", None, 0)
    message = one_line(ostinato("train", "forecast", "no.csv", "--processes", 2))
    assert "--coordinator, --processes and --process need --distributed" in message
    for address in ("nonsense", ":1", "a:", "a:0", "a:65536", "a:x"):
        with pytest.raises(UserError, match="`coordinator` must be HOST:PORT with a p"):
            connect(True, address, 2, 0)


@pytest.mark.parametrize(
    "processes, process, message",
    [
        (0, 0, "`processes` must be at least 1, got 0"),
        (2, 2, "`process` must be from 0 to 1, below `processes`, got 2"),
        (2, -1, "`process` must be from 0 to 1, below `processes`, got -1"),
    ],
)
def test_numbers_of_processes_that_cannot_be(processes, process, message):
    with pytest.raises(UserError, match=message):
        connect(True, "127.0.0.1:1", processes, process)


@pytest.mark.parametrize(
    "known, coordinator, process, message",
    [
        ({}, "127.0.0.1:1", 0, "no address for the name of this host, 'wolf'"),
        (
            {"wolf": "127.0.1.1", "lead": "192.0.2.1"},
            "lead:1",
            1,
            "lead:1 cannot reach this host by its name, 'wolf', whose address 127.0.",
        ),
        ({"wolf": "127.0.1.1", "lead": "192.0.2.1"}, "lead:1", 0, None),
        ({"wolf": "192.0.2.2", "lead": "192.0.2.1"}, "lead:1", 1, None),
        ({"wolf": "127.0.1.1", "::1": "::1"}, "[::1]:1", 1, None),
        ({"wolf": "127.0.1.1", "127.0.0.1": "127.0.0.1"}, "127.0.0.1:1", 1, None),
        ({"wolf": "127.0.1.1"}, "unknown:1", 1, None),  # for JAX to complain about
    ],
    ids="nameless alone first reached v6 local unknown".split(),
)
def test_names_that_lead_nowhere(monkeypatch, known, coordinator, process, message):
    """The collectives of CPUs give other hosts the address of this host's name."""

    def addresses(host, port):
        if host not in known:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    begun = []
    monkeypatch.setattr(socket, "gethostname", lambda: "wolf")
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *given, **_: begun.append(given)
    )
    if message is None:
        connect(True, coordinator, 2, process)
        assert begun == [(coordinator, 2, process)]
    else:
        with pytest.raises(UserError, match=re.escape(message)):
            connect(True, coordinator, 2, process)
        assert not begun


@pytest.mark.parametrize("process", [0, 1])
def test_processes_that_never_come(process):
    """JAX itself aborts, with addresses of its code and without a reason."""
    code = (
        "from ostinato import cli\nfrom ostinato.apps import devices\n"
        "devices.START_SECONDS = 1\ncli.main()"
    )
    options = ["--distributed", "--coordinator", f"127.0.0.1:{scaling.free_port()}"]
    options += ["--processes", "2", "--process", str(process)]
    command = [sys.executable, "-c", code, "train", "forecast", "no.csv", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "ostinato" in line]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    assert "has waited 1 s for all processes to connect to 127.0.0.1:" in lines[0]


def test_processes_with_other_options(monkeypatch):
    places = Devices()
    places.check_same("a")
    rows = np.array([[1, 2], [1, 2], [1, 3]], np.uint8)
    monkeypatch.setattr(places, "_gather", lambda row: list(rows))
    with pytest.raises(UserError, match="got others in process 2 than in process 0$"):
        places.check_same("a")
    monkeypatch.setattr(devices_module, "_uses_mpi", lambda: True)
    with pytest.raises(UserError, match="process 0; one `mpiexec` must start them all"):
        places.check_same("a")


def test_a_failed_update_of_one_process_is_an_error_of_the_program(
    waves, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(session.Run, "train", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        train(waves, tmp_path, epochs=1, console=quiet(), **SIZES)


def test_hosts_that_never_reached_each_other(waves, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("Gloo context initialization failed: refused")

    monkeypatch.setattr(session.Run, "train", fail)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(Devices, "_gather", lambda self, row: [row])
    message = "nothing was learned yet; the name of each host must have an address that"
    with pytest.raises(UserError, match=message):
        train(waves, tmp_path, epochs=1, console=quiet(), **SIZES)


# ----------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return variables that let the processes of these tests compile once."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


@pytest.fixture
def start(waves, cache):
    """Return a function that starts two processes of a run; kill what is left."""
    started = []

    def two(out, *options, launcher=None):
        flags = compile_options.flags(compile_options.QUICK)  # and one device
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
        environment |= cache
        command = [sys.executable, "-um", "ostinato", "train", "forecast", waves]
        command += [*TINY, "--out", out, *options, "--distributed"]
        address = [
            "--processes",
            2,
            "--coordinator",
            f"127.0.0.1:{scaling.free_port()}",
        ]
        each = [[*command, *address, "--process", process] for process in range(2)]
        if launcher is not None:
            each = [[*launcher, *command]]
            environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "mpi"
        for one in each:
            started.append(
                subprocess.Popen(
                    list(map(str, one)),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    yield two
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.usefixtures("empty_pictures")
def test_two_processes_have_the_loss_curve_of_one(waves, tmp_path, start):
    one, two = tmp_path / "one", tmp_path / "two"
    train(waves, one, epochs=2, console=quiet(), **SIZES)
    processes = start(two, "--epochs", 2)
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    np.testing.assert_allclose(curve(two), curve(one), rtol=1e-4)
    want, got = (use.load(out).figures["final"]["forecast"] for out in (one, two))
    np.testing.assert_allclose(got["mse"], want["mse"], rtol=1e-4)
    assert "epoch  2.0" in first and (two / "forecasts.png").exists()
    assert [line for line in second.splitlines() if "Gloo" not in line] == []


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.skipif(not scaling.has_mpi(), reason="needs MPI, and MPIwrapper for JAX")
def test_processes_that_communicate_by_mpi_have_the_loss_curve_of_one(
    waves, tmp_path, start
):
    one, two = tmp_path / "one", tmp_path / "two"
    train(waves, one, epochs=2, console=quiet(), **SIZES)
    (launched,) = start(two, "--epochs", 2, launcher=[*scaling.MPIEXEC, 2])
    text = launched.communicate(timeout=120)[0]
    assert launched.returncode == 0, text
    np.testing.assert_allclose(curve(two), curve(one), rtol=1e-4)


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize(
    "killed, number, code",
    [(0, signal.SIGKILL, -9), (1, signal.SIGTERM, 143)],
    ids=["killed", "terminated"],
)
def test_when_one_process_ends_so_does_the_other(
    waves, tmp_path, start, killed, number, code
):
    processes = start(tmp_path, "--epochs", 100_000)
    while (line := processes[0].stdout.readline()) and not line.startswith("epoch "):
        pass
    processes[killed].send_signal(number)
    other = processes[1 - killed]
    assert g2p_command.wait(processes[killed], ENDS) is not None
    assert g2p_command.wait(other, ENDS) is not None
    assert processes[killed].returncode == code
    text = " ".join(other.communicate()[0].split())
    assert other.returncode == 2, text
    assert "another process of this run has ended or cannot be reached" in text
    assert "Traceback" not in text and "go on with --resume" in text
    _, header = use.FILES.read(tmp_path / RESUME_FILE)
    use.FILES.read(tmp_path / MODEL_FILE)
    epochs = header["step"] // 7 + 2
    summary = train(waves, tmp_path, resume=True, epochs=epochs, console=quiet())
    assert summary.figures is not None and summary.best.epoch <= epochs
