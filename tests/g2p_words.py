"""A small artificial language that a tiny model learns, for the tests of g2p."""

import functools
import io
import itertools
from typing import Any

import jax
import pytest
from job_runs import leave_pictures_empty
from rich.console import Console

from ostinato.apps import display
from ostinato.apps.g2p import checkpoint, job, models
from ostinato.apps.g2p.train import train

SOUNDS = {"a": "AA", "b": "B", "e": "EH", "k": "K", "s": "S", "x": "K S"}


def spell(word):
    return tuple(" ".join(SOUNDS[letter] for letter in word).split())


def language(count=200):
    """Make words of 2 to 4 letters; every letter has one phoneme, "x" has two."""
    words = (
        "".join(letters)
        for n in (2, 3, 4)
        for letters in itertools.product(SOUNDS, repeat=n)
    )
    return {word: (spell(word),) for word in itertools.islice(words, count)}


TINY = dict(hidden=16, layers=1, batch=16, buckets=1, lr=0.03, dropout=0.0)


def quiet():
    return Console(file=io.StringIO(), width=80, record=True)


# As in `job_runs.py`: equal models are one object.
config_class = functools.cache(lambda n: functools.cache(models.config_class(n)))


def train_tiny(out, draw=False, **options) -> Any:
    """Train; without `draw`, the picture of the learning curve is an empty file."""
    options = {**TINY, "console": quiet(), "dictionary": language(), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "config_class", config_class)
        if not draw:
            leave_pictures_empty(patch)
        return train(out, **options)


def learn(out, **options):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            options = {"epochs": 20, "console": quiet(), "draw": True, **options}
            summary = train_tiny(out, **options)
    return out, summary, options["console"].export_text()


def interrupt_after(
    monkeypatch, updates, error: type[BaseException] = KeyboardInterrupt
):
    """Make the display raise `error` once, after some updates, as Ctrl-C would."""
    tick, count = display.Display.tick, [0]

    def counting_tick(self, *args):
        count[0] += 1
        if count[0] == updates:
            raise error
        tick(self, *args)

    monkeypatch.setattr(display.Display, "tick", counting_tick)


def arrays(out, name):
    return checkpoint.FILES.read(out / name)[0]


@pytest.fixture(autouse=True)
def plain_jax():
    """Restore JAX's default promotion of dtypes, which optax needs."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
