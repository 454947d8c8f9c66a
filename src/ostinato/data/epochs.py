"""The class `Epochs`: the batches of every epoch, and the place of the next one."""

from __future__ import annotations

import functools as ft
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from .. import _checks

Batch = TypeVar("Batch")


class Epochs(ABC, Generic[Batch]):
    """Batches in an order that follows from a seed and the number of the epoch.

    A `for` loop over the object reads the batches up to the end of an epoch, and the
    next loop those of the next epoch. There is one place of reading, however many loops
    there are. `epoch(number)` reads no place: it is a sequence of all batches of an
    epoch, which data loaders may read in any order.

    Args:
        seed: an integer of at least 0; the order depends on it and on the epoch alone.
        shuffle: False keeps the same order in every epoch.
    """

    def __init__(self, seed: int, shuffle: bool) -> None:
        self._seed = _checks.check_size("seed", seed, 0)
        self._shuffle = _checks.check_bool("shuffle", shuffle)
        self._epoch = self._batch = 0
        self._known: tuple[int, Sequence[Batch]] | None = None

    def epoch(self, number: int) -> Sequence[Batch]:
        """Return the batches of an epoch, a sequence with a length and indices.

        Args:
            number: the number of the epoch, from 0.
        """
        number = _checks.check_size("number", number, 0)
        if self._known is None or self._known[0] != number:
            self._known = number, self._order(number)
        return self._known[1]

    @property
    @abstractmethod
    def _facts(self) -> tuple[np.ndarray, Any]:
        """The lengths, and what else the order follows from."""

    @ft.cached_property
    def _data(self) -> int:
        """A hash of the data and the options, which int32 can hold."""
        lengths, rest = self._facts
        text = repr((type(self).__name__, self._shuffle, rest))
        return zlib.crc32(lengths.tobytes(), zlib.crc32(text.encode())) & 0x7FFFFFFF

    @abstractmethod
    def _order(self, number: int) -> Sequence[Batch]:
        """Compute the batches of an epoch."""

    def _generator(self, number: int) -> np.random.Generator | None:
        """Return the random numbers of an epoch; None if nothing is shuffled."""
        return np.random.default_rng([self._seed, number]) if self._shuffle else None

    def __len__(self) -> int:
        """Return the number of batches of the epoch that is being read."""
        return len(self.epoch(self._epoch))

    def __iter__(self) -> Iterator[Batch]:
        number = self._epoch
        batches = self.epoch(number)  # held here, as another epoch may be asked for
        while self._epoch == number:
            batch = batches[self._batch]
            self._batch += 1
            if self._batch == len(batches):
                self._epoch, self._batch = number + 1, 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the place of the next batch, as integers that JSON can store."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "batches": len(self),
            "seed": self._seed,
            "data": self._data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state_dict` returned, on equal data.

        Args:
            state: the result of `state_dict`.

        Raises:
            TypeError: `state` lacks a number, or one is no integer.
            ValueError: `state` belongs to another seed, other options, or data of other
                lengths or another dtype. The contents of data are not compared.
        """
        names = ("epoch", "batch", "batches", "seed", "data")
        if not isinstance(state, Mapping) or not all(name in state for name in names):
            raise TypeError(
                f"`state` must have the entries {', '.join(names)} of state_dict(), "
                f"got {_checks.describe(state)}"
            )
        epoch, batch, batches, seed, data = (
            _checks.check_size(f"state[{name!r}]", state[name], 0) for name in names
        )
        if seed != self._seed:
            raise ValueError(
                f"`state` must be that of seed {self._seed}, got one of seed {seed}; "
                "make the batches with the same seed"
            )
        if data != self._data:
            raise ValueError(
                f"`state` must be that of {self}, got one of other data or options; "
                "make the batches of the same data with the same options"
            )
        if batches != len(self.epoch(epoch)) or batch >= batches:
            raise ValueError(
                f"`state` must be that of {len(self.epoch(epoch))} batches in epoch "
                f"{epoch}, got batch {batch} of {batches}"
            )
        self._epoch, self._batch = epoch, batch


class Batches(Sequence[np.ndarray]):
    """Batches of indices; each is read as an array of its own, which may be changed."""

    def __init__(self, batches: Sequence[np.ndarray]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        found = self._batches[index]
        return Batches(found) if isinstance(index, slice) else found.copy()
