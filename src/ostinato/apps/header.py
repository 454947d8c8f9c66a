"""The header of `resume.safetensors`: everything about a run besides its arrays."""

import dataclasses
from pathlib import Path
from typing import Any

from .fields import check, check_range, make
from .report import Row
from .settings import Settings
from .tensors import RESUME_FILE, TensorFiles


@dataclasses.dataclass(frozen=True)
class Header:
    """A run without its arrays; `rows` are its evaluations, `best` is one of them.

    `split` is the hash of what it learns from and of what is held out.
    """

    settings: dict[str, Any]
    split: str
    elapsed: float
    evaluation_seconds: float
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
        for name in ("elapsed", "evaluation_seconds"):
            check_range(name, "at least 0", found[name], found[name] >= 0)
    return header, settings
