"""Music as a job: model, batches of pieces, likelihoods, report."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ostinato import data

from .. import job
from ..devices import Devices
from ..report import Curves
from ..run import Run
from ..wording import counted
from . import report, use
from .model import Batch, Composer, Params
from .report import Likelihood, Row
from .rolls import Pieces, transposed
from .settings import Settings
from .use import Trained

BUCKETS = 4  # lengths that are compiled
READ = 32  # pieces that are evaluated at a time
SHOWN = 128  # frames of a picture


class Job(job.Job):
    """Learning to tell the next frame of pieces of music.

    Args:
        settings: the settings of the run.
        pieces: what to learn from, to choose by and to test on.
        notes: lines for the user about what was read.
    """

    unit, row_class, settings_class = "frames", Row, Settings
    load = staticmethod(use.load)
    files = use.FILES
    curves = Curves(
        "nats a frame",
        "nats a frame",
        {"nll": "NLL of pieces to choose by"},
    )

    def __init__(
        self, settings: Settings, pieces: Pieces, notes: Sequence[str] = ()
    ) -> None:
        self.settings, self.pieces, self._notes = settings, pieces, notes
        self.model = Composer(
            settings.mode,
            settings.hidden,
            settings.layers,
            settings.chords,
            settings.dropout,
        )
        self._batches = data.buckets(
            [len(roll) for roll in pieces.learn],
            batch_size=settings.batch,
            bounds=BUCKETS,
            seed=settings.seed,
        )
        self.num_batches = len(self._batches)
        self.loss = self.model.loss

    def introduce(self) -> list[str]:
        """Describe settings and pieces."""
        learn, choose, test = (
            f"{counted(len(part), 'piece')} ({counted(sum(map(len, part)), 'frame')})"
            for part in self.pieces
        )
        return [
            self.settings.describe(),
            f"{learn} to learn from, {choose} to choose by, {test} to test on",
            *self._notes,
        ]

    def fingerprint(self) -> str:
        """Hash the pieces of each part."""
        return job.hash_of(
            *(
                b"".join(roll.tobytes() + b"end" for roll in part)
                for part in self.pieces
            )
        )

    def init(self, key: jax.Array) -> Params:
        """Draw the initial parameters."""
        return self.model.init(key)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield every piece once, each transposed by a number drawn for this epoch."""
        most = self.settings.transpose
        rng = np.random.default_rng((self.settings.seed, number))
        moves = rng.integers(-most, most + 1, len(self.pieces.learn))
        for which in self._batches.epoch(number):
            rolls = [transposed(self.pieces.learn[i], int(moves[i])) for i in which]
            yield _batch(self._batches, rolls)

    def count(self, batch: Batch) -> int:
        """Return the frames of a batch."""
        return int(batch.lengths.sum())

    def measure(self, params: Params, devices: Devices) -> tuple[float, ...]:
        """Return the likelihood of the pieces to choose by."""
        return (self._likelihood(self.pieces.choose, params, devices).nll,)

    def score(self, row: Row) -> float:
        """Return the negative log-likelihood."""
        return row.nll

    def describe(self, row: Row) -> str:
        """Format the likelihood."""
        return f"to choose by: NLL {row.nll:.3f}"

    def save_model(
        self, folder: Path, params: Params, figures: Mapping[str, Any]
    ) -> None:
        """Write `model.safetensors`."""
        per_beat = self.settings.per_beat
        use.save(folder, Trained(self.model, params, per_beat, dict(figures)))

    def final(self, params: Params, devices: Devices) -> dict[str, Likelihood]:
        """Measure the weights on the pieces to test on."""
        test = self.pieces.test
        return {
            "the model": self._likelihood(test, params, devices),
            "each note as often as in the pieces learned from": self._frequencies(),
        }

    def report(self, run: Run, params: Params, figures: dict[str, Likelihood]) -> None:
        """Save and print the likelihoods, and draw a piece and two samples."""
        by_name = {name: one._asdict() for name, one in figures.items()}
        assert run.best is not None
        held_out = self.pieces.test[0][:SHOWN]
        rolls = {"a piece to test on": held_out}
        for seed in range(2):
            name = f"ostinato sample --seed {seed}"
            rolls[name] = use.sample(self.model, params, len(held_out), seed=seed)
        note = f"best weights: epoch {run.best.epoch:.1f}"
        with run.lock:
            run.save_model(params, best=run.best._asdict(), final=by_name)
        report.print_table(run.display, figures, note)
        with run.lock:
            run.draw()
            report.draw(run.out, rolls)
        run.display.say(f"model, figures and a picture of rolls are in {run.out}")

    def _likelihood(
        self, pieces: Sequence[np.ndarray], params: Params, devices: Devices
    ) -> Likelihood:
        lengths = [len(roll) for roll in pieces]
        batches = data.buckets(
            lengths, batch_size=min(READ, len(pieces)), bounds=BUCKETS, shuffle=False
        )
        sums = np.zeros(2)
        for which in devices.share(batches.epoch(0)):
            batch = _batch(batches, [pieces[i] for i in which])
            sums += np.asarray(self.model.sums(params, batch))
        return Likelihood.of(devices.total(sums), len(pieces), sum(lengths))

    def _frequencies(self) -> Likelihood:
        """Return the likelihood of the pieces to test on by the notes' frequencies."""
        learn, test = np.concatenate(self.pieces.learn), self.pieces.test
        chance = (learn.sum(0) + 0.5) / (len(learn) + 1)
        nll = [
            -(roll * np.log(chance) + (1 - roll) * np.log1p(-chance)) for roll in test
        ]
        first = sum(roll[0].sum() for roll in nll)
        rest = sum(roll[1:].sum() for roll in nll)
        return Likelihood.of(np.array([first, rest]), len(test), sum(map(len, test)))


def _batch(batches: data.Buckets, rolls: Sequence[np.ndarray]) -> Batch:
    padded, lengths = batches.collate(rolls)
    return Batch(padded.astype(np.float32), lengths)
