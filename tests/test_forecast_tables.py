"""Odd tables: columns of every magnitude, hostile files, names in pictures."""

import csv
import os
import re
from datetime import datetime, timedelta

import numpy as np
import pytest
from g2p_words import plain_jax, quiet  # noqa: F401
from test_cli import one_line, ostinato

from ostinato.apps.errors import UserError
from ostinato.apps.forecast import report, table
from ostinato.apps.forecast.train import train

TINY = dict(look_back=8, horizon=8, segment=4, hidden=16, lr=0.03, dropout=0.0)


def write_columns(path, **columns):
    """Write columns, one value for every hour."""
    lines = [",".join(["when", *columns])]
    for hour, row in enumerate(zip(*columns.values(), strict=True)):
        when = datetime(2020, 1, 1) + timedelta(hours=hour)
        lines.append(",".join([str(when), *map(repr, map(float, row))]))
    path.write_text("\n".join(lines))
    return path


WAVE = np.sin(np.arange(200) * np.pi / 4)
COLUMNS = dict(
    tiny=(3 + WAVE) * 1e-9,
    huge=(3 + WAVE) * 1e200,
    far=1e12 + 100 * WAVE,
    money=5.1 + 0 * WAVE,
    late=np.where(np.arange(200) < 150, 4.0, 7.1),
)


def test_columns_of_every_magnitude_are_forecast(tmp_path):
    path, out, console = tmp_path / "odd.csv", tmp_path / "run", quiet()
    write_columns(path, **COLUMNS)
    assert train(path, out, epochs=15, batch=8, console=console, **TINY).figures
    told = " ".join(console.export_text().split())
    assert told.count("warning: the column") == 1
    assert "the column 'late' is constant in the rows to learn from and changes" in told
    written = tmp_path / "next.csv"
    result = ostinato("forecast", path, "--model", out, "--out", written)
    assert result.exit_code == 0, result.output
    _, *rows = csv.reader(written.read_text().splitlines())
    got = np.array([[float(cell) for cell in row[1:]] for row in rows])
    wave = np.sin(np.arange(200, 208) * np.pi / 4)
    for i, (offset, size) in enumerate([(3e-9, 1e-9), (3e200, 1e200), (1e12, 100)]):
        np.testing.assert_allclose((got[:, i] - offset) / size, wave, atol=0.6)
    assert {row[4] for row in rows} == {"5.1"} and {row[5] for row in rows} == {"7.1"}
    assert len({row[3] for row in rows}) == 8 and all("." in row[3] for row in rows)


def test_a_column_that_explodes_is_named(tmp_path):
    values = np.where(np.arange(200) < 150, WAVE, 1e25)
    path = write_columns(tmp_path / "jump.csv", fine=WAVE, jump=values)
    with pytest.raises(UserError, match="the column 'jump' must stay within"):
        train(path, tmp_path / "run", epochs=1, console=quiet(), **TINY)
    assert not (tmp_path / "run").exists()


def test_names_are_no_formulas(tmp_path):
    names = ["US$_x_$", "$^$", "a_b"]
    values = np.zeros((4, 3))
    report.draw(tmp_path, names, values, values, values)
    assert (tmp_path / "forecasts.png").read_bytes().startswith(b"\x89PNG")


def bad(path, text, message):
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        table.read(path)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators_are_told(tmp_path, mark):
    text = f"when{mark}a\n2020-01-01{mark}1,5\n2020-01-02{mark}2,5\n"
    message = f"must have commas between its cells, .* got {re.escape(repr(mark))}"
    bad(tmp_path / "a.csv", text, message)


def test_lines_are_counted_as_in_an_editor(tmp_path):
    text = 'when,"a\nb"\n\n2020-01-01,1\n2020-01-02,x\n'
    with pytest.raises(UserError, match="line 5: 'a.nb' is no number: 'x'"):
        table.read(write(tmp_path / "a.csv", text))


@pytest.mark.parametrize(
    "row, message",
    [
        ('2020-03-22,"1,2', "must have 3 cells, got 2"),
        ('2020-03-22,1,"2', "'b' is no number: '2.n2020"),
    ],
)
def test_a_quote_that_is_not_closed_is_found(tmp_path, row, message):
    day = datetime(2020, 1, 1)
    lines = ["when,a,b", *(f"{day + timedelta(i)},1,2" for i in range(160))]
    lines[81] = row
    path = tmp_path / "a.csv"
    bad(path, "\n".join(lines), f"lines 82 to 161, joined by a quote: {message}")
    lines[90] = "x" * csv.field_size_limit()
    bad(path, "\n".join(lines), "no CSV file: lines 82 to 91, joined .*: field larger")


@pytest.mark.parametrize(
    "names, message",
    [
        ("when,a,b,a,b,c", "several columns named a, b"),
        ("a,b,c,d,a,e", "several columns named a"),
        ("when,a,,c,d,e", "must have a name for each column, got '' for column 3"),
        ("when,a,b,c,d, ", "got ' ' for column 6"),
        (
            "2019-12-31,1,2,3,4,5",
            "begin with a row of names, got the date '2019-12-31'",
        ),
    ],
)
def test_columns_have_different_names(tmp_path, names, message):
    rows = [f"2020-01-0{day},1,2,3,4,5" for day in (1, 2)]
    bad(tmp_path / "a.csv", "\n".join([names, *rows]), message)


def test_the_column_of_dates_needs_no_name(tmp_path):
    text = ",a\n2020-01-01,1\n2020-01-02,2\n"  # as an index of pandas is written
    assert table.read(write(tmp_path / "a.csv", text)).names == ("a",)


def test_wide_files_have_short_messages(tmp_path):
    names, numbers = (",".join(f"{c}{i}" for i in range(10_000)) for c in ("c", ""))
    text = "\n".join([names, numbers, numbers])
    bad(tmp_path / "a.csv", text, r"a column of dates .* got 0, 1, .* \.\.\. in line 2")


def write(path, text):
    path.write_text(text)
    return path


def test_files_without_an_end(tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match="it must be a file, or a pipe such as /dev/std"
    ):
        table.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    message = one_line(ostinato("train", "forecast", tmp_path / "pipe"))
    assert "it must be a file, or a pipe such as /dev/stdin" in message
    path = write(tmp_path / "a.csv", "when,a\n2020-01-01,1\n2020-01-02,2\n")
    for name in ("MOST_BYTES", "MOST_LINE"):
        with monkeypatch.context() as patch:
            patch.setattr(table, name, 10)
            with pytest.raises(UserError, match="it must have at most .* in a line"):
                table.read(path)


def test_a_pipe_that_is_open_is_read():
    reader, writer = os.pipe()
    os.write(writer, b"when,a\n2020-01-01,1\n2020-01-02,2\n")
    os.close(writer)
    read = table.read(table.Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert read.values.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    "split, parts",
    [
        ([0.5, 0.2, 0.2], (50, 20, 20)),  # the last rows are for nothing
        ([0.1, 0.1, 0.1], (10, 10, 10)),
        ([0.7, 0.1, 0.2], (70, 10, 20)),
        ([50.0, 20.0, 10.0], (50, 20, 10)),
    ],
)
def test_shares_may_leave_rows_at_the_end(split, parts):
    assert table.parts_of(100, split) == parts
