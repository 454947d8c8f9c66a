"""The header of `resume.safetensors`: everything about a run besides its arrays."""

import dataclasses
from pathlib import Path
from typing import Any

from ..fields import check, check_range, make
from . import checkpoint
from .report import Row
from .settings import Settings


@dataclasses.dataclass(frozen=True)
class Header:
    """A run without its arrays; `rows` are its evaluations, `best` is one of them."""

    settings: Settings
    split: str
    elapsed: float
    evaluation_seconds: float
    rows: list[Row]
    best: Row | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `read` parses."""
        return {**vars(self), "settings": dataclasses.asdict(self.settings)}


def read(folder: Path) -> Header:
    """Read the header of the run in a folder.

    Raises:
        UserError: the file is missing or damaged.
    """
    found = dict(checkpoint.load_header(folder))
    with checkpoint.FILES.damage(folder / checkpoint.RESUME_FILE):
        check("rows", list, found["rows"])
        found["rows"] = [make(Row, row) for row in found["rows"]]
        found["best"] = found["best"] and make(Row, found["best"])
        found["settings"] = make(Settings, found["settings"])
        del found["step"]  # belongs to the arrays
        header = make(Header, found)
        for name in ("elapsed", "evaluation_seconds"):
            check_range(name, "at least 0", found[name], found[name] >= 0)
    return header
