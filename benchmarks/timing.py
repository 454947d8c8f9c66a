"""Checks and timing: contenders take turns, so that a busy minute slows them all."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from tolerance import assert_close

from . import peers
from .peers import Contender, Unsupported
from .problem import Data, Problem, Results

ROUND_SECONDS = 0.06  # calls are repeated to fill this
MOST_REPEATS = 200
OTHER_RESULTS = "other results"
REST_SECONDS = 0.03  # until the other contenders' idle threads stop spinning


def checked(
    problem: Problem, data: Data, names: list[str], threads: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Check the results of all contenders.

    Returns:
        The contenders whose results are right, and for each of the others the reason
        why it is left out.

    Raises:
        AssertionError: our own results are wrong.
    """
    reference = peers.reference(problem, data, threads)
    good, skipped = {}, {}
    for name in names:
        try:
            contender = peers.build(name, problem, data, threads)
            check(problem, contender.results(contender.call()), reference)
        except Unsupported as reason:
            skipped[name] = str(reason)
        except AssertionError as error:
            if name == peers.OURS:
                raise
            what = " ".join(str(error).split("\n")[2:4])
            skipped[name] = f"{OTHER_RESULTS}: {what}"
        else:
            good[name] = contender
    return good, skipped


def check(problem: Problem, got: Results, want: Results) -> None:
    """Check that all results agree up to rounding."""
    assert got.keys() <= want.keys(), f"{sorted(got)}, want {sorted(want)}"
    for name in got:
        assert_close(
            got[name], want[name], dtype=problem.dtype, terms=problem.terms, what=name
        )


def take_turns(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return the median seconds of a call, for every round of every contender."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = min(MOST_REPEATS, max(1, int(ROUND_SECONDS / _seconds(call))))
    medians: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            call = calls[name]
            time.sleep(REST_SECONDS)
            if repeats[name] > 1:
                call()  # its data and code may have left the caches
            medians[name].append(
                statistics.median(_seconds(call) for _ in range(repeats[name]))
            )
        order.append(order.pop(0))  # start the next round with another contender
        on_round()
    return medians


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
