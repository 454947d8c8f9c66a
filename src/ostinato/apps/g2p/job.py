"""Pronunciations as a job: model, words, error rates, report."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ostinato.data import bucket_bounds

from .. import job
from ..devices import Devices
from ..report import Curves
from ..run import Run
from ..wording import counted
from . import checkpoint, joint, report
from .batches import Batch, RaggedBatch, TrainingSet
from .data import Split, phoneme_set
from .metrics import ErrorRates, error_counts
from .model import Params
from .models import config_class
from .ranking import FIRST_WEIGHT, Candidate, Labels, fit, rank
from .report import Row
from .settings import Settings

READ_SHAPES = 4  # padded lengths of words that are evaluated

Figures = dict[tuple[str, str], ErrorRates]


class Job(job.Job):
    """Learning to pronounce words.

    Args:
        settings: the settings of the run.
        split: the train, dev and test words.
        missing: how many words to test on are not in the dictionary.
    """

    unit, row_class, settings_class = "words", Row, Settings
    load, files = staticmethod(checkpoint.load_model), checkpoint.FILES
    curves = Curves(
        "dev words, %",
        "a word",
        {"dev_wer": "WER: words with an error", "dev_per": "PER: wrong phonemes"},
        most=100,
    )

    def __init__(self, settings: Settings, split: Split, missing: int = 0) -> None:
        phonemes = phoneme_set({**split.train, **split.dev, **split.test})
        self.settings, self.split, self._missing = settings, split, missing
        self.config = config_class(settings.model)(
            settings.hidden,
            settings.layers,
            phonemes,
            settings.dropout,
            members=settings.ensemble,
        )
        self.members = settings.ensemble
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
        base = self.config.num_labels
        self._aligned = joint.align(self.data.words, self.data.targets, base)
        self.reader = self.config.reader(self._aligned, bounds)
        self.rank_weights = (FIRST_WEIGHT,) * len(self.reader.opinions)
        self.num_batches = self.data.num_batches
        self.loss = self.config.ragged_loss if settings.ragged else self.config.loss

    def introduce(self) -> list[str]:
        """Describe settings, words and batches."""
        parts = self.split._asdict().items()
        words = ", ".join(f"{len(words):,} {name}" for name, words in parts)
        how = "of at most" if self.settings.ragged else "padded to"
        lines = [
            self.settings.describe(),
            f"words: {words}",
            f"{counted(len(self.data.targets), 'pronunciation')} to learn, {how} "
            f"{', '.join(f'{t} x {u}' for t, u in self.data.shapes)} letters x "
            "phonemes",
        ]
        if self._missing:
            lacking = counted(self._missing, "test word")
            lines.append(f"the dictionary lacks {lacking}")
        return lines

    def fingerprint(self) -> str:
        """Hash the words that are learned and held out, and their pronunciations."""
        return job.hash_of(
            *(repr(sorted(part.items())).encode() for part in self.split)
        )

    def init(self, key: jax.Array) -> Params:
        """Draw the initial parameters."""
        return self.config.init(key)

    def epoch(self, number: int) -> Iterator[Batch | RaggedBatch]:
        """Yield every pair of a word and a pronunciation once."""
        batches = self.data.epoch(number)
        return map(RaggedBatch.of, batches) if self.settings.ragged else batches

    def count(self, batch: Batch | RaggedBatch) -> int:
        """Return the words of a batch; length 0 does not count."""
        if isinstance(batch, RaggedBatch):
            return int((batch.letters.lengths > 0).sum())
        return int((batch.seq_lengths > 0).sum())

    def measure(self, params: Params, devices: Devices) -> tuple[float, ...]:
        """Return the error rates of greedy decoding on the dev words."""
        words = list(devices.share(self.split.dev))
        counts = self._counts("dev", words, self.reader.greedy(params, words))
        return ErrorRates.of(devices.total(counts))[:2]

    def score(self, row: Row) -> float:
        """Return the phoneme error rate."""
        return row.dev_per

    def describe(self, row: Row) -> str:
        """Format the error rates."""
        return f"dev PER {row.dev_per:5.2f}  WER {row.dev_wer:5.2f}"

    def save_model(
        self, folder: Path, params: Params, figures: Mapping[str, Any]
    ) -> None:
        """Write `model.safetensors`."""
        model = checkpoint.Model(
            self.config,
            params,
            self._aligned,
            self.rank_weights,
            dict(figures),
        )
        checkpoint.save_model(folder, model)

    def final(self, params: Params, devices: Devices) -> Figures:
        """Measure on the dev words and, only now, on the test words.

        The weights of `rank` become those under which the correct candidates of the dev
        words are the most likely.
        """
        reader, figures = self.reader, {}
        for part in ("dev", "test"):
            words = list(devices.share(getattr(self.split, part)))
            found = reader.beam(params, words)
            if part == "dev":
                correct = self._correct(part, words, found)
                self.rank_weights = fit(
                    found, correct, len(reader.opinions), devices.total
                )
            guesses = reader.greedy(params, words), rank(found, self.rank_weights)
            counts = np.stack([self._counts(part, words, each) for each in guesses])
            names = "greedy", " + ".join(["beam", *reader.opinions])
            for name, of_all in zip(names, devices.total(counts), strict=True):
                figures[part, name] = ErrorRates.of(of_all)
        return figures

    def report(self, run: Run, params: Params, figures: Figures) -> None:
        """Save and print the error rates."""
        by_name = {f"{part}, {how}": v._asdict() for (part, how), v in figures.items()}
        assert run.best is not None
        with run.lock:
            run.save_model(params, best=run.best._asdict(), final=by_name)
        chosen = zip(self.reader.opinions, self.rank_weights, strict=True)
        note = (
            f"best weights: epoch {run.best.epoch:.1f}, "
            f"{counted(run.best.updates, 'update')}; "
            + ", ".join(f"{name} counts {weight:g}" for name, weight in chosen)
        )
        report.print_table(run.display, figures, note)
        with run.lock:
            run.draw()
        run.display.say(f"model, figures and learning curve are in {run.out}")

    def _correct(
        self, part: str, words: Sequence[str], found: Sequence[Sequence[Candidate]]
    ) -> list[list[bool]]:
        """Return whether each candidate for some words of a part is correct."""
        references = getattr(self.split, part)
        return [
            [self.config.spell(one.labels) in references[word] for one in of_word]
            for word, of_word in zip(words, found, strict=True)
        ]

    def _counts(
        self, part: str, words: Sequence[str], labels: Sequence[Labels]
    ) -> np.ndarray:
        """Return the error counts of one guess for each of some words of a part."""
        guesses = dict(zip(words, map(self.config.spell, labels), strict=True))
        return error_counts(guesses, getattr(self.split, part))
