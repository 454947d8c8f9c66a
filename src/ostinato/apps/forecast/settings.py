"""The settings of a run."""

import dataclasses

from ..fields import check_range, check_types


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; those of the model are in `Forecaster`."""

    minutes: float = 2.0
    epochs: int | None = None
    batch: int = 64
    lr: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_range("minutes", "a number above 0", self.minutes, self.minutes > 0)
        if self.epochs is not None:
            check_range("epochs", "at least 1", self.epochs, self.epochs >= 1)
        good = 1 <= self.batch <= 2**16
        check_range("batch", f"1 to {2**16}", self.batch, good)
        check_range("lr", "a number above 0", self.lr, self.lr > 0)
        good = 0 <= self.seed < 2**31 - 1
        check_range("seed", f"0 to {2**31 - 2}", self.seed, good)
