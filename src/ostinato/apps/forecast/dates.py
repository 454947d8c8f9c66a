"""Dates of a table: read from cells, and continued after the last row."""

import itertools
from calendar import monthrange
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from ..errors import UserError
from ..wording import counted

DAY, SATURDAY = timedelta(days=1), 5


def read(cell: str) -> datetime | None:
    """Return the date in a cell, with its offset from UTC if it has one."""
    try:
        return datetime.fromisoformat(cell.strip())
    except ValueError:
        return None


def step(dates: Sequence[datetime]) -> timedelta:
    """Return the most frequent distance of two dates."""
    return _most_frequent(b - a for a, b in itertools.pairwise(dates))


def following(dates: Sequence[datetime], count: int) -> list[datetime]:
    """Return the dates of the next rows.

    Months and years go on by the calendar, and days without a weekend so far leave out
    weekends; everything else goes on by `step`.

    Raises:
        UserError: they lie after the year 9999.
    """
    try:
        return list(itertools.islice(_endless(dates), count))
    except (OverflowError, ValueError):
        raise UserError(
            f"the {counted(count, 'row')} after {dates[-1]} must lie before the year "
            "10000; take earlier dates"
        ) from None


def _endless(dates: Sequence[datetime]) -> Iterator[datetime]:
    if (day := _day_of_month(dates)) is not None:
        return _by_months(dates, day)
    distance = step(dates)
    if _leaves_out_weekends(dates, distance):
        days = (dates[-1] + n * DAY for n in itertools.count(1))
        return (date for date in days if date.weekday() < SATURDAY)
    return (dates[-1] + n * distance for n in itertools.count(1))


def _day_of_month(dates: Sequence[datetime]) -> int | None:
    """Return the day that all dates have, 31 for the last one; None if they differ.

    Their months differ. A month without the day has its last day in its place.
    """
    if len({date.time() for date in dates}) > 1 or min(_months_between(dates)) < 1:
        return None
    last = [monthrange(date.year, date.month)[1] for date in dates]
    days = [date.day for date in dates]
    day = 31 if days == last else max(days)
    return day if days == [min(day, most) for most in last] else None


def _by_months(dates: Sequence[datetime], day: int) -> Iterator[datetime]:
    distance, date = _most_frequent(_months_between(dates)), dates[-1]
    for n in itertools.count(1):
        year, month = divmod(_month(date) + n * distance, 12)
        most = monthrange(year, month + 1)[1]
        yield date.replace(year=year, month=month + 1, day=min(day, most))


def _month(date: datetime) -> int:
    return 12 * date.year + date.month - 1


def _months_between(dates: Sequence[datetime]) -> list[int]:
    return [_month(b) - _month(a) for a, b in itertools.pairwise(dates)]


def _leaves_out_weekends(dates: Sequence[datetime], distance: timedelta) -> bool:
    left_out = any(
        a.weekday() == SATURDAY - 1 and b - a == 3 * DAY
        for a, b in itertools.pairwise(dates)
    )
    weekdays = all(date.weekday() < SATURDAY for date in dates)
    return distance == DAY and weekdays and left_out


def _most_frequent(values: Iterable[Any]) -> Any:
    """Return the value that occurs most often, the least of several."""
    counts = Counter(values)
    return max(sorted(counts), key=counts.__getitem__)
