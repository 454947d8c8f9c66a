"""Windows of a table: a look-back and the horizon after it, in standardised values."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ostinato import data

from ..errors import UserError
from .model import Batch, Forecaster


class Scale(NamedTuple):
    """The mean and the deviation of every column of the rows to learn from, `[C]`."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "Scale":
        """Measure values `[T, C]`; a constant column has the deviation 1."""
        deviation = values.std(0)
        constant = deviation <= 1e-8 * np.maximum(np.abs(values).max(0), 1)
        return cls(values.mean(0), np.where(constant, 1.0, deviation))

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Standardise values, as float32."""
        return ((values - self.mean) / self.deviation).astype(np.float32)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Return values from standardised ones."""
        return values * self.deviation + self.mean


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
                f"the rows to {name} must hold a window of look-back and horizon, "
                f"{model.look_back} + {model.horizon} rows; rows {begin} to {end} do "
                "not; take a shorter horizon or another --split"
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
