"""A training run, from a CSV file to a folder with a model and its errors."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from .. import files
from ..display import Display, Pace, clock
from ..errors import UserError
from ..training import State, init_state, learning_rate, update
from . import report, table, use
from .model import Forecaster, Params
from .report import Errors, Row
from .settings import Settings
from .use import Trained
from .windows import Scale, Windows

READ = 256  # windows that are evaluated at a time
Guard = Callable[[Callable[[], object]], AbstractContextManager[None]]


def train(
    path: Path,
    out: Path,
    *,
    look_back: int = 96,
    horizon: int = 96,
    segment: int = 24,
    hidden: int = 128,
    dropout: float = 0.3,
    split: Sequence[float] = (0.6, 0.2, 0.2),
    settings: Settings | None = None,
    console: Console | None = None,
    guard: Guard = nullcontext,
) -> dict[str, Errors] | None:
    """Train until the time or the epochs are over, then measure the best weights.

    KeyboardInterrupt ends a run early: the best weights are saved.

    Args:
        path: the CSV file.
        out: the folder to write.
        look_back: rows that a forecast reads.
        horizon: rows that it forecasts.
        segment: rows of a segment.
        hidden: units of the GRU.
        dropout: rate of dropout.
        split: shares or numbers of rows to learn from, to choose by and to test on.
        settings: None means the defaults.
        console: where to report.
        guard: called with a function that stops the run and saves it, from any thread;
            returns the context in which the run takes place.

    Returns:
        The errors on the rows to test on, of standardised values; None if interrupted.

    Raises:
        UserError: a problem that the user can fix.
    """
    settings, started = settings or Settings(), time.monotonic()
    given = table.read(path)
    values = table.filled(given)
    learn, choose, test = table.parts_of(len(values), split)
    scale = Scale.of(values[:learn])
    model = Forecaster(values.shape[1], look_back, horizon, segment, hidden, dropout)
    ready, ends = scale.apply(values), np.cumsum([0, learn, choose, test])
    parts = [
        Windows(ready, begin, end, model, name)
        for begin, end, name in zip(
            ends[:-1], ends[1:], ("learn from", "choose by", "test on"), strict=True
        )
    ]
    files.make_folder(out)
    display = Display(console)
    run = Run(model, given.names, scale, parts, settings, out, display, started)

    def keep() -> None:
        display.close()
        run.lock.acquire()
        if run.best is None:
            return display.say("interrupted before anything was learned")
        display.say(f"interrupted: the best weights so far are in {out}")

    with guard(keep), display:
        display.say(
            f"{len(values):,} rows of {len(given.names)} columns: {learn:,} to learn "
            f"from, {choose:,} to choose by, {test:,} to test on"
        )
        try:
            run.train()
            return run.finish()
        except KeyboardInterrupt:
            keep()
            return None


class Run:
    """The state of a run; a thread that holds `lock` sees files that belong to it."""

    def __init__(
        self,
        model: Forecaster,
        names: tuple[str, ...],
        scale: Scale,
        parts: Sequence[Windows],
        settings: Settings,
        out: Path,
        display: Display,
        started: float,
    ) -> None:
        self.model, self.names, self.scale = model, names, scale
        self.learn, self.choose, self.test = parts
        self.settings, self.out, self.display = settings, out, display
        self.started = started
        self.state: State = init_state(settings.seed, model.init)
        self.rows: list[Row] = []
        self.best: Row | None = None
        self.lock = threading.RLock()

    @property
    def elapsed(self) -> float:
        """The seconds of this run so far."""
        return time.monotonic() - self.started

    def train(self) -> None:
        """Make updates until the run is over; evaluate after every epoch."""
        batches = self.learn.shuffled(self.settings.batch, self.settings.seed)
        while self.progress < 1:
            pace, epoch = Pace(), len(self.rows)
            for at, which in enumerate(batches.epoch(epoch)):
                self._advance(which, pace, epoch + at / len(batches.epoch(epoch)))
                if self.progress >= 1:
                    break
            self._evaluate(pace)

    @property
    def progress(self) -> float:
        """The share of the run that is over, by time or by epochs."""
        shares = [self.elapsed / (60 * self.settings.minutes)]
        if self.settings.epochs is not None:
            shares.append(len(self.rows) / self.settings.epochs)
        return min(max(shares), 1.0)

    def _advance(self, which: np.ndarray, pace: Pace, epoch: float) -> None:
        done = self.progress
        if self.settings.epochs is not None:
            done = max(done, epoch / self.settings.epochs)
        rate = learning_rate(self.settings.lr, self.state.step, done)
        state, value = update(
            self.state,
            self.learn.take(which),
            rate,
            loss=self.model.loss,
            seed=self.settings.seed,
        )
        loss = float(value)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss became {loss} at update {state.step}; use a smaller --lr "
                f"than {self.settings.lr:g}"
            )
        with self.lock:
            self.state = state
            pace.add(loss, len(which))
            left = clock(self.elapsed * (1 - done) / done) if done > 0.02 else "?"
            self.display.tick(
                done,
                f"epoch {epoch:.1f}  {pace.speed:,.0f} windows/s  loss "
                f"{pace.loss:.3f}  {left} left",
            )

    def _evaluate(self, pace: Pace) -> None:
        found = self.errors(self.choose, self.state.averaged)
        row = Row(len(self.rows) + 1, self.state.step, self.elapsed, pace.loss, *found)
        better = self.best is None or row.mse < self.best.mse
        with self.lock:
            self.rows = [*self.rows, row]
            if better:
                self.best = row
                self._save(self.state.averaged, {"best": row._asdict()})
            report.write_csv(self.out, self.rows)
            self.display.say(
                f"epoch {row.epoch:3}  loss {row.loss:.3f}  to choose by: MSE "
                f"{row.mse:.3f}  MAE {row.mae:.3f} {'*' if better else ''}".rstrip()
            )

    def errors(self, windows: Windows, params: Params) -> Errors:
        """Return the errors of all windows."""
        sums = sum(
            np.asarray(self.model.errors(params, *batch), np.float64)
            for batch in windows.batches(READ)
        )
        count = windows.count * self.model.horizon * self.model.columns
        return Errors(*(float(s) / count for s in np.asarray(sums)))

    def _save(self, params: Params, figures: dict) -> None:
        use.save(self.out, Trained(self.model, params, self.names, self.scale, figures))

    def finish(self) -> dict[str, Errors]:
        """Measure the best weights on the rows to test on, and draw a forecast."""
        assert self.best is not None
        params = use.load(self.out).params
        figures = {"forecast": self.errors(self.test, params)}
        last = [
            np.stack([((x[:, -1:] - y) ** 2).sum(), np.abs(x[:, -1:] - y).sum()])
            for x, y in self.test.batches(READ)
        ]
        count = self.test.count * self.model.horizon * self.model.columns
        figures["the last value, repeated"] = Errors(
            *(np.sum(last, 0) / count).tolist()
        )
        by_name = {name: errors._asdict() for name, errors in figures.items()}
        with self.lock:
            self._save(params, {"best": self.best._asdict(), "final": by_name})
            x, y = self.test.take(np.array([self.test.count - 1]))
            guess = np.asarray(jax.jit(self.model.forecast)(params, x))
            shown = [self.scale.undo(a[0]) for a in (x, y, guess)]
            report.draw(self.out, self.names, *shown)
        note = f"standardised values; best weights: epoch {self.best.epoch}"
        report.print_table(self.display.console, figures, note)
        self.display.say(f"model, errors and a picture of forecasts are in {self.out}")
        return figures
