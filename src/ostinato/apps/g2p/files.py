"""Files that are either the old ones or the new ones, never half of one."""

import os
import tempfile
from pathlib import Path

from .errors import G2PError

PART = ".part"  # what a file is called that is not whole yet ends so


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place, then put it there in one step.

    Raises:
        G2PError: the file cannot be written.
    """
    try:
        prefix = f".{path.name}."
        handle, name = tempfile.mkstemp(PART, prefix, path.parent)
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
    """Create a folder and its parents, or remove what a crash left in it of a `write`.

    Raises:
        G2PError: it cannot be made, or a file is in its place.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(f".*{PART}"):
            part.unlink(missing_ok=True)
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
