"""Rows of measurements, and how they are named and formatted."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .peers import OURS, PEERS, XLA
from .problem import Problem

SIZES = {"N": "batch", "T": "steps", "H": "hidden_size"}
KINDS = {"infer": "inference", "train": "training"}
HEADS = {OURS: "ours", XLA: "XLA"}


@dataclass(frozen=True)
class Row:
    """A problem, and what was found about each contender, by name.

    `seconds` holds the rounds of those that were timed, `differences` how far their
    results are from the reference, of `allowed`, `skipped` why others were left out.
    `backend` is the one that ostinato chose.
    """

    problem: Problem
    backend: str
    seconds: dict[str, list[float]]
    differences: dict[str, float]
    allowed: float
    skipped: dict[str, str]

    @property
    def rounds(self) -> int:
        """The number of rounds in which every contender had its turn."""
        return min(map(len, self.seconds.values()))

    @property
    def measured(self) -> bool:
        """True after the first round."""
        return self.rounds > 0

    def median(self, name: str = OURS) -> float | None:
        """Return the median of a contender's rounds in seconds."""
        rounds = self.seconds.get(name)
        return statistics.median(rounds) if rounds else None

    def spread(self, name: str = OURS) -> float:
        """Return half the distance of the quartiles over the median."""
        rounds = self.seconds[name]
        if len(rounds) < 2:
            return 0.0
        low, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return (high - low) / 2 / median

    def ratio(self, name: str) -> float | None:
        """Return the time of a contender over ours."""
        ours, other = self.median(), self.median(name)
        return None if ours is None or other is None else other / ours


def contenders(rows: Iterable[Row]) -> list[str]:
    """Return the names of those that were timed in a row at least, ours first."""
    return [
        name for name in (OURS, XLA, *PEERS) if any(name in r.seconds for r in rows)
    ]


def label(problem: Problem, problems: Sequence[Problem]) -> str:
    """Return a short name: mode, kind, and the sizes that differ in `problems`."""
    sizes = [
        f"{size}={getattr(problem, field)}"
        for size, field in SIZES.items()
        if len({getattr(other, field) for other in problems}) > 1
    ]
    return " ".join([problem.mode, *sizes, KINDS[problem.kind]])


def common(problems: Sequence[Problem]) -> str:
    """Return the sizes that all problems have, for a title."""
    first = problems[0]
    sizes = [
        f"{size} = {getattr(first, field)}"
        for size, field in SIZES.items()
        if len({getattr(other, field) for other in problems}) == 1
    ]
    lengths = "different lengths" if first.ragged else "equal lengths"
    return ", ".join([*sizes, lengths, first.dtype])


def milliseconds(seconds: float | None) -> str:
    """Format a duration as milliseconds, or nothing for None."""
    return "" if seconds is None else _digits(seconds * 1e3)


def times(ratio: float | None) -> str:
    """Format a ratio, or nothing for None."""
    return "" if ratio is None else _digits(ratio)


def ours(row: Row) -> str:
    """Format our time in milliseconds, its spread, and the backend if it is not cpu."""
    if not row.measured:
        return ""
    backend = "" if row.backend == "cpu" else f" ({row.backend})"
    return f"{milliseconds(row.median())} ms ±{100 * row.spread():.0f} %{backend}"


def line(row: Row) -> str:
    """Format a row as one line."""
    others = [
        f"{HEADS.get(name, name)} {times(row.ratio(name))}x"
        for name in row.seconds
        if name != OURS
    ]
    name = f"{row.problem.mode}/{row.problem.name}"
    return ", ".join([f"{name}: {ours(row)}", *others])


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return why contenders were left out, each reason once with its rows."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.skipped.items():
            place = f"{row.problem.mode}/{row.problem.name}"
            found.setdefault((name, reason), []).append(place)
    return [
        f"without {HEADS.get(name, name)}: {' '.join(reason.split())}"
        + ("" if len(places) == len(rows) else f" ({_few(places)})")
        for (name, reason), places in found.items()
    ]


def _digits(value: float) -> str:
    """Format a number with about three digits, one at least after the point."""
    return (
        f"{value:.3f}"
        if value < 1
        else f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
    )


def _few(places: list[str]) -> str:
    return ", ".join(places) if len(places) <= 2 else f"{len(places)} rows"
