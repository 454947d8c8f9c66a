"""Timing of contenders that take turns, each in a process of its own.

Idle threads of one library keep processors busy that another one needs.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import timing
from .peers import Unsupported


class Timed(NamedTuple):
    """The median seconds of each round, and why other contenders did not take part."""

    seconds: dict[str, list[float]]
    skipped: dict[str, str]


def take_turns(
    builders: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int
) -> Timed:
    """Time the calls that `builders` return in their processes.

    Args:
        builders: by name, what can be sent to a new process. A builder checks the
            results of its call before it returns it, and raises `Unsupported` if it
            cannot take part.
        rounds: turns of each contender.

    Raises:
        RuntimeError: a builder raised something else; the message holds it.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, timed, name = {}, Timed({}, {}), ""
    try:
        for name, builder in builders.items():
            pipes[name], theirs = spawn.Pipe()
            spawn.Process(
                target=_take_part, args=(theirs, name, builder), daemon=True
            ).start()
            theirs.close()  # so that the end of the process is seen here
            said = pipes[name].recv()
            if said is not None:
                timed.skipped[name] = said
                del pipes[name]
        for name in rounds * list(pipes):
            pipes[name].send("go")
            timed.seconds.setdefault(name, []).append(pipes[name].recv())
    except EOFError:
        raise RuntimeError(f"the process of {name} ended; see above") from None
    finally:
        for pipe in pipes.values():
            pipe.close()
    return timed


def _take_part(pipe: Any, name: str, builder: Callable) -> None:
    """Build a contender, say why it cannot take part, and time a round when told."""
    try:
        call = builder()
    except Unsupported as reason:
        pipe.send(str(reason))
        return
    rounds = timing.turns({name: call})
    pipe.send(None)
    try:
        while pipe.recv() == "go":
            pipe.send(next(rounds)[name])
    except EOFError:
        return  # the parent has what it needs
