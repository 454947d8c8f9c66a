"""The rows of one benchmark: their file, and their tables in terminal and page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import report, results, tables

PAGE = Path("docs/results.md")

# The options that all these benchmarks have.
Out = Annotated[Path, typer.Option(dir_okay=False, help="File for the results.")]
Page = Annotated[
    Path | None, typer.Option(help="Page for the table, between its marks.")
]
Measure = Annotated[
    bool, typer.Option(help="Measure, or only report the results in `out`.")
]


class Stored:
    """The rows in a file, and the machine on which the last of them was measured.

    New rows join those in the file, of which they replace the ones of the same name.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one."""
        found = json.loads(path.read_text()) if path.exists() else {}
        self.path = path
        self.machine: dict[str, Any] = found.get("machine", {})
        self.rows: dict[str, Any] = found.get("rows", {})

    def begin(self, **more: Any) -> None:
        """Record the machine of this run, with more about it, before the first row."""
        self.machine = results.machine() | more

    def add(self, name: str, row: Any) -> None:
        """Add a row to the file, which is whole at any time."""
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".part")
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1)
        written.write_text(f"{text}\n")
        written.replace(self.path)

    def conditions(self, *packages: str) -> str:
        """Return when and where rows were measured, with the versions of packages."""
        machine = self.machine
        found = machine["packages"]
        versions = ", ".join(f"{p} {found[p]}" for p in packages if found.get(p))
        return (
            f"Measured {machine['date']} on {results.cpu_of(machine)}, "
            f"{machine['cpus']} CPUs, {versions}"
        )

    def show(
        self, text: Callable[["Stored"], str], mark: str, page: Path | None
    ) -> None:
        """Print the text of the results, and put it on a page.

        Args:
            text: returns it.
            mark: the name of the marks on the page; each kind of processors has its
                own, so that the tables of others stay.
            page: the file, or None.
        """
        if not self.rows:
            raise typer.BadParameter(f"{self.path} holds no rows: measure some first")
        tables.console().print(text(self))
        if page is not None:
            mark = f"{mark} {results.kind_of(self.machine)}"
            page.write_text(report.between_marks(page.read_text(), text(self), mark))
