"""The settings of a run."""

import dataclasses

from .. import settings
from ..ensemble import MOST_MEMBERS
from ..fields import check_range
from ..wording import counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """The settings of a run; `Forecaster` checks the sizes, `parts_of` the split."""

    default_minutes = 2.0
    defaults = dict(
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

    look_back: int
    horizon: int
    segment: int
    hidden: int
    split: str
    ensemble: int = 1
    keep: str = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("keep", "best or last", self.keep, self.keep in ("best", "last"))

    def sizes(self) -> dict[str, int]:
        """Return the most members of an ensemble."""
        return {"ensemble": MOST_MEMBERS}

    def describe(self) -> str:
        """Describe the settings in one line for the user."""
        of = f"ensemble of {self.ensemble}, " if self.ensemble > 1 else ""
        return (
            f"{self.limits}: {of}{counted(self.look_back, 'row')} to forecast "
            f"{self.horizon}, in segments of {self.segment}, {self.hidden} units, "
            f"batch {self.batch}, lr {self.lr:g}, dropout {self.dropout:g}, the "
            f"{self.keep} weights"
        )
