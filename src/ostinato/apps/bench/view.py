"""What a run shows: a table that grows, or lines where there is no terminal."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import machine as machines
from . import results
from .results import Row
from .settings import Settings


class View:
    """A context in which rows are shown while they are measured."""

    def __init__(
        self, console: Console | None, settings: Settings, machine: dict[str, Any]
    ) -> None:
        self._console = console or Console(highlight=False)
        self._settings, self._machine = settings, machine
        self._live: Live | None = None
        if self._console.is_terminal:  # drawn between rounds, never during a call
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "View":
        """Begin to show; say how much there is to do."""
        count, seconds = len(self._settings.problems), self._settings.seconds
        self.say(
            f"{count} rows, each checked, then timed for {seconds:g} seconds; "
            "Ctrl-C keeps what was measured"
        )
        if warning := machines.busy(self._machine):
            self.say(warning)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; the table stays on the terminal."""
        self.close()

    def close(self) -> None:
        """Show the cursor of the terminal again."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, rows: Sequence[Row], doing: str) -> None:
        """Draw the rows so far, and what is being done, on a terminal."""
        if self._live:
            place = f"{len(rows)} of {len(self._settings.problems)} rows"
            status = Text(f"{doing} ({place})", "dim")
            self._live.update(Group(self._table(rows), status), refresh=True)

    def done(self, rows: Sequence[Row]) -> None:
        """Show that the last row is complete."""
        if not self._live:
            self.say(results.line(rows[-1]))

    def finish(self, rows: Sequence[Row]) -> None:
        """Show the whole table, and why contenders are not in it."""
        if self._live:
            self._live.update(self._table(rows), refresh=True)
            self.close()
        else:
            self._console.print(self._table(rows))
        for reason in results.reasons(rows):
            self.say(reason)
        if any(row.backend != "cpu" for row in rows):
            self.say(f"backend cpu: {self._machine['native']}")

    def _table(self, rows: Sequence[Row]) -> Table:
        return table(rows, self._settings, self._machine)


def table(rows: Sequence[Row], settings: Settings, machine: dict[str, Any]) -> Table:
    """Make a table of our times, and of the others' times over ours."""
    names = results.contenders(rows) or settings.contenders[:1]
    made = Table(
        title=f"{machine['cpu']}, {machine['threads']} threads\n"
        f"{results.common(settings.problems)}",
        caption=_caption(rows),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("row", no_wrap=True)
    for name in names:
        head = results.HEADS.get(name, name)
        made.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(
            results.label(row.problem, settings.problems),
            results.ours(row),
            *(results.times(row.ratio(name)) for name in names[1:]),
        )
    return made


def _caption(rows: Sequence[Row]) -> str:
    text = "From the third column on: their time over ours."
    if rows:
        worst = max(max(row.differences.values()) for row in rows)
        text += f"\nResults agree: the largest difference is {worst:.1e}."
    return text
