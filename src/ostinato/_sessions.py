"""What the sessions of `stream` share: they serve one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

MOST_COPIED = 2**18
"""Bytes of inputs and outputs of a step: more stay where they are, as copies take long,
fewer are copied, as asking where arrays are takes longer."""


class OneThread:
    """An object whose calls run one at a time, and which interrupts leave whole."""

    def __init__(self, batch: int) -> None:
        self._free, self._batch = threading.Lock(), batch

    @property
    def batch(self) -> int:
        """The number of streams, B."""
        return self._batch

    def _alone(self) -> threading.Lock:
        """Return the lock that a call holds; raise if another call holds it.

        Calls hold it by `with`: between taking a lock and giving it back, that has no
        moment at which an interrupt would leave the session locked.
        """
        if self._free.locked():
            raise RuntimeError(
                "a session of ost.stream serves one thread at a time, and another "
                "thread is in a call; make a session for each thread"
            )
        return self._free

    def __reduce__(self) -> Any:
        raise TypeError(
            "a session of ost.stream can be neither copied nor pickled; save its "
            "`state`, open a session anew, and set the state of that"
        )


def wholly(write: Callable[[], None]) -> None:
    """Call a function that writes several arrays, anew if an interrupt comes into it.

    The interrupt is raised when all are written, or before any is.
    """
    try:
        write()
    except BaseException:
        write()
        raise
