"""Dates of a table: offsets from UTC, fractions, and those of the rows to forecast."""

from datetime import datetime, timedelta

import jax
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps.errors import UserError
from ostinato.apps.forecast import dates, table, use
from ostinato.apps.forecast.model import Forecaster
from ostinato.apps.forecast.windows import Scale


def written(tmp_path, cells, count=3):
    """Return the first column of `count` forecasts after rows with these dates."""
    path = tmp_path / "rows.csv"
    lines = [f"{cell},{n}" for n, cell in enumerate(cells)]
    path.write_text("\n".join(["when,a", *lines]))
    model = Forecaster(1, 4, 2, 2, 2, 0.0)
    params = model.init(jax.random.key(0))
    trained = use.Trained(model, params, ("a",), Scale(np.zeros(1), np.ones(1)), {})
    use.write(path, trained, table.read(path), np.zeros((count, 1)))
    return [line.split(",")[0] for line in path.read_text().splitlines()[1:]]


def days(*cells):
    return [f"{cell} 00:00:00" for cell in cells]


CALENDARS = {
    "months": (
        ["2020-01-01", "2020-02-01", "2020-03-01"],
        days("2020-04-01", "2020-05-01", "2020-06-01"),
    ),
    "last days": (
        ["2020-11-30", "2020-12-31", "2021-01-31"],
        days("2021-02-28", "2021-03-31", "2021-04-30"),
    ),
    "last days of every second month": (
        ["2021-02-28", "2021-04-30", "2021-06-30"],
        days("2021-08-31", "2021-10-31"),
    ),
    "day 29": (
        ["2021-02-28", "2021-04-29", "2021-06-29"],
        days("2021-08-29", "2021-10-29"),
    ),
    "the least of two distances as frequent": (
        ["2021-01-01", "2021-01-03", "2021-01-04"],
        days("2021-01-05", "2021-01-06"),
    ),
    "different times": (
        ["2021-01-01T00:00", "2021-02-01T06:00", "2021-03-01T12:00"],
        ["2021-03-29 18:00:00", "2021-04-27 00:00:00"],
    ),
    "day 30": (
        ["2020-12-30", "2021-01-30", "2021-02-28", "2021-03-30"],
        days("2021-04-30", "2021-05-30", "2021-06-30"),
    ),
    "quarters with a gap": (
        ["2020-01-15", "2020-04-15", "2020-10-15", "2021-01-15"],
        days("2021-04-15", "2021-07-15", "2021-10-15"),
    ),
    "years": (
        ["2018-03-01", "2019-03-01"],
        days("2020-03-01", "2021-03-01", "2022-03-01"),
    ),
    "weekdays": (
        ["2024-01-04", "2024-01-05", "2024-01-08", "2024-01-09", "2024-01-11"],
        days("2024-01-12", "2024-01-15", "2024-01-16"),
    ),
    "days of one week": (
        ["2024-01-03", "2024-01-04", "2024-01-05"],
        days("2024-01-06", "2024-01-07", "2024-01-08"),
    ),
    "a gap of three days": (
        ["2024-01-01", "2024-01-02", "2024-01-05"],
        days("2024-01-06", "2024-01-07", "2024-01-08"),
    ),
    "weeks": (
        ["2024-01-01", "2024-01-08", "2024-01-15"],
        days("2024-01-22", "2024-01-29", "2024-02-05"),
    ),
    "milliseconds": (
        ["2020-01-01T00:00:00.990", "2020-01-01T00:00:01.000"],
        ["2020-01-01 00:00:01.010000", "2020-01-01 00:00:01.020000"],
    ),
    "Z": (
        ["2020-01-01T22:00:00Z", "2020-01-01T23:00:00Z"],
        ["2020-01-02 00:00:00Z", "2020-01-02 01:00:00Z"],
    ),
    "the end of summer time": (
        [
            "2016-10-30T02:30:00+02:00",
            "2016-10-30T02:00+01:00",
            "2016-10-30T02:30+01:00",
        ],
        ["2016-10-30 03:00:00+01:00"],
    ),
    "months with summer time": (
        ["2020-02-01T00:00+01:00", "2020-03-01T00:00+01:00", "2020-04-01T00:00+02:00"],
        ["2020-05-01 00:00:00+02:00"],
    ),
}


@pytest.mark.parametrize("cells, want", CALENDARS.values(), ids=CALENDARS.keys())
def test_dates_go_on(tmp_path, cells, want):
    assert written(tmp_path, cells, len(want)) == want


def test_dates_with_and_without_an_offset(tmp_path):
    cells = ["2020-01-01T00:00+01:00", "2020-01-01T01:00"]
    with pytest.raises(UserError, match="line 3: dates must all have an offset from U"):
        written(tmp_path, cells)


def test_dates_ascend_in_utc(tmp_path):
    cells = ["2020-01-01T03:00+03:00", "2020-01-01T04:00+05:00"]
    with pytest.raises(UserError, match="line 3: dates must ascend"):
        written(tmp_path, cells)


@pytest.mark.parametrize("step", [timedelta(1), timedelta(31)])
def test_dates_end_with_the_year_9999(step):
    last = datetime(9999, 12, 1)
    with pytest.raises(UserError, match="the 40 rows after 9999-12-01 .* year 10000"):
        dates.following([last - step, last], 40)
