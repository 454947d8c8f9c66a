"""A small language that a tiny model learns, for the tests of the main job."""

import itertools

import jax
import pytest

SOUNDS = {"a": "AA", "b": "B", "e": "EH", "k": "K", "s": "S", "x": "K S"}


def spell(word):
    return tuple(" ".join(SOUNDS[letter] for letter in word).split())


def language(count=200):
    """Words of 2 to 4 letters; every letter has one sound, "x" has two."""
    words = (
        "".join(letters)
        for n in (2, 3, 4)
        for letters in itertools.product(SOUNDS, repeat=n)
    )
    return {word: (spell(word),) for word in itertools.islice(words, count)}


TINY = dict(hidden=16, layers=1, batch=16, buckets=1, lr=0.03, dropout=0.0)


@pytest.fixture(autouse=True)
def plain_jax():
    """The program runs as its users run it: optax needs JAX's usual promotion."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
