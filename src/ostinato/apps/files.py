"""Files and folders of runs: whatever prevents writing them is a UserError."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from .._files import PART as PART
from .._files import is_stream as is_stream
from .._files import same as same
from .._files import unfinished, write_atomically
from .errors import UserError

PREVIOUS = "previous"  # the folder, in that of a run, for the run before it


def write(path: Path, content: bytes) -> None:
    """Write a file: a reader sees the old or the new content, never a part.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def silence(stream: TextIO) -> None:
    """Let all that is written to a stream go nowhere, what it still holds too."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def check_folder(folder: Path) -> None:
    """Check that files can be written in a folder, or in the one that it will be in.

    Nothing is left there.

    Raises:
        UserError: they cannot.
    """
    there = folder
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        doing = "write in" if os.path.isdir(folder) else "make"
        why = error.strerror if os.path.isdir(there) else f"{there} is no folder"
        raise UserError(
            f"cannot {doing} the folder {folder}: {why}; choose another `--out`"
        ) from None


def make_folder(folder: Path, names: Iterable[str] = ()) -> None:
    """Create a folder and its parents.

    Args:
        folder: its path.
        names: of files; what a crash left of them half written is removed.

    Raises:
        UserError: the folder cannot be created, or a file has its name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            for part in unfinished(folder / name):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Keep other processes from reserving a folder, until the end of the context.

    However this process ends, the folder is free then. A file system without locks
    reserves nothing.

    Raises:
        UserError: another process has reserved it.
    """
    with ExitStack() as opened:
        try:
            import fcntl

            file = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {folder}; wait for its end, or choose "
                "another `--out`"
            ) from None
        except (ImportError, OSError):  # Windows, or a folder that may not be read
            pass
        yield


def move(path: Path, target: Path) -> None:
    """Move a file, replacing the target if it exists.

    Raises:
        UserError: the file cannot be moved.
    """
    try:
        os.replace(path, target)
    except OSError as error:
        raise UserError(f"cannot move {path}: {error.strerror}") from None


def move_aside(folder: Path, names: Sequence[str]) -> bool:
    """Move the files of a run to `previous/` in its folder; return whether it has one.

    They take the place of those that were there. The first name, that of the model,
    decides: without it, the folder has what a crash during a move has left, which may
    complete the run in `previous/`, but replaces none of its files.

    Raises:
        UserError: a file cannot be moved or removed.
    """
    previous = folder / PREVIOUS
    found = [name for name in names if (folder / name).exists()]
    if not found:
        return False
    make_folder(previous)
    whole = found[0] == names[0]
    for name in names[1:] if whole else ():
        remove(previous / name)
    for name in found:
        if whole or not (previous / name).exists():
            move(folder / name, previous / name)
        else:
            remove(folder / name)
    return True


def remove(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        UserError: the file cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {path}: {error.strerror}") from None
