"""The settings of a run."""

import dataclasses

from .. import settings
from ..fields import check_range
from ..wording import counted

MOST_TRANSPOSE, MOST_PER_BEAT = 24, 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """The settings of a run; `Composer` checks the model."""

    default_minutes = 5.0
    defaults = dict(
        seed=0,
        batch=2,
        lr=4e-3,
        dropout=0.2,
        mode="lstm",
        hidden=144,
        layers=2,
        chords="independent",
        transpose=6,
        per_beat=2,
    )

    mode: str
    hidden: int
    layers: int
    chords: str
    transpose: int
    per_beat: int

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = f"0 to {MOST_TRANSPOSE}"
        good = 0 <= self.transpose <= MOST_TRANSPOSE
        check_range("transpose", wanted, self.transpose, good)

    def sizes(self) -> dict[str, int]:
        """Return the largest value of each field that must be at least 1."""
        return {"per_beat": MOST_PER_BEAT}

    def describe(self) -> str:
        """Describe the settings in one line for the user."""
        return (
            f"{self.limits}: {self.mode} of {self.layers} x "
            f"{counted(self.hidden, 'unit')}, "
            f"{self.chords} keys, batch {self.batch}, lr {self.lr:g}, dropout "
            f"{self.dropout:g}, transposed by up to "
            f"{counted(self.transpose, 'semitone')}"
        )
