"""The interface of a job: what a run needs to know about it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax

from .devices import Devices
from .report import Curves, Row
from .settings import Settings
from .tensors import TensorFiles
from .training import Params

if TYPE_CHECKING:
    from .run import Run


class Trained(Protocol):
    """A model that was read from a file: its parameters, and the figures of its run."""

    @property
    def params(self) -> Params:
        """The parameters of all members."""
        ...

    @property
    def figures(self) -> dict[str, Any]:
        """The settings of its run, and what was measured."""
        ...


class Job(ABC):
    """A model, the data it learns from, and how it is measured.

    Attributes:
        unit: what batches hold and speeds count, such as "words".
        row_class: a NamedTuple of numbers for one evaluation. Its first six fields are
            the epoch, the updates, the seconds, the speed in units per second, the mean
            loss and the learning rate; the others are what `measure` returns.
        settings_class: a class of settings.
        files: the files of the job.
        curves: what the learning curve shows.
        evaluations: how many there are in an epoch; a run that is limited by time may
            have more.
        settings: the settings of the run, of `settings_class`.
        num_batches: the batches of an epoch.
        members: the models of an ensemble, 1 for a single model.
        load: reads the `Trained` model in a folder, or raises a UserError.
        loss: a function of one member's parameters, a batch and a key for dropout; see
            `update`.
    """

    unit: ClassVar[str]
    row_class: ClassVar[Any]
    settings_class: ClassVar[type[Settings]]
    files: ClassVar[TensorFiles]
    curves: ClassVar[Curves]
    evaluations: ClassVar[int] = 1
    load: ClassVar[Callable[[Path], Trained]]
    settings: Any
    num_batches: int
    members: int = 1
    loss: Callable[[Params, Any, jax.Array], jax.Array]

    @abstractmethod
    def introduce(self) -> list[str]:
        """Return lines that tell the user what is learned from what."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash what is learned from and what is held out."""

    @abstractmethod
    def init(self, key: jax.Array) -> Params:
        """Draw the initial parameters, float32, of all members."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the batches of an epoch, in an order that follows from its number."""

    @abstractmethod
    def count(self, batch: Any) -> int:
        """Return how many units a batch holds."""

    @abstractmethod
    def measure(self, params: Params, devices: Devices) -> tuple[float, ...]:
        """Return the figures of an evaluation on the data to choose weights by.

        Each process evaluates its `devices.share`, and `devices.total` sums that.
        """

    @abstractmethod
    def score(self, row: Row) -> float:
        """Return the figure that is least for the best weights."""

    @abstractmethod
    def describe(self, row: Row) -> str:
        """Format the figures of an evaluation for the user."""

    @abstractmethod
    def save_model(
        self, folder: Path, params: Params, figures: Mapping[str, Any]
    ) -> None:
        """Write `model.safetensors`."""

    @abstractmethod
    def final(self, params: Params, devices: Devices) -> Any:
        """Return the figures of the best parameters on held-out data."""

    @abstractmethod
    def report(self, run: "Run", params: Params, figures: Any) -> None:
        """Report and save what `final` returned, in the first process."""


def hash_of(*parts: bytes) -> str:
    """Hash bytes to a short text, for a fingerprint."""
    return blake2b(b"\n\n".join(parts), digest_size=8).hexdigest()
