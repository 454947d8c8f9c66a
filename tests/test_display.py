"""A run whose display cannot be written goes on without it."""

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
import warnings

import jax
import pytest
from g2p_words import plain_jax, quiet, train_tiny  # noqa: F401
from rich.console import Console
from rich.table import Table

from ostinato.apps import report
from ostinato.apps.display import Display
from ostinato.apps.forecast.job import Job
from ostinato.apps.forecast.report import Row
from ostinato.apps.g2p import checkpoint
from ostinato.apps.tensors import RESUME_FILE


class Broken(io.StringIO):
    """A file that raises an error when it is written."""

    def __init__(self, error):
        super().__init__()
        self.error, self.writes = error, 0

    def write(self, text):
        self.writes += 1
        raise self.error


ERRORS = [
    OSError(28, "No space left on device"),
    UnicodeEncodeError("ascii", "\xe9", 0, 1, "ordinal not in range"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["full", "ascii"])
@pytest.mark.parametrize("terminal", [False, True])
def test_what_cannot_be_shown_ends_nothing(error, terminal):
    file = Broken(error)
    display = Display(Console(file=file, force_terminal=terminal))
    with display:
        display.say("a line")
        display.tick(0.5, "half")
        display.show(Table("a table"))
        writes = file.writes
        display.say("another line")
        assert file.writes == writes > 0
    display.close()


def test_the_table_of_figures_has_all_updates(tmp_path):
    row = Row(100.1, 1234568, 5001.25, 1e3, 1.0, 1e-3, 0.123456789, 2.0)
    report.write_csv(tmp_path, Row._fields, [row])
    written = (tmp_path / report.CSV_FILE).read_text().splitlines()[1]
    assert written == "100.1,1234568,5001.25,1000,1,0.001,0.123457,2"


@pytest.mark.parametrize("end", [(0.00703, 0.0422), (0.6, 0.6), (0.0, 0.0)])
@pytest.mark.parametrize("begin", [0, 1e4])
def test_the_learning_curve_shows_points_and_labels_whole(
    tmp_path, monkeypatch, begin, end
):
    drawn = []
    monkeypatch.setattr(report, "write_figure", lambda _, figure: drawn.append(figure))
    errors = [(0.6, 0.6), (0.3, 0.4), end]
    rows = [Row(i, i, begin + 9 * i, 1, 0.5, 1, *errors[i]) for i in range(3)]
    report.draw_curves(tmp_path, Job.curves, rows, rows[-1], "a title")
    (figure,) = drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        for line in axes.lines[:2]:  # then that of the best weights
            at = axes.transData.transform(line.get_xydata())
            assert (at > axes.bbox.min - 1).all() and (at < axes.bbox.max - 4).all()
            assert not line.get_clip_on()
        places = sorted(
            (text.get_window_extent() for text in axes.texts), key=lambda box: box.y0
        )
        assert places[0].y0 > axes.bbox.y0 - 2  # none is on the axis
        assert all(low.y1 < high.y0 + 2 for low, high in itertools.pairwise(places))


@pytest.mark.parametrize(
    "seconds, unit, last",
    [(0, "seconds", 0), (5, "seconds", 5), (180, "minutes", 3), (10800, "hours", 3)],
)
def test_the_learning_curve_has_a_unit_of_its_duration(
    tmp_path, monkeypatch, seconds, unit, last
):
    drawn = []
    monkeypatch.setattr(report, "write_figure", lambda _, figure: drawn.append(figure))
    row = Row(1, 1, seconds, 1, 0.5, 1, 0.5, 0.5)
    report.draw_curves(tmp_path, Job.curves, [row], row, "a title")
    upper, lower = drawn[0].axes
    assert lower.get_xlabel() == unit
    assert all(line.get_xdata()[-1] == last for line in (*upper.lines, *lower.lines))


def test_numbers_are_whole_on_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=40)
    rows = [("the last value, repeated", "a longer text", "12.345", "100.00")]
    report.print_table(
        Display(console), ["held-out end", "decoding"], ["PER, %", "WER, %"], rows, "."
    )
    said = console.file.getvalue()
    assert "12.345" in said and "100.00" in said and "WER, %" in said
    assert max(map(len, said.splitlines())) <= 40


def test_names_of_rows_are_there_on_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=30)
    rows = [("alpha", "5.123", "5.234"), ("beta", "6.123", "6.234")]
    numbers = "NLL, nats a frame", "with first frames"
    report.print_table(Display(console), ["pieces"], numbers, rows, ".")
    lines = console.file.getvalue().splitlines()
    assert any("al" in line and "5.123" in line for line in lines)
    assert any("be" in line and "6.234" in line for line in lines)


def test_letters_that_the_font_lacks_are_boxes(tmp_path):
    figure = report.new_figure(1, 1)
    figure.suptitle("温度")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.write_figure(tmp_path / "a.png", figure)


def test_the_bar_tells_what_a_run_does():
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True)) as display:
        display.name("compiling")
    assert "0 %  compiling" in file.getvalue()


def test_a_run_is_saved_without_its_display(tmp_path):
    console = Console(file=Broken(ERRORS[0]))
    assert train_tiny(tmp_path, epochs=1, console=console).figures
    assert (tmp_path / "model.safetensors").exists()


class Ended(Exception):
    """Ends a run of a test."""


def test_a_run_is_saved_while_its_terminal_blocks(tmp_path, monkeypatch):
    """As one does that nobody reads any more: a frozen window, a hung connection."""
    blocked, released = threading.Event(), threading.Event()
    count, keeps = itertools.count(1), []

    def tick(self, *_):
        if next(count) == 3:
            blocked.set()
            released.wait()
            raise Ended

    @contextlib.contextmanager
    def guard(keep):
        keeps.append(keep)
        yield

    def begin():
        with contextlib.suppress(Ended), jax.enable_x64(False):
            with jax.numpy_dtype_promotion("standard"):
                with jax.numpy_rank_promotion("allow"):
                    train_tiny(tmp_path, epochs=9, guard=guard)

    monkeypatch.setattr(Display, "tick", tick)
    run = threading.Thread(target=begin, daemon=True)
    run.start()
    assert blocked.wait(100)
    saving = threading.Thread(target=keeps[0], daemon=True)
    saving.start()
    saving.join(20)
    try:
        assert not saving.is_alive()
        assert checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]["step"] == 3
    finally:
        released.set()


PROGRAM = """
from ostinato.apps import report
from ostinato.apps.display import Display
display = Display()
for line in range(3):
    display.say(f"line {line}")
with open("done", "w") as file:
    file.write("done")
"""


def start(program, folder, **options):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, **options)


def test_a_reader_that_goes_away(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = start(PROGRAM, tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "done").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full(tmp_path):
    with open("/dev/full", "wb") as full:
        done = start(PROGRAM, tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "done").exists()


def test_a_command_replaces_letters_that_its_output_lacks(tmp_path):
    program = "from ostinato import cli; from ostinato.apps.display import Display; "
    program += "cli.app = lambda: Display().say('caf\\xe9'); cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = start(program, tmp_path, stdout=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stdout) == (0, b"caf?\n")
