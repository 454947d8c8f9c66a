"""The header of `resume.safetensors`: everything about a run besides its arrays."""

import dataclasses
from pathlib import Path
from typing import Any

from .fields import check, check_range, make
from .report import Row
from .settings import Settings
from .tensors import RESUME_FILE, TensorFiles

MOST_YEARS = 100  # of a run


@dataclasses.dataclass(frozen=True)
class Header:
    """A run without its arrays; `rows` are its evaluations, `best` is one of them.

    `split` is the hash of what it learns from and of what is held out, `losses` the sum
    of those of the last `updates`, which followed the last evaluation.
    """

    settings: dict[str, Any]
    split: str
    elapsed: float
    evaluation_seconds: float
    losses: float
    updates: int
    rows: list[Row]
    best: Any


def read(
    folder: Path, files: TensorFiles, settings_class: type[Settings], row_class: Any
) -> tuple[Header, Any]:
    """Read the header of the run in a folder, and its settings.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / RESUME_FILE
    found = dict(files.read(path)[1])
    with files.damage(path):
        check("rows", list, found["rows"])
        found["rows"] = [make(row_class, row) for row in found["rows"]]
        if found["best"] is not None:
            found["best"] = make(row_class, found["best"])
        settings = make(settings_class, found["settings"])
        del found["step"]  # belongs to the arrays
        header = make(Header, found)
        _check_seconds("elapsed", header.elapsed)
        _check_seconds("evaluation_seconds", header.evaluation_seconds)
        check_range("updates", "at least 0", header.updates, header.updates >= 0)
        for row in header.rows:
            _check_seconds("rows", row.seconds)
        if header.best is not None:
            _check_seconds("best", header.best.seconds)
    return header, settings


def _check_seconds(name: str, seconds: float) -> None:
    good = 0 <= seconds <= MOST_YEARS * 366 * 86400
    wanted = f"at least 0, and {MOST_YEARS} years in seconds at most"
    check_range(name, wanted, seconds, good)
