"""Atomic writing of files: a reader sees the old or the new content, never a part."""

import os
import tempfile
from pathlib import Path

from .errors import UserError

PART = ".part"  # suffix of a file that is still being written


def write(path: Path, content: bytes) -> None:
    """Write a temporary file next to `path`, then move it there in one step.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        prefix = f".{path.name}."
        handle, name = tempfile.mkstemp(PART, prefix, path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # mkstemp makes files that others cannot read
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; remove temporary files that a crash left in it.

    Raises:
        UserError: the folder cannot be created, or a file has its name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(f".*{PART}"):
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None


def move(path: Path, target: Path) -> None:
    """Move a file, replacing the target if it exists.

    Raises:
        UserError: the file cannot be moved.
    """
    try:
        os.replace(path, target)
    except OSError as error:
        raise UserError(f"cannot move {path}: {error.strerror}") from None
