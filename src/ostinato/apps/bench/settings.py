"""The options of `ostinato bench`, checked, and the problems that follow from them."""

import importlib.util
import itertools
import math
from typing import NamedTuple

from ..errors import UserError
from .peers import OURS, PEERS, XLA
from .problem import Problem

MODES = ("lstm", "gru", "rnn_tanh")
KINDS = ("infer", "train")
MOST_BYTES = 2**32  # of the gates of a problem, or of its weights


class Settings(NamedTuple):
    """What is measured: every contender on every problem, for some seconds each."""

    problems: list[Problem]
    contenders: list[str]
    seconds: float


def read(
    *,
    mode: str,
    batch: str,
    steps: str,
    hidden: str,
    ragged: bool,
    peers: str | None,
    seconds: float,
) -> Settings:
    """Check the options, and make a problem of each combination of their values.

    Args:
        mode: names among `MODES`, separated by commas, like all lists here.
        batch: numbers of sequences.
        steps: numbers of steps.
        hidden: numbers of units, and of inputs.
        ragged: whether sequences have different lengths, up to the number of steps.
        peers: names among `PEERS`, or `none`. None: all that are installed.
        seconds: time for each problem.

    Raises:
        UserError: an option has a wrong value, or a peer is not installed.
    """
    if not 0 < seconds < math.inf:
        raise UserError(f"`seconds` must be a number above 0, got {seconds:g}")
    sizes = itertools.product(
        _names("mode", mode, MODES),
        _numbers("steps", steps),
        _numbers("hidden", hidden),
        _numbers("batch", batch),
        KINDS,
    )
    problems = [
        Problem(
            mode=mode,
            kind=kind,
            batch=batch,
            steps=steps,
            input_size=hidden,
            hidden_size=hidden,
            ragged=ragged,
        )
        for mode, steps, hidden, batch, kind in sizes
    ]
    for problem in problems:
        _check_size(problem)
    return Settings(problems, [OURS, XLA, *_peers(peers)], seconds)


def _items(text: str) -> list[str]:
    return list(dict.fromkeys(item.strip() for item in text.split(",")))


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    for item in _items(text):
        if item not in known:
            raise UserError(
                f"`{option}` must be names among {', '.join(known)}, separated by "
                f"commas, got {item!r}"
            )
    return _items(text)


def _numbers(option: str, text: str) -> list[int]:
    for item in _items(text):
        if not (item.isascii() and item.isdigit() and 0 < len(item) < 10 and int(item)):
            raise UserError(
                f"`{option}` must be numbers from 1 to 999999999, separated by commas, "
                f"got {item!r}"
            )
    return list(dict.fromkeys(map(int, _items(text))))


def _peers(text: str | None) -> list[str]:
    if text is None:
        return list(PEERS)  # the report says which are not installed
    if text.strip() == "none":
        return []
    names = _names("peers", text, tuple(PEERS))
    for name in names:
        for package in PEERS[name]:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"the peer {name} needs the package `{package}`, which is not "
                    f"installed; run: pip install {package}"
                )
    return names


def _check_size(problem: Problem) -> None:
    gates = 4 * problem.spec.num_gates * problem.hidden_size
    width = problem.input_size + problem.hidden_size
    largest = max(gates * problem.steps * problem.batch, gates * width)
    if largest > MOST_BYTES:
        raise UserError(
            f"`batch` {problem.batch}, `steps` {problem.steps} and `hidden` "
            f"{problem.hidden_size} are too large together: {problem.mode} needs an "
            f"array of {largest / 2**30:.1f} GiB, {MOST_BYTES // 2**30} are allowed"
        )
