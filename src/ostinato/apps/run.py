"""The training loop of a run: updates, clock, evaluations, best weights, resuming."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import files, header, report
from .devices import Devices
from .display import Display, Pace, clock
from .errors import UserError
from .fields import check_range
from .header import Header
from .job import Job
from .report import Row
from .settings import lasting
from .tensors import MODEL_FILE, RESUME_FILE
from .training import Params, State, init_state, learning_rate, update

EVALUATIONS = 6  # least number of them in a run that is limited by time
LEAST_SECONDS = 1.0  # between evaluations of such a run, and lines about those of any
SAVE_SECONDS = 60.0  # most that a crash may lose


class Run:
    """The state of a run, and the steps that change it.

    A thread that holds `lock` sees a state and files that belong together, and no other
    thread changes them.

    Args:
        job: what is learned.
        out: the folder for its files.
        display: where to show progress.
        started: the start of the run's clock, from `time.monotonic`.
        devices: where to compute.

    Attributes:
        now: the seconds of the run when the last update or evaluation began, by the
            clock of the first process: all processes decide by it.
    """

    def __init__(
        self, job: Job, out: Path, display: Display, started: float, devices: Devices
    ) -> None:
        share = job.settings.batch % devices.total_count
        wanted = f"a multiple of {devices.total_count}, the number of devices"
        check_range("batch", wanted, job.settings.batch, share == 0)
        self.job, self.settings, self.out = job, job.settings, out
        self.display, self.started, self.devices = display, started, devices
        self.state = self._replicated(init_state(self.settings.seed, job.init))
        self.best_params: Params = None
        self.now = self.elapsed
        self.rows: list[Row] = []
        self.best: Row | None = None
        self.evaluation_seconds = self._saved = 0.0
        self._said = -math.inf
        self._has_room = False
        self.pace = Pace()
        self.lock = threading.RLock()

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of the files of a run, the model first."""
        return MODEL_FILE, RESUME_FILE, *report.FILES

    @property
    def elapsed(self) -> float:
        """The seconds of this run so far, including those before it was resumed."""
        return time.monotonic() - self.started

    @property
    def epoch(self) -> float:
        """The passes over the data so far."""
        return self.state.step / self.job.num_batches

    @property
    def progress(self) -> float:
        """The share of the run that is over, with time reserved for an evaluation.

        It is 0 before the first update, which takes place in any run.
        """
        return min(max(self._shares().values(), default=0.0), 1.0)

    @property
    def used_up(self) -> list[str]:
        """The limits that have been reached, `minutes` or `epochs`."""
        return [name for name, share in self._shares().items() if share >= 1]

    def _shares(self) -> dict[str, float]:
        """Return the share of each limit of the run that is over."""
        shares, begun = {}, self.state.step > 0
        if self.settings.minutes is not None:
            seconds = 60 * self.settings.minutes - self.evaluation_seconds
            share = self.now / seconds if seconds > 0 else 1.0
            shares["minutes"] = share if begun else 0.0
        if self.settings.epochs is not None:
            shares["epochs"] = self.epoch / self.settings.epochs
        return shares

    def train(self) -> None:
        """Make updates until the run is over."""
        self.display.name("compiling")
        if self.state.step > 0 and self._has_news() and self._evaluation_due():
            self._evaluate()  # the run was stopped in the middle of it
        for batch in self._batches():
            self._advance(batch)
            if self._evaluation_due():
                self._evaluate()
            elif self.now - self._saved > SAVE_SECONDS:
                self._save()
        if self._has_news():
            self._evaluate()

    def _has_news(self) -> bool:
        """Return whether the last evaluation was of other parameters."""
        return not self.rows or self.rows[-1].updates < self.state.step

    def halt(self) -> bool:
        """Stop the run and save its state; return False if nothing was learned yet.

        Any thread may call this: it takes `lock` and never releases it. It compiles
        nothing and does not wait for a compilation.
        """
        self.lock.acquire()
        if self.state.step == 0:
            return False
        self._save()
        if self.best is not None and not (self.out / MODEL_FILE).exists():
            self.save_model(self.best_params, best=self.best._asdict())  # was removed
        return True

    def _batches(self) -> Iterator[Any]:
        """Yield batches from the current step until the run is over."""
        while True:
            epoch, done = divmod(self.state.step, self.job.num_batches)
            for batch in islice(self.job.epoch(epoch), done, None):
                if self.progress >= 1:
                    return
                yield batch

    def _advance(self, batch: Any) -> None:
        """Make one update and show the progress of the run."""
        devices = self.devices
        state, told = update(
            self.state,
            devices.split(batch),
            learning_rate(self.settings.lr, self.state.step, self.progress),
            devices.clock(self.elapsed),
            loss=self.job.loss,
            seed=self.settings.seed,
            members=self.job.members,
            everywhere=devices.everywhere,
        )
        loss, now = np.asarray(told).tolist()
        self._check_finite(state.step, loss=loss)
        with self.lock:
            self.state, self.now = state, now
            self.pace.add(loss, self.job.count(batch))
        self.display.tick(
            self.progress,
            f"{self._time_left()} left  epoch {self.epoch:.1f}  "
            f"loss {self.pace.loss:.3f}  {self.pace.speed:,.0f} {self.job.unit}/s",
        )

    def _check_finite(self, step: int, **figures: float) -> None:
        """Raise a UserError that names a figure which is no finite number."""
        for name, value in figures.items():
            if not math.isfinite(value):
                raise UserError(
                    f"the {name} became {value} at update {step}; what was best before "
                    f"is kept; use a smaller --lr than {self.settings.lr:g}"
                )

    def _time_left(self) -> str:
        """Estimate the time left; "?" while compilation still dominates the past."""
        done = self.progress
        if done < 0.02:
            return "?"
        return clock(self.now * (1 - done) / done)

    def _evaluation_due(self) -> bool:
        """Return True at intervals of an epoch, and of a timed run.

        Only in a run that is limited by time does the clock decide.
        """
        done = self.state.step % self.job.num_batches
        due = done % math.ceil(self.job.num_batches / self.job.evaluations) == 0
        if self.settings.minutes is None:
            return due
        since = self.now - (self.rows[-1].seconds if self.rows else 0.0)
        if since > 60 * self.settings.minutes / EVALUATIONS:
            return True
        return due and since >= LEAST_SECONDS

    def _evaluate(self) -> None:
        """Measure the parameters; keep them if they are the best so far."""
        devices = self.devices
        self.now = before = devices.agree(self.elapsed)
        speed = self.pace.speed  # of learning: the evaluation takes time, too
        params = devices.local(self.state.averaged)
        figures = self.job.measure(params, devices)
        names = self.job.row_class._fields[6:]
        self._check_finite(self.state.step, **dict(zip(names, figures, strict=True)))
        self.now = devices.agree(self.elapsed)
        row = self.job.row_class(
            self.epoch,
            self.state.step,
            self.now,
            speed,
            self.pace.loss,
            learning_rate(self.settings.lr, self.state.step, self.progress),
            *figures,
        )
        score = self.job.score
        better = self.best is None or score(row) < score(self.best)
        with self.lock:
            if better:
                self.save_model(params, best=row._asdict())
                self.best_params = params
            self.rows, self.best = [*self.rows, row], row if better else self.best
            self.pace = Pace()  # saved, too
            self.evaluation_seconds = self.now - before  # also by the next run
            self._save()
        if self.progress >= 1 or self.now - self._said >= LEAST_SECONDS:
            self._say(row, speed, better)
        self.pace = Pace()

    def _say(self, row: Row, speed: float, better: bool) -> None:
        """Print the line of an evaluation."""
        self._said = self.now
        self.display.say(
            f"epoch {row.epoch:4.1f} {speed:6,.0f} {self.job.unit}/s  "
            f"loss {row.loss:.3f}  {self.job.describe(row)}  {self._time_left()} "
            f"left {'*' if better else ''}".rstrip()
        )

    def save_model(self, params: Params, **figures: Any) -> None:
        """Save parameters as the model of the folder, with figures about them.

        It is the first file that a run writes; those of an older one make room for it.
        """
        if not self.devices.first:
            return
        self._make_room()
        settings = dataclasses.asdict(self.settings)
        origin = {"settings": settings, "split": self.split}
        self.job.save_model(self.out, params, origin | figures)

    def _make_room(self) -> None:
        """Move the files of an older run to `previous/`, once."""
        if self._has_room:
            return
        if files.move_aside(self.out, self.file_names):
            previous = self.out / files.PREVIOUS
            self.display.say(f"the run that was in {self.out} is now in {previous}")
        self._has_room = True

    def draw(self) -> None:
        """Draw the learning curve."""
        assert self.best is not None
        title = f"kept: epoch {self.best.epoch:.1f}, {self.job.describe(self.best)}"
        report.draw_curves(self.out, self.job.curves, self.rows, self.best, title)

    def _save(self) -> None:
        """Save everything that `restore` needs, and the evaluations so far.

        Before the first evaluation, the weights so far are the model of the folder.
        """
        with self.lock:
            self._saved = self.now
            if self.best is None:
                self.save_model(self.devices.local(self.state.averaged), best=None)
            if not self.devices.first:
                return
            now = Header(
                settings=dataclasses.asdict(self.settings),
                split=self.split,
                elapsed=self.elapsed,
                evaluation_seconds=self.evaluation_seconds,
                losses=self.pace.losses,
                updates=self.pace.updates,
                rows=self.rows,
                best=self.best,
            )
            self.job.files.save_state(self.out, self.state, vars(now))
            report.write_csv(self.out, self.job.row_class._fields, self.rows)

    def restore(self) -> None:
        """Continue where the run in the folder stopped.

        Raises:
            UserError: that run had other data; or a file is missing, damaged, or of
                another run.
        """
        job = self.job
        old, _ = header.read(self.out, job.files, type(self.settings), job.row_class)
        if old.split != self.split:
            raise UserError(
                f"`--resume` needs the {job.unit} of the run that is resumed, got "
                "others; give the same files and options"
            )
        best = None if old.best is None else self._read_best()
        state = self._replicated(job.files.load_state(self.out, job.init))
        with self.lock:
            self.best_params, self._has_room = best, True
            self.state, self.rows, self.best = state, old.rows, old.best
            self.evaluation_seconds = old.evaluation_seconds
            self.pace = Pace(old.losses, old.updates)
            self.started -= old.elapsed
            self._saved = self.now = old.elapsed
        if self.devices.first:  # the last row may have come too late
            report.write_csv(self.out, job.row_class._fields, self.rows)

    @functools.cached_property
    def split(self) -> str:
        """The hash of what is learned from and of what is held out."""
        return self.job.fingerprint()

    def _read_best(self) -> Params:
        """Read the best parameters so far.

        Raises:
            UserError: the file is missing, damaged, or of another run.
        """
        job = self.job
        trained = type(job).load(self.out)
        params = trained.params
        wanted = jax.eval_shape(job.init, jax.random.key(0))
        shapes = [jax.tree.map(np.shape, tree) for tree in (params, wanted)]
        settings = trained.figures.get("settings"), dataclasses.asdict(self.settings)
        given, own = map(lasting, settings)
        split = trained.figures.get("split")
        if shapes[0] != shapes[1] or given != own or split != self.split:
            raise UserError(
                f"{self.out / MODEL_FILE} is the model of another run than the one in "
                f"{RESUME_FILE}; put back the model of that run, or train anew without "
                "`--resume`"
            )
        return params

    def check_same(self) -> None:
        """Check that all processes have the same run.

        Raises:
            UserError: they have others.
        """
        run = self.settings, self.split, self.state.step, self.out
        self.devices.check_same(repr((*run, self.devices.total_count)))

    def _replicated(self, state: State) -> State:
        return State(state.step, *self.devices.replicate(state[1:]))
