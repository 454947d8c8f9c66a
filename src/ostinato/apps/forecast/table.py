"""Tables of numbers over dates, read from CSV files."""

import csv
import itertools
import math
import re
import stat
import textwrap
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple, TextIO

import numpy as np

from ..errors import UserError
from . import dates

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))
LARGEST = 1e300  # some standard deviations more are finite, too
MOST_BYTES, MOST_LINE = 2**30, 2**24
PARTS = ("learn from", "choose by", "test on")  # what rows are for
_TOO_LARGE = f"it must have at most {MOST_BYTES:,} bytes, {MOST_LINE:,} in a line"


class Table(NamedTuple):
    """The columns of a file: `dates [T]` ascend, `values [T, C]` have NaN for gaps.

    The dates have offsets from UTC, or none of them has; `utc` says that they are
    written with a Z. `dated` is the name of their column, which may be empty.
    """

    dates: list[datetime]
    names: tuple[str, ...]
    values: np.ndarray
    utc: bool = False
    dated: str = "date"

    @property
    def step(self) -> timedelta:
        """The most frequent distance of two dates."""
        return dates.step(self.dates)


def read(path: Path) -> Table:
    """Read a CSV file with a row of names, a column of dates, and columns of numbers.

    Raises:
        UserError: the file cannot be read, has no date column or no numbers, or a cell
            is neither; the message names the line.
    """
    try:
        _check_kind(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parsed(path, csv.reader(_lines(path, file)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {path}: it is no CSV file in UTF-8: {error}; save it as UTF-8"
        ) from None


def _check_kind(path: Path) -> None:
    """Raise a UserError for what may never end or begin, or is too large."""
    status = path.stat()
    is_open = stat.S_ISFIFO(status.st_mode) and path.parts[:2] == ("/", "dev")
    if not (stat.S_ISREG(status.st_mode) or is_open):
        raise UserError(
            f"cannot read {path}: it must be a file, or a pipe such as /dev/stdin"
        )
    if status.st_size > MOST_BYTES:
        raise UserError(f"cannot read {path}: {_TOO_LARGE}")


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the lines of a file, or of a pipe that may never end."""
    total = 0
    while line := file.readline(MOST_LINE):
        total += len(line)
        if total > MOST_BYTES or len(line) == MOST_LINE:
            raise UserError(f"cannot read {path}: {_TOO_LARGE}")
        yield line


def _parsed(path: Path, reader: Any) -> Table:
    """Return the table of the rows of a file, which are read one by one."""
    rows = _rows(path, reader)
    _, names = next(rows, ("", None))
    place, first = next(rows, ("", None))
    if names and len(names) == 1 and (other := re.search("[;\t|]", names[0])):
        raise UserError(
            f"{path} must have commas between its cells, and points in its numbers, "
            f"got {other[0]!r} between cells; replace them"
        )
    if names is None or first is None:
        raise UserError(_too_few(path))
    at = next((i for i, cell in enumerate(first) if dates.read(cell)), None)
    if at is None:
        raise UserError(
            f"{path} must have a column of dates such as 2016-07-01 or 2016-07-01 "
            f"13:00, got {shortened(first)} in {place}"
        )
    _check_names(path, names, at)
    others = [i for i in range(len(names)) if i != at]
    if not others:
        raise UserError(f"{path} must have a column of numbers beside {names[at]!r}")
    found: list[datetime] = []
    last = first
    values = array("d")
    for lines, row in itertools.chain([(place, first)], rows):
        place = f"{path}, {lines}"
        if len(row) != len(names):
            raise UserError(f"{place}: must have {len(names)} cells, got {len(row)}")
        found.append(_date(place, row[at], found))
        values.extend(_number(place, names[i], row[i]) for i in others)
        last = row
    if len(found) < 2:
        raise UserError(_too_few(path))
    columns = tuple(names[i] for i in others)
    utc = last[at].strip().upper().endswith("Z")
    shaped = np.array(values).reshape(len(found), -1)
    return Table(found, columns, shaped, utc, names[at])


def _rows(path: Path, reader: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of each row that is not empty, for messages, and its cells."""
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            reason = f"{_between(first, reader.line_num)}: {error}"
            raise UserError(
                f"cannot read {path}: it is no CSV file: {reason}"
            ) from None
        if row is None:
            return
        if any(row):
            yield _between(first, reader.line_num), row


def _between(first: int, last: int) -> str:
    """Name the lines of a row: several only where a quote holds their ends."""
    if first == last:
        return f"line {first}"
    return f"lines {first} to {last}, joined by a quote"


def _check_names(path: Path, names: Sequence[str], at: int) -> None:
    """Check that the columns have different names; that of dates, `at`, may have none.

    Raises:
        UserError: a name is missing, or there twice, or the first row has no names.
    """
    if dates.read(names[at]):
        raise UserError(
            f"{path} must begin with a row of names, got the date {names[at]!r} in it"
        )
    for i, name in enumerate(names):
        if i != at and not name.strip():
            raise UserError(
                f"{path} must have a name for each column, got {name!r} for "
                f"column {i + 1}"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(
            f"{path} must have a different name for each column, got several columns "
            f"named {shortened(twice)}"
        )


def shortened(cells: Sequence[str]) -> str:
    """Return cells with commas between, as many as a message may have."""
    return textwrap.shorten(", ".join(cells), 200, placeholder=" ...")


def _too_few(path: Path) -> str:
    return f"{path} must have a row of names and two rows of numbers"


def _date(place: str, cell: str, before: Sequence[datetime]) -> datetime:
    """Return the date in a cell, which is later than those before."""
    date = dates.read(cell)
    if date is None:
        raise UserError(f"{place}: no date: {short(cell)}")
    if not before:
        return date
    if (date.utcoffset() is None) != (before[-1].utcoffset() is None):
        raise UserError(
            f"{place}: dates must all have an offset from UTC, such as +01:00 or Z, or "
            f"none, got {cell} after {before[-1]}"
        )
    if date <= before[-1]:
        raise UserError(f"{place}: dates must ascend, got {cell} after {before[-1]}")
    return date


def _number(place: str, name: str, cell: str) -> float:
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        number = math.inf
    if math.isinf(number) or "_" in cell or not cell.isascii():  # Python's own numbers
        raise UserError(f"{place}: {name!r} is no number: {short(cell)}")
    if abs(number) > LARGEST:
        raise UserError(
            f"{place}: {name!r} must have numbers of at most {LARGEST:g}, got {cell!r}"
        )
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
        UserError: there are not three above 0, they need more rows than there are, or
            not whole ones, or they leave a part without a row.
    """
    _check_split(split)
    if sum(split) <= 1 + 1e-9:
        shares = (split[0], split[1], min(1.0, sum(split)))
        learn, choose, all_three = (int(rows * share + 1e-6) for share in shares)
        test = all_three - learn - choose
        if min(learn, choose, test) >= 1:
            return learn, choose, test
        raise UserError(
            f"the table has too few rows, {rows}, for three parts: the shares "
            f"{_listed(split)} leave one without a row"
        )
    numbers = tuple(map(int, split))
    if min(split) >= 1 and sum(split) <= rows and numbers == tuple(split):
        learn, choose, test = numbers
        return learn, choose, test
    raise UserError(
        "`split` must be three shares that sum to at most 1, such as 0.6,0.2,0.2, or "
        f"three whole numbers of rows that sum to at most {rows}, got "
        f"{_listed(split)}, which sum to {_listed([sum(split)])}"
    )


def _check_split(split: Sequence[float]) -> None:
    """Check that each part of the rows has a number above 0."""
    if len(split) != len(PARTS):
        raise UserError(
            f"`split` must be three numbers, for the rows to {', to '.join(PARTS)}, "
            f"such as 0.6,0.2,0.2, got {len(split)}: {_listed(split)}"
        )
    for share, part in zip(split, PARTS, strict=True):
        if not 0 < share < math.inf:
            raise UserError(
                f"`split` must be three numbers above 0, got {share:g} for the rows "
                f"to {part}, in {_listed(split)}"
            )


def _listed(split: Sequence[float]) -> str:
    return ",".join(f"{share:.15g}" for share in split)
