"""Handling of signals that ends the command line, whatever it is doing.

Python's KeyboardInterrupt cannot do that. It is lost when it is raised in a callback,
such as the one that JAX gives to the garbage collector. When it is raised while XLA
compiles, the process waits for the compilation or crashes, since XLA frees its devices
before it joins the thread that compiles for them. So a signal wakes a thread that does
nothing else: it lets the command save its work, for at most `GRACE` seconds, and then
ends the process at once, without running any clean-up.

`ostinato` imports this module before all others, so that an interrupt during the
command's imports ends it in the same way. In other programs this module does nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

GRACE = 3.0  # most seconds from a signal to the end
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Those that this system has: Windows has no SIGHUP."""

_armed = False
_keep: Callable[[], object] | None = None
_ending = threading.Lock()  # the thread that ends the process takes it for good


def arm() -> None:
    """Make `SIGNALS` end this process with code 128 + their number.

    A signal that the parent process set to be ignored stays ignored.
    """
    global _armed
    if _armed:
        return
    _armed = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # written even while the main thread is in C++
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


@contextmanager
def keeping(keep: Callable[[], object]) -> Iterator[None]:
    """Call `keep`, from another thread, before a signal ends the process.

    `keep` must prevent the main thread from changing what it saves.
    """
    global _keep
    _keep = keep
    try:
        yield
    finally:
        with _ending:  # after a signal, the main thread stops here
            _keep = None


def finish() -> None:
    """Let the process end by itself: signals have no effect from now on."""
    _ending.acquire()
    for number in SIGNALS:  # Python, when it ends, gives back defaults to others
        signal.signal(number, signal.SIG_IGN)


def _watch(reader: int) -> None:
    number = 0
    while number not in SIGNALS:
        (number,) = os.read(reader, 1)
    code = 128 + number
    limit = threading.Timer(GRACE, os._exit, (code,))
    limit.daemon = True
    limit.start()
    _ending.acquire()
    try:
        if _keep is not None:
            _keep()
    except Exception as error:  # nothing else would report it
        print(f"ostinato: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _is_command() -> bool:
    """Return True if this process runs `ostinato` or `python -m ostinato`."""
    if sys.argv[:1] == ["-m"]:  # the value until Python has found the module
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "ostinato"
    name, _ = os.path.splitext(os.path.basename("".join(sys.argv[:1])))
    return name == "ostinato"


if _is_command():
    arm()
