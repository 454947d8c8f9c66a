"""What a run shows: a bar, lines that stay, the mean loss and the speed."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn

from . import files

PLAIN_SECONDS = 15.0  # between two lines where there is no terminal


class _Console(Console):
    """A console whose reader may go away; that of rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Let `Screen` handle the error."""
        raise


class Screen:
    """The terminal, or whatever reads what a run says, while there is a reader.

    A run goes on without it when it cannot be written any more.

    Attributes:
        live: whether it is a terminal, on which what was written can change.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or _Console(highlight=False)
        self.live = self.console.is_terminal

    def say(self, text: str) -> None:
        """Print a line that stays."""
        with self.optional():
            self.console.print(text, markup=False, soft_wrap=True)

    def show(self, table: RenderableType) -> None:
        """Print a table."""
        with self.optional():
            self.console.print(table)

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Be silent from the moment on when the console cannot be written."""
        try:
            yield
        except (OSError, UnicodeError):
            self.live, self.console.quiet = False, True
            if self.console.file is sys.stdout:  # what it still holds would fail again
                files.silence(sys.stdout)


class Display(Screen):
    """A live progress bar on a terminal, and occasional lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %  {task.description}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=1.0)
        self._next_line = time.monotonic() + PLAIN_SECONDS

    def __enter__(self) -> "Display":
        with self.optional():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar and show the cursor again."""
        if self.live:
            with self.optional():
                self._progress.stop()

    def name(self, doing: str) -> None:
        """Show what the run does, where there is a bar."""
        if self.live:
            with self.optional():
                self._progress.update(self._task, description=doing)

    def tick(self, done: float, text: str) -> None:
        """Show how far the run is; `done` is between 0 and 1."""
        if self.live:
            with self.optional():
                self._progress.update(self._task, completed=done, description=text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            self.say(f"{100 * done:3.0f} %  {text}")


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """The mean loss since the last evaluation, and the speed in examples per second.

    Attributes:
        losses: the sum of the losses of updates since then, before a run was resumed,
            too.
        updates: how many these are.
    """

    def __init__(self, losses: float = 0.0, updates: int = 0) -> None:
        self.losses, self.updates = losses, updates
        self._examples = 0
        self._start = time.monotonic()

    def add(self, loss: float, examples: int) -> None:
        """Count one update."""
        self.losses += loss
        self.updates += 1
        self._examples += examples

    @property
    def loss(self) -> float:
        """The mean loss over the updates."""
        return self.losses / max(self.updates, 1)

    @property
    def speed(self) -> float:
        """The examples per second since the start, compilation included."""
        return self._examples / max(time.monotonic() - self._start, 1e-9)
