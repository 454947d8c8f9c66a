"""Tables of numbers over dates, read from CSV files."""

import csv
import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import UserError

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))


class Table(NamedTuple):
    """The columns of a file: `dates [T]` ascend, `values [T, C]` have NaN for gaps."""

    dates: list[datetime]
    names: tuple[str, ...]
    values: np.ndarray

    @property
    def step(self) -> timedelta:
        """The most frequent distance of two dates."""
        steps = np.diff(np.array(self.dates, "datetime64[s]")).astype(np.int64)
        found, counts = np.unique(steps, return_counts=True)
        return timedelta(seconds=int(found[counts.argmax()]))


def read(path: Path) -> Table:
    """Read a CSV file with a row of names, a column of dates, and columns of numbers.

    Raises:
        UserError: the file cannot be read, has no date column or no numbers, or a cell
            is neither; the message names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [(n, row) for n, row in enumerate(csv.reader(file), 1) if any(row)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: it is no CSV file: {error}") from None
    if len(rows) < 3:
        raise UserError(f"{path} must have a row of names and two rows of numbers")
    (_, names), *rows = rows
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(
                f"{path}, line {line}: must have {len(names)} cells, got {len(row)}"
            )
    first = rows[0][1]
    at = next((i for i, cell in enumerate(first) if _date(cell) is not None), None)
    if at is None:
        raise UserError(
            f"{path} must have a column of dates such as 2016-07-01 or 2016-07-01 "
            f"13:00, got {', '.join(first)} in line {rows[0][0]}"
        )
    dates = []
    for line, row in rows:
        date = _date(row[at])
        if date is None:
            raise UserError(f"{path}, line {line}: no date: {row[at]!r}")
        if dates and date <= dates[-1]:
            raise UserError(
                f"{path}, line {line}: dates must ascend, got {row[at]} after "
                f"{dates[-1]}"
            )
        dates.append(date)
    others = [i for i in range(len(names)) if i != at]
    if not others:
        raise UserError(f"{path} must have a column of numbers beside {names[at]!r}")
    values = [
        [_number(path, line, names[i], row[i]) for i in others] for line, row in rows
    ]
    return Table(dates, tuple(names[i] for i in others), np.array(values))


def _date(cell: str) -> datetime | None:
    try:
        date = datetime.fromisoformat(cell.strip())
    except ValueError:
        return None
    return date.replace(tzinfo=None)


def _number(path: Path, line: int, name: str, cell: str) -> float:
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        number = math.inf
    if math.isinf(number):
        raise UserError(f"{path}, line {line}: {name!r} is no number: {cell!r}")
    return number


def filled(table: Table) -> np.ndarray:
    """Return the values with gaps filled by the value before, or the first one.

    Raises:
        UserError: a column has no number at all.
    """
    values = table.values.copy()
    for name, column in zip(table.names, values.T, strict=True):
        known = np.flatnonzero(np.isfinite(column))
        if not known.size:
            raise UserError(f"the column {name!r} has no numbers; leave it out")
        before = np.searchsorted(known, np.arange(len(column)), side="right") - 1
        column[:] = column[known[np.maximum(before, 0)]]
    return values


def shares(text: str) -> list[float]:
    """Parse numbers with commas between.

    Raises:
        UserError: they are none.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"`split` must be numbers with commas between, got {text!r}"
        ) from None


def parts_of(rows: int, split: Sequence[float]) -> tuple[int, int, int]:
    """Return the rows to learn from, to choose by and to test on.

    Args:
        rows: of the table.
        split: three shares of the rows, which sum to at most 1, or numbers of rows.

    Raises:
        UserError: there are not three, or they need more rows than there are.
    """
    good = len(split) == 3 and all(math.isfinite(s) and s > 0 for s in split)
    if good and sum(split) <= 1 + 1e-9:
        learn, choose = int(rows * split[0]), int(rows * split[1])
        test = int(rows * min(1.0, sum(split)) + 1e-6) - learn - choose
        return learn, choose, test
    if good and all(s >= 1 for s in split) and sum(split) <= rows:
        learn, choose, test = map(int, split)
        return learn, choose, test
    got = ",".join(f"{share:g}" for share in split)
    raise UserError(
        "`split` must be three shares that sum to at most 1, such as 0.6,0.2,0.2, or "
        f"three numbers of rows, at most {rows}; got {got}"
    )
