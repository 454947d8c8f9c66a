"""What a run is told, and what it chooses by itself from the time it has."""

import dataclasses
import math
from typing import Any

from .errors import G2PError
from .models import config_class

SHORT_MINUTES = 6.0  # up to here a small model learns more than a large one
DEFAULT_MINUTES = 30.0
DEFAULT_MODEL = "ctc"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run's settings; `minutes` and `epochs` may change when it is resumed."""

    model: str
    minutes: float | None
    epochs: int | None
    seed: int
    hidden: int
    layers: int
    batch: int
    lr: float
    dropout: float
    buckets: int
    ragged: bool = False

    def __post_init__(self) -> None:
        config_class(self.model)
        for name in ("hidden", "layers", "batch", "buckets"):
            _check(name, "at least 1", getattr(self, name), getattr(self, name) >= 1)
        _check("seed", "at least 0", self.seed, self.seed >= 0)
        _check("lr", "a number above 0", self.lr, 0 < self.lr < math.inf)
        _check("dropout", "at least 0 and below 1", self.dropout, 0 <= self.dropout < 1)
        if self.minutes is not None:
            good = 0 < self.minutes < math.inf
            _check("minutes", "a number above 0", self.minutes, good)
        if self.epochs is not None:
            _check("epochs", "at least 1", self.epochs, self.epochs >= 1)

    def describe(self) -> str:
        """One line for the user."""
        limits = []
        if self.minutes is not None:
            limits.append(f"{self.minutes:g} minutes")
        if self.epochs is not None:
            limits.append(f"{self.epochs} epochs")
        by = " by ragged.vmap" if self.ragged else ""
        return (
            f"{' or '.join(limits)}: model {self.model}{by}, {self.layers} layers x "
            f"{self.hidden} each way, batch {self.batch}, lr {self.lr:g}, dropout "
            f"{self.dropout:g}"
        )


def choose(
    model: str | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    **given: Any,
) -> Settings:
    """Fill in what was not given, or was None, by the time that the run has.

    Raises:
        G2PError: a value is out of range.
    """
    if minutes is None and epochs is None:
        minutes = DEFAULT_MINUTES
    short = minutes is not None and minutes <= SHORT_MINUTES
    model = model or DEFAULT_MODEL
    config_class(model)
    chosen: dict[str, Any] = (SHORT if short else LONG)[model]
    if given.get("ragged"):  # short words cost no more beside long ones
        chosen = chosen | {"buckets": 1}
    chosen = chosen | {k: v for k, v in given.items() if v is not None}
    return Settings(model=model, minutes=minutes, epochs=epochs, **chosen)


SHORT: dict[str, dict[str, Any]] = {
    "ctc": dict(
        seed=0, hidden=128, layers=2, batch=128, lr=3e-3, dropout=0.1, buckets=4
    ),
    "attention": dict(
        seed=0, hidden=128, layers=2, batch=128, lr=4e-3, dropout=0.05, buckets=4
    ),
}
LONG: dict[str, dict[str, Any]] = {
    "ctc": dict(
        seed=0, hidden=192, layers=3, batch=128, lr=2e-3, dropout=0.2, buckets=6
    ),
    "attention": dict(
        seed=0, hidden=192, layers=3, batch=128, lr=3e-3, dropout=0.15, buckets=8
    ),
}


def _check(name: str, wanted: str, got: object, good: bool) -> None:
    if not good:
        raise G2PError(f"`{name}` must be {wanted}, got {got}")
