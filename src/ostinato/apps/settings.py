"""The settings that every run has, and those of a run that is resumed."""

import dataclasses
import json
from typing import Any, ClassVar, Self, TypeVar

from .errors import UserError
from .fields import check_range, check_types
from .wording import counted

MOST_BATCH = 2**16
MOST_LR = 1e6  # float32 has it, and far less learns nothing
LIMITS = "minutes", "epochs"  # what may change when a run is resumed
MOST_SEED = 2**31 - 2  # seed + 1 is used too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; `minutes` and `epochs` may change when it is resumed.

    A job adds its own, such as the sizes of its model.

    Attributes:
        default_minutes: the duration of a run without limits.
        defaults: the settings of a run, but for its limits, that are not given.

    Raises:
        UserError: a field is of the wrong type or out of range.
    """

    default_minutes: ClassVar[float]
    defaults: ClassVar[dict[str, Any]]

    minutes: float | None
    epochs: int | None
    seed: int
    batch: int
    lr: float
    dropout: float

    def __post_init__(self) -> None:
        check_types(self)
        for name, most in (("batch", MOST_BATCH), *self.sizes().items()):
            got = getattr(self, name)
            check_range(name, "at least 1", got, got >= 1)
            check_range(name, f"at most {most}", got, got <= most)
        check_range("seed", "at least 0", self.seed, self.seed >= 0)
        check_range("seed", f"at most {MOST_SEED}", self.seed, self.seed <= MOST_SEED)
        check_range("lr", "a number above 0", self.lr, self.lr > 0)
        check_range("lr", f"at most {MOST_LR:g}", self.lr, self.lr <= MOST_LR)
        good = 0 <= self.dropout < 1
        check_range("dropout", "at least 0 and below 1", self.dropout, good)
        if self.minutes is not None:
            check_range("minutes", "a number above 0", self.minutes, self.minutes > 0)
        if self.epochs is not None:
            check_range("epochs", "at least 1", self.epochs, self.epochs >= 1)

    @classmethod
    def choose(
        cls, minutes: float | None = None, epochs: int | None = None, **given: Any
    ) -> Self:
        """Fill in settings that are missing or None.

        Raises:
            UserError: a value is out of range.
        """
        if minutes is None and epochs is None:
            minutes = cls.default_minutes
        given = {name: value for name, value in given.items() if value is not None}
        chosen = cls.defaults_of(minutes, given) | given
        return cls(minutes=minutes, epochs=epochs, **chosen)

    @classmethod
    def defaults_of(cls, minutes: float | None, given: dict[str, Any]) -> Any:
        """Return the defaults of a run, which may depend on what is given."""
        return cls.defaults

    def sizes(self) -> dict[str, int]:
        """Return the largest value of each field of a job that must be at least 1."""
        return {}

    @property
    def limits(self) -> str:
        """When the run ends, for the user."""
        there = [name for name in LIMITS if getattr(self, name) is not None]
        return " or ".join(map(self.limit, there))

    def limit(self, name: str) -> str:
        """Return one of the limits, `minutes` or `epochs`, for the user."""
        return counted(getattr(self, name), name.removesuffix("s"))


def lasting(settings: Any) -> Any:
    """Return settings, as JSON has them, without those that may change on resuming."""
    given = settings if isinstance(settings, dict) else {}
    given = {name: v for name, v in given.items() if name not in LIMITS}
    return json.loads(json.dumps(given))


Kind = TypeVar("Kind", bound=Settings)


def resumed(
    old: Kind, minutes: float | None, epochs: int | None, given: dict[str, Any]
) -> Kind:
    """Return the settings of a run to resume, with other limits if there are any.

    Args:
        old: the settings that the run has had.
        minutes: its new duration; without both limits, the old ones stay.
        epochs: its new number of epochs.
        given: other settings; None for those that were not given.

    Raises:
        UserError: a setting that was given is not the old one.
    """
    for name, value in given.items():
        if value not in (None, getattr(old, name)):
            raise UserError(
                f"`{name}` must stay {getattr(old, name)} when a run is resumed, got "
                f"{value}"
            )
    if minutes is None and epochs is None:
        return old
    return dataclasses.replace(old, minutes=minutes, epochs=epochs)
