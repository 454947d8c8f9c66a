"""Windows of a table: a look-back and the horizon after it, in standardised values."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ostinato import data

from ..errors import UserError
from ..wording import counted
from .model import Batch, Forecaster

MOST_DEVIATIONS = 1e15  # whose squares float32 can sum


class Scale(NamedTuple):
    """The mean and the deviation of every column of the rows to learn from, `[C]`."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "Scale":
        """Measure values `[T, C]`; a constant column has the deviation 1."""
        _, exponent = np.frexp(np.abs(values).max(0))
        near_1 = np.ldexp(values, -exponent)  # whose squares are numbers
        mean, deviation = (
            np.ldexp(a, exponent) for a in (near_1.mean(0), near_1.std(0))
        )
        constant = constant_in(values)
        return cls(
            np.where(constant, values[0], mean), np.where(constant, 1.0, deviation)
        )

    def apply(self, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Standardise values of the columns `names`, as float32.

        Raises:
            UserError: a column has other magnitudes than the rows to learn from.
        """
        with np.errstate(all="ignore"):
            found = (values - self.mean) / self.deviation
        for name, column in zip(names, found.T, strict=True):
            if not (most := np.abs(column).max()) <= MOST_DEVIATIONS:
                raise UserError(
                    f"the column {name!r} must stay within {MOST_DEVIATIONS:g} "
                    f"standard deviations of the rows to learn from, got {most:g}; "
                    "correct its numbers, take another --split, or leave it out"
                )
        return found.astype(np.float32)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Return values from standardised ones."""
        return values * self.deviation + self.mean


def constant_in(values: np.ndarray) -> np.ndarray:
    """Return which columns of values `[T, C]` are constant, up to rounding."""
    spread = np.ptp(values / 4, axis=0)  # of the largest numbers, too
    return spread <= 1e-13 * np.abs(values / 4).max(0)


class Windows:
    """All windows whose horizon lies in a part of the rows.

    Args:
        values: standardised, `[T, C]`.
        begin: the first row of the part.
        end: one past the last.
        model: whose look-back and horizon these are.
        name: of the part, for errors.
    """

    def __init__(
        self, values: np.ndarray, begin: int, end: int, model: Forecaster, name: str
    ) -> None:
        first = max(begin, model.look_back)
        self.count = end - first - model.horizon + 1
        if self.count < 1:
            raise UserError(
                f"the rows to {name} must hold {counted(model.horizon, 'row')}, the "
                f"horizon, after the first {counted(model.look_back, 'row')} of the "
                "table, the look-back; "
                f"rows {begin + 1} to {end} do not; take a shorter --horizon or "
                "--look-back, or another --split"
            )
        self._values, self._first, self._model = values, first, model

    def take(self, which: np.ndarray, size: int | None = None) -> Batch:
        """Return windows by their numbers, filled up to `size` with weight 0."""
        missing = 0 if size is None else size - len(which)
        which = np.pad(np.asarray(which), (0, missing))
        at, model = self._first + which[:, None], self._model
        past = at - model.look_back + np.arange(model.look_back)
        future = at + np.arange(model.horizon)
        weights = np.ones(len(which), np.float32)
        weights[len(which) - missing :] = 0
        return Batch(self._values[past], self._values[future], weights)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all windows in their order, in batches of one size."""
        size = min(size, self.count)
        for begin in range(0, self.count, size):
            which = np.arange(begin, min(begin + size, self.count))
            yield self.take(which, size)

    def shuffled(self, size: int, seed: int) -> data.Buckets:
        """Return batches of indices of windows, whose order follows from the seed."""
        lengths = np.full(self.count, self._model.look_back)
        return data.buckets(lengths, batch_size=size, bounds=1, seed=seed)
