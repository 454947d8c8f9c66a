"""Files that are either the old ones or the new ones, never half of one."""

import os
import tempfile
from pathlib import Path

from .errors import G2PError


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place, then put it there in one step.

    Raises:
        G2PError: the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # mkstemp's 0o600 is for secrets
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise G2PError(f"cannot write {path}: {error.strerror}") from None


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        G2PError: it cannot be made, or a file is in its place.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise G2PError(f"cannot make the folder {folder}: {error.strerror}") from None


def move(path: Path, target: Path) -> None:
    """Move a file over another one.

    Raises:
        G2PError: it cannot be moved.
    """
    try:
        os.replace(path, target)
    except OSError as error:
        raise G2PError(f"cannot move {path}: {error.strerror}") from None
