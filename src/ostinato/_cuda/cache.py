"""Files that spare work of an earlier process: compiled kernels and what they passed.

Nothing depends on them: a folder that is missing, full or read-only, and files that are
damaged, only mean that the work is done again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from .. import _config, _files

_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


def folder() -> Path | None:
    """Return the folder of the files, which may be missing; None where there is none.

    It is `OSTINATO_CACHE_DIR`, or `ostinato` in the user's folder for such files.
    """
    given = _config.read().cache_dir
    try:
        if given is not None:
            return Path(given).expanduser()
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return Path(root) / "ostinato"


def key(*parts: str) -> str:
    """Return a name that stands for these texts, in this order."""
    digest = _DIGEST()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def path_of(name: str) -> Path | None:
    """Return the file of a name, whether it exists or not; None without a folder."""
    root = folder()
    return None if root is None else root / name


def load(name: str) -> bytes | None:
    """Return what was stored under a name; None if it is missing or damaged."""
    path = path_of(name)
    if path is None:
        return None
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    data = stored[_DIGEST_BYTES:]
    return data if stored[:_DIGEST_BYTES] == _DIGEST(data).digest() else None


def store(name: str, data: bytes) -> None:
    """Store under a name what `load` then returns, if the folder can be written."""
    path = path_of(name)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write_atomically(path, _DIGEST(data).digest() + data)
    except OSError:
        pass
