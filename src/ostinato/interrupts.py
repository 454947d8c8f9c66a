"""Ends the command line on SIGINT and SIGTERM, whatever it is doing.

The exception that Python raises for Ctrl-C cannot do that. It is lost where it strikes
a callback, such as the one that JAX gives to the garbage collector, and where it gets
through while XLA compiles, the process waits for that or crashes: XLA frees its devices
before it joins the thread that compiles for them. So a signal wakes a thread that does
nothing else: it lets the command keep what is worth keeping, for at most `GRACE`
seconds, and ends the process there and then, without anybody's clean-up.

`ostinato` imports this module before all others, so that an interrupt while the command
is still importing ends it in the same way. In any other program it does nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

GRACE = 3.0  # seconds from a signal to the end, at most
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_armed = False
_keep: Callable[[], object] | None = None
_ending = threading.Lock()  # whoever takes it for good ends the process


def arm() -> None:
    """Let SIGINT and SIGTERM end this process with code 128 + their number.

    A signal that the parent process has told us to ignore stays ignored.
    """
    global _armed
    if _armed:
        return
    _armed = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # is written to even while the main thread is in C++
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


@contextmanager
def keeping(keep: Callable[[], object]) -> Iterator[None]:
    """Call `keep`, from another thread, before a signal ends the process.

    It should stop what the main thread does from changing what it keeps.
    """
    global _keep
    _keep = keep
    try:
        yield
    finally:
        with _ending:  # once a signal has come, the main thread gets no further
            _keep = None


def finish() -> None:
    """Let the process end by itself: later signals come too late."""
    _ending.acquire()


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
    except Exception as error:  # there is nobody else to report it
        print(f"ostinato: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _is_command() -> bool:
    """Whether this process runs `ostinato` or `python -m ostinato`."""
    if sys.argv[:1] == ["-m"]:  # so it is until Python has found the module
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "ostinato"
    name, _ = os.path.splitext(os.path.basename("".join(sys.argv[:1])))
    return name == "ostinato"


if _is_command():
    arm()
