"""The settings of a run, with defaults that depend on its duration."""

import dataclasses
from typing import Any

from .. import settings
from ..ensemble import MOST_MEMBERS
from ..wording import counted
from .model import MOST_HIDDEN, MOST_LAYERS
from .models import config_class

SHORT_MINUTES = 6.0  # in at most this time a small model learns more than a large one
DEFAULT_MODEL = "ctc"
MOST_BUCKETS = 64  # shapes of batches
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """The settings of a run."""

    default_minutes = 30.0

    model: str
    hidden: int
    layers: int
    buckets: int
    ensemble: int = 1
    ragged: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        config_class(self.model)

    @classmethod
    def defaults_of(cls, minutes: float | None, given: dict[str, Any]) -> Any:
        """Return the defaults of a run, which depend on its model and its duration."""
        model = given.get("model", DEFAULT_MODEL)
        config_class(model)
        short = minutes is not None and minutes <= SHORT_MINUTES
        chosen = (SHORT if short else LONG)[model] | {"model": model}
        if given.get("ragged"):  # without padding there is no need to group by length
            chosen |= {"buckets": 1}
        return chosen

    def sizes(self) -> dict[str, int]:
        """Return the largest sizes of the model, and the most shapes of batches."""
        return dict(
            hidden=MOST_HIDDEN,
            layers=MOST_LAYERS,
            buckets=MOST_BUCKETS,
            ensemble=MOST_MEMBERS,
        )

    def describe(self) -> str:
        """Describe the settings in one line for the user."""
        by = " by ragged.vmap" if self.ragged else ""
        of = f"ensemble of {self.ensemble}, " if self.ensemble > 1 else ""
        return (
            f"{self.limits}: {of}model {self.model}{by}, "
            f"{counted(self.layers, 'layer')} x {self.hidden} each way, batch "
            f"{self.batch}, lr {self.lr:g}, dropout {self.dropout:g}"
        )
