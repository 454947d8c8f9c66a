"""The settings of a run, with defaults that depend on its duration."""

import dataclasses
from typing import Any

from ..fields import check_range, check_types
from .model import MOST_HIDDEN, MOST_LAYERS
from .models import config_class

SHORT_MINUTES = 6.0  # in at most this time a small model learns more than a large one
DEFAULT_MINUTES = 30.0
DEFAULT_MODEL = "ctc"
MOST_WORDS, MOST_BUCKETS = 2**16, 64  # words in a batch, and shapes of batches
MOST_SEED = 2**31 - 2  # seed + 1 is used too


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; `minutes` and `epochs` may change when it is resumed."""

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
        check_types(self)
        config_class(self.model)
        for name, most in (
            ("hidden", MOST_HIDDEN),
            ("layers", MOST_LAYERS),
            ("batch", MOST_WORDS),
            ("buckets", MOST_BUCKETS),
        ):
            got = getattr(self, name)
            check_range(name, "at least 1", got, got >= 1)
            check_range(name, f"at most {most}", got, got <= most)
        check_range("seed", "at least 0", self.seed, self.seed >= 0)
        check_range("seed", f"at most {MOST_SEED}", self.seed, self.seed <= MOST_SEED)
        check_range("lr", "a number above 0", self.lr, self.lr > 0)
        good = 0 <= self.dropout < 1
        check_range("dropout", "at least 0 and below 1", self.dropout, good)
        if self.minutes is not None:
            check_range("minutes", "a number above 0", self.minutes, self.minutes > 0)
        if self.epochs is not None:
            check_range("epochs", "at least 1", self.epochs, self.epochs >= 1)

    def describe(self) -> str:
        """Describe the settings in one line for the user."""
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
    """Fill in settings that are missing or None, depending on the run's duration.

    Raises:
        UserError: a value is out of range.
    """
    if minutes is None and epochs is None:
        minutes = DEFAULT_MINUTES
    short = minutes is not None and minutes <= SHORT_MINUTES
    model = model or DEFAULT_MODEL
    config_class(model)
    chosen: dict[str, Any] = (SHORT if short else LONG)[model]
    if given.get("ragged"):  # without padding there is no need to group by length
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
