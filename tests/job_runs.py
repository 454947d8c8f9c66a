"""Runs of jobs, made shorter for tests that look at neither tracing nor pictures."""

import functools

import pytest

from ostinato.apps import report
from ostinato.apps.forecast.model import Forecaster
from ostinato.apps.music.model import Composer

# JAX traces what a model computes anew for every object, also an equal one.
forecaster, composer = functools.cache(Forecaster), functools.cache(Composer)


@pytest.fixture(autouse=True)
def models_made_once(monkeypatch):
    """Have equal models of different runs be one object."""
    monkeypatch.setattr("ostinato.apps.forecast.job.Forecaster", forecaster)
    monkeypatch.setattr("ostinato.apps.music.job.Composer", composer)


def leave_pictures_empty(patch):
    """Let figures be made, but not written, which takes most of the time."""
    patch.setattr(report, "write_figure", lambda path, _: path.touch())


@pytest.fixture
def empty_pictures(monkeypatch):
    leave_pictures_empty(monkeypatch)
