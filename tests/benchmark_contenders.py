"""Builders of contenders for processes of their own, which import this file alone."""

import numpy as np

from ostinato.apps.bench.peers import Unsupported


def returns():
    return lambda: np.ones(2)


def cannot():
    raise Unsupported("no such step")


def fails():
    raise ValueError("broken")
