"""The settings of a run."""

import dataclasses
from typing import Any

from .. import settings

DEFAULTS: dict[str, Any] = dict(
    seed=0,
    batch=64,
    lr=5e-3,
    dropout=0.3,
    look_back=96,
    horizon=96,
    segment=24,
    hidden=128,
    split="0.6,0.2,0.2",
)
DEFAULT_MINUTES = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """The settings of a run; `Forecaster` checks the sizes, `parts_of` the split."""

    look_back: int
    horizon: int
    segment: int
    hidden: int
    split: str

    def describe(self) -> str:
        """Describe the settings in one line for the user."""
        return (
            f"{self.limits}: {self.look_back} rows to forecast {self.horizon}, in "
            f"segments of {self.segment}, {self.hidden} units, batch {self.batch}, lr "
            f"{self.lr:g}, dropout {self.dropout:g}"
        )


def choose(
    minutes: float | None = None, epochs: int | None = None, **given: Any
) -> Settings:
    """Fill in settings that are missing or None.

    Raises:
        UserError: a value is out of range.
    """
    if minutes is None and epochs is None:
        minutes = DEFAULT_MINUTES
    chosen = DEFAULTS | {k: v for k, v in given.items() if v is not None}
    return Settings(minutes=minutes, epochs=epochs, **chosen)
