"""What a run shows: a table that grows, or lines where there is no terminal."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..display import Screen
from ..wording import counted
from . import machine as machines
from . import results
from .results import Row
from .settings import Settings


class View(Screen):
    """A context in which rows are shown while they are measured."""

    def __init__(
        self, console: Console | None, settings: Settings, machine: dict[str, Any]
    ) -> None:
        super().__init__(console)
        self._settings, self._machine = settings, machine
        # Drawn between rounds, never during a call.
        self._drawn = Live(console=self.console, auto_refresh=False)

    def __enter__(self) -> "View":
        """Begin to show; say how much there is to do."""
        count, seconds = len(self._settings.problems), self._settings.seconds
        self.say(
            f"{counted(count, 'row')}, each checked, then timed for "
            f"{counted(seconds, 'second')}; Ctrl-C keeps what was measured"
        )
        if warning := machines.busy(self._machine):
            self.say(warning)
        if self.live:
            with self.optional():
                self._drawn.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; the table stays on the terminal."""
        self.close()

    def close(self) -> None:
        """Show the cursor of the terminal again."""
        with self.optional():
            self._drawn.stop()

    def draw(self, rows: Sequence[Row], doing: str) -> None:
        """Draw the rows so far, and what is being done, on a terminal."""
        if self.live:
            every = counted(len(self._settings.problems), "row")
            place = f"{len(rows)} of {every}"
            status = Text(f"{doing} ({place})", "dim")
            self._update(Group(self._table(rows), status))

    def done(self, rows: Sequence[Row]) -> None:
        """Show that the last row is complete."""
        if not self.live:
            self.say(results.line(rows[-1]))

    def finish(self, rows: Sequence[Row]) -> None:
        """Show the whole table, and why contenders are not in it."""
        if self.live:
            self._update(self._table(rows))
            self.close()
        else:
            self.show(self._table(rows))
        for reason in results.reasons(rows):
            self.say(reason)
        if any(row.backend != "cpu" for row in rows):
            self.say(f"backend cpu: {self._machine['native']}")

    def _update(self, drawn: RenderableType) -> None:
        with self.optional():
            self._drawn.update(drawn, refresh=True)

    def _table(self, rows: Sequence[Row]) -> Table:
        return table(rows, self._settings, self._machine)


def table(rows: Sequence[Row], settings: Settings, machine: dict[str, Any]) -> Table:
    """Make a table of our times, and of the others' times over ours."""
    names = results.contenders(rows) or settings.contenders[:1]
    made = Table(
        title=f"{machine['cpu']}, {counted(machine['threads'], 'thread')}\n"
        f"{results.common(settings.problems)}",
        caption=_caption(rows),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("row", overflow="fold")
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
