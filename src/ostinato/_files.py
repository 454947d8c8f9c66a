"""Files: one clear error for damaged or hostile ones, and writing that cannot tear."""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
import stat
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from . import _checks

PART = ".part"  # the end of the name of a file that is still being written
MAX_RATIO = 16  # of a zip's contents to its size; weights hardly shrink
_MAX_JSON = 64 << 20
_DESCRIPTORS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")
_MOST_LINKS = 40  # that Linux follows
_MOST_BYTES = 200  # of the name of a file, which may have 255, in one that is longer


class BadFileError(ValueError):
    """A file that is damaged, or not of the kind that was asked for."""


def check_path(name: str, path: Any) -> None:
    """Check that `path` is the name of a file; numbers of open files are none."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(
            f"`{name}` must be a str or an os.PathLike, got {_checks.describe(path)}"
        )
    if not text:
        raise ValueError(f"`{name}` must name a file, got ''")


@contextmanager
def reading(path: str | os.PathLike[str], kind: str) -> Iterator[int]:
    """Turn whatever a reader meets in damaged bytes into one clear `ValueError`.

    Args:
        path: the file. That it cannot be opened at all stays an `OSError`.
        kind: what it has to be, for the message, such as `"a model of Keras"`.

    Yields:
        The size of the file.

    Raises:
        TypeError: `path` is no path.
    """
    check_path("path", path)
    with open(path, "rb"):  # missing, a folder, not allowed: not the reader's matter
        size = Path(path).stat().st_size
    try:
        yield size
    except (BadFileError, ImportError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise BadFileError(
            f"`path` must be {kind}; {os.fspath(path)!r} cannot be read as one: "
            f"{text or type(error).__name__}"
        ) from error


def same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths lead to one file that is there, also through links."""
    return (
        os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)
    )


def descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the open file of this process that a path leads to; None for others.

    Such are `/dev/stdout`, `/dev/fd/3`, `/proc/self/fd/3`, and links to them. A file
    that has been redirected to is not found under its own name.
    """
    folders = {os.path.realpath(folder) for folder in _DESCRIPTORS}
    place = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder)
        place = os.path.join(folder, name)
        if folder in folders and name.isdecimal():
            return int(name)
        if not os.path.islink(place):
            return None
        place = os.path.join(folder, os.readlink(place))
    return None  # a circle of links


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to an open file of this process, a pipe or a device.

    What is written to it follows what was written before; a file is replaced.
    """
    there = os.path.exists(path)
    other = there and not (os.path.isfile(path) or os.path.isdir(path))
    return other or descriptor(path) is not None


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is there whole, or as it was before, whatever happens.

    A file keeps its permissions, and a symbolic link stays one: its target is written.
    What is there and no file, such as a pipe or a device, is written into, and so is an
    open file of this process, such as `/dev/stdout`: what is in it stays.
    """
    if (number := descriptor(path)) is not None:
        _write_open(number, path, data)
        return
    old = os.stat(path).st_mode if os.path.exists(path) else None
    if old is not None and not stat.S_ISREG(old):
        with open(path, "wb") as file:
            file.write(data)
        return
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(path.parent))
    beside = path.with_name(f".{_begin(path)}.{secrets.token_hex(4)}{PART}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            os.chmod(beside, stat.S_IMODE(old))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write_open(number: int, path: str | os.PathLike[str], data: bytes) -> None:
    """Write into an open file, after what Python still holds for it."""
    standard = sys.__stdin__, sys.__stdout__, sys.__stderr__
    try:
        if number < len(standard) and standard[number] is None:
            # It was closed when this process began; another file may have its number.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        for stream in (sys.stdout, sys.stderr):
            if _number_of(stream) == number:
                stream.flush()
        with open(number, "wb", closefd=False) as file:
            file.write(data)
    except OSError as error:  # names the number, or nothing
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _number_of(stream: TextIO | None) -> int | None:
    """Return the number of the file of a stream; None if it has none, or is closed."""
    try:
        return None if stream is None else stream.fileno()
    except (AttributeError, ValueError):  # that of another program may have no method
        return None


def unfinished(path: Path) -> list[Path]:
    """Return what a crash has left of a file that was being written."""
    name = f".{glob.escape(_begin(path))}.{'[0-9a-f]' * 8}{PART}"
    return [*path.parent.glob(name)]


def _begin(path: Path) -> str:
    """Return so much of a file's name that there is room for more in another one."""
    return os.fsdecode(os.fsencode(path.name)[:_MOST_BYTES])


def check_zip(archive: zipfile.ZipFile, size: int) -> None:
    """Raise unless the contents of a zip file stand in proportion to its size."""
    limit = MAX_RATIO * size + (1 << 20)
    if sum(info.file_size for info in archive.infolist()) > limit:
        raise ValueError("its parts are too large for a file of its size")


def read_json(data: bytes | str) -> dict[str, Any]:
    """Return the object that JSON text holds."""
    if len(data) > _MAX_JSON:
        raise ValueError(f"its description has more than {_MAX_JSON} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("its description is no JSON object")
    return found
