"""Checks and timing: contenders take turns, so that a busy minute slows them all."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import equality, peers
from .equality import OtherResults
from .peers import Contender, Unsupported
from .problem import Data, Problem

ROUND_SECONDS = 0.06  # calls are repeated to fill this
MOST_REPEATS = 200
OTHER_RESULTS = "other results"
REST_SECONDS = 0.1  # until idle threads stop spinning; those of ONNX Runtime take 45 ms


class Checked(NamedTuple):
    """The contenders whose results are right, and what was found about all.

    `differences` holds the largest difference of each good contender from the
    reference, `skipped` the reason why each of the others is left out.
    """

    good: dict[str, Contender]
    differences: dict[str, float]
    skipped: dict[str, str]


def checked(
    problem: Problem, data: Data, names: Sequence[str], threads: int
) -> Checked:
    """Check the results of all contenders against those of a loop of `lax.scan`.

    Raises:
        OtherResults: our own results are wrong.
    """
    reference = peers.reference(problem, data, threads)
    found = Checked({}, {}, {})
    for name in names:
        try:
            contender = peers.build(name, problem, data, threads)
            results = contender.results(contender.call())
            found.differences[name] = equality.check(problem, results, reference)
        except Unsupported as reason:
            found.skipped[name] = str(reason)
        except OtherResults as error:
            if name == peers.OURS:
                raise
            found.skipped[name] = f"{OTHER_RESULTS}: {error}"
        except Exception as error:  # another library that fails must not end the run
            if name == peers.OURS:
                raise
            found.skipped[name] = f"failed: {type(error).__name__}: {error}"
        else:
            found.good[name] = contender
    return found


def take_turns(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return the median seconds of a call, for every round of every contender."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for taken in itertools.islice(turns(calls), rounds):
        for name, seconds in taken.items():
            medians[name].append(seconds)
        on_round()
    return medians


def turns(calls: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, float]]:
    """Yield the median seconds of a call of every contender, round after round."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = min(MOST_REPEATS, max(1, int(ROUND_SECONDS / _seconds(call))))
    order = list(calls)
    while True:
        taken = {}
        for name in order:
            call = calls[name]
            time.sleep(REST_SECONDS)
            if repeats[name] > 1:
                call()  # its data and code may have left the caches
            taken[name] = statistics.median(
                _seconds(call) for _ in range(repeats[name])
            )
        order.append(order.pop(0))  # start the next round with another contender
        yield taken


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
