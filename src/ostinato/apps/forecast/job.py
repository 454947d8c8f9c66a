"""Forecasts as a job: model, windows, errors, report."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import job
from ..devices import Devices
from ..report import Curves
from ..run import Run
from ..wording import counted
from . import report, table, use
from .model import Batch, Forecaster, Params
from .report import Errors, Row
from .settings import Settings
from .use import Trained
from .windows import Scale, Windows, constant_in

READ = 256  # windows that are evaluated at a time


class Job(job.Job):
    """Learning to forecast the columns of a table.

    Args:
        settings: the settings of the run.
        given: the table.
    """

    unit, row_class, settings_class = "windows", Row, Settings
    load = staticmethod(use.load)
    files, evaluations = use.FILES, 4
    curves = Curves(
        "standardised, rows to choose by",
        "mean absolute error",
        {"mse": "MSE: mean squared error", "mae": "MAE: mean absolute error"},
    )

    def __init__(self, settings: Settings, given: table.Table) -> None:
        self.settings, self.names = settings, given.names
        values = table.filled(given)
        self._rows = table.parts_of(len(values), table.shares(settings.split))
        learn = values[: self._rows[0]]
        self.scale, constant = Scale.of(learn), np.flatnonzero(constant_in(learn))
        self.model = Forecaster(
            values.shape[1],
            settings.look_back,
            settings.horizon,
            settings.segment,
            settings.hidden,
            settings.dropout,
            settings.ensemble,
            tuple(constant.tolist()),
        )
        self.members = settings.ensemble
        self._values = self.scale.apply(values, self.names)
        ends = np.cumsum([0, *self._rows])
        self.learn, self.choose, self.test = (
            Windows(self._values, begin, end, self.model, name)
            for begin, end, name in zip(ends[:-1], ends[1:], table.PARTS, strict=True)
        )
        self._batches = self.learn.shuffled(settings.batch, settings.seed)
        self.num_batches = len(self._batches)
        self.loss = self.model.loss

    def introduce(self) -> list[str]:
        """Describe settings and rows; warn of columns that are constant at first."""
        learn, choose, test = self._rows
        busy = [i for i in self.model.constant if self._values[:, i].any()]
        return [
            self.settings.describe(),
            f"{counted(len(self._values), 'row')} of "
            f"{counted(len(self.names), 'column')}: {learn:,} to learn from, "
            f"{choose:,} to choose by, {test:,} to test on",
            *(
                f"warning: the column {self.names[i]!r} is constant in the rows to "
                "learn from and changes later; its last value is repeated"
                for i in busy
            ),
        ]

    def fingerprint(self) -> str:
        """Hash the columns and their rows."""
        return job.hash_of("\n".join(self.names).encode(), self._values.tobytes())

    def init(self, key: jax.Array) -> Params:
        """Draw the initial parameters."""
        return self.model.init(key)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield every window once; windows of weight 0 fill the last batch."""
        for which in self._batches.epoch(number):
            yield self.learn.take(which, self.settings.batch)

    def count(self, batch: Batch) -> int:
        """Return the windows of a batch; weight 0 does not count."""
        return int(batch.weights.sum())

    def measure(self, params: Params, devices: Devices) -> tuple[float, ...]:
        """Return the errors on the rows to choose by."""
        return self._errors(self.choose, params, devices)

    def score(self, row: Row) -> float:
        """Return the mean squared error, or what makes the last evaluation the best."""
        return row.mse if self.settings.keep == "best" else -row.updates

    def describe(self, row: Row) -> str:
        """Format the errors on the rows to choose by."""
        return f"MSE {row.mse:.3f}  MAE {row.mae:.3f}"

    def save_model(
        self, folder: Path, params: Params, figures: Mapping[str, Any]
    ) -> None:
        """Write `model.safetensors`."""
        trained = Trained(self.model, params, self.names, self.scale, dict(figures))
        use.save(folder, trained)

    def final(self, params: Params, devices: Devices) -> dict[str, Errors]:
        """Measure the weights on the rows to test on."""
        return {
            "forecast": self._errors(self.test, params, devices),
            "the last value, repeated": self._errors(self.test, None, devices),
        }

    def report(self, run: Run, params: Params, figures: dict[str, Errors]) -> None:
        """Save and print the errors, and draw a forecast."""
        by_name = {name: errors._asdict() for name, errors in figures.items()}
        assert run.best is not None
        with run.lock:
            run.save_model(params, best=run.best._asdict(), final=by_name)
        kept = f"{self.settings.keep} weights: epoch {run.best.epoch:.1f}"
        report.print_table(run.display, figures, f"standardised values; {kept}")
        with run.lock:
            run.draw()
            x, y, _ = self.test.take(np.array([self.test.count - 1]))
            guess = np.asarray(jax.jit(self.model.forecast)(params, x))
            shown = [self.scale.undo(a[0]) for a in (x, y, guess)]
            report.draw(run.out, self.names, *shown)
        run.display.say(f"model, errors and a picture of forecasts are in {run.out}")

    def _errors(
        self, windows: Windows, params: Params | None, devices: Devices
    ) -> Errors:
        """Return the errors of all windows; None forecasts the last value."""
        sums = np.zeros(2)
        for x, y, weights in devices.share(windows.batches(READ)):
            if params is None:
                error = (x[:, -1:] - y) * weights[:, None, None]
                sums += [np.sum(error**2), np.sum(np.abs(error))]
            else:
                sums += np.asarray(self.model.errors(params, x, y, weights))
        count = windows.count * self.model.horizon * self.model.columns
        return Errors(*(devices.total(sums) / count).tolist())
