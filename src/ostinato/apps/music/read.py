"""Files of music, of every kind that can be read, as pieces."""

import io
import json
import stat
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from ..errors import UserError
from . import midi, unpickle
from .rolls import MOST_TOTAL, Pieces, dealt, roll_of

PARTS = ("train", "valid", "test")  # the names of the literature
MOST_BYTES = 2**28  # of a file
MIDI = (".mid", ".midi")
_SCRIPT = Path(__file__).with_name("mat_script.py")
_PATIENCE = 120  # seconds for a large file on a slow disk


def _mat(path: Path) -> Mapping[str, Any]:
    command = [sys.executable, "-P", str(_SCRIPT), str(path)]
    done = subprocess.run(command, capture_output=True, timeout=_PATIENCE)
    if not zipfile.is_zipfile(io.BytesIO(done.stdout)):
        detail = done.stdout.decode(errors="replace")[:200].strip()
        detail = detail or "the reader crashed"
        raise UserError(
            "it is damaged, or lacks cells traindata, validdata, testdata of matrices "
            f"[T, 88] ({detail})"
        )
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as found:
        return {
            part: np.split(found[part], np.cumsum(found[f"{part}_lengths"])[:-1])
            if found[f"{part}_lengths"].size
            else []
            for part in PARTS
        }


def _npz(path: Path) -> Mapping[str, Any]:
    with zipfile.ZipFile(path) as archive:
        for part in PARTS:
            if (size := archive.getinfo(f"{part}.npy").file_size) > MOST_BYTES:
                raise UserError(f"{part}.npy in it is too large, of {size:,} bytes")
        return {
            part: unpickle.load_objects(archive.read(f"{part}.npy")) for part in PARTS
        }


COLLECTIONS: dict[str, Callable[[Path], Any]] = {
    ".mat": _mat,
    ".pickle": lambda path: unpickle.loads(path.read_bytes()),
    ".pkl": lambda path: unpickle.loads(path.read_bytes()),
    ".npz": _npz,
    ".json": lambda path: json.loads(path.read_bytes()),
}


def read(
    paths: Sequence[Path],
    per_beat: int,
    seed: int,
    tell: Callable[[str], object] = lambda note: None,
) -> Pieces:
    """Read the pieces of files, and of all files of music in folders.

    Collections keep the division into pieces to learn from, to choose by and to test on
    that they have; pieces of MIDI files are dealt out at random.

    Args:
        paths: files `.mid`, `.midi`, `.mat`, `.pickle`, `.pkl`, `.npz`, `.json`, and
            folders of them.
        per_beat: frames of a quarter note in MIDI files.
        seed: decides how pieces of MIDI files are dealt out.
        tell: called with a line for the user about what is left out.

    Raises:
        UserError: a file cannot be read, or a part has no piece; the message names it.
    """
    pieces, total = Pieces([], [], []), 0
    single: dict[bytes, np.ndarray] = {}
    different = {path.resolve(): path for path in _files(paths)}
    for path in different.values():
        found = []
        if path.suffix.lower() in MIDI:
            roll = _one(path, per_beat)
            if single.setdefault(roll.tobytes(), roll) is roll:
                found = [roll]
            else:
                tell(f"left out, since another file has the same notes: {path}")
        else:
            for part, rolls in zip(pieces, _collection(path), strict=True):
                part.extend(rolls)
                found += rolls
        total += sum(map(len, found))
        if total > MOST_TOTAL:
            raise UserError(f"all files must have at most {MOST_TOTAL:,} frames")
    for part, rolls in zip(pieces, dealt([*single.values()], seed), strict=True):
        part.extend(rolls)
    for part, name in zip(pieces, ("learn from", "choose by", "test on"), strict=True):
        if not part:
            raise UserError(f"there must be pieces to {name}, got none")
    return pieces


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files, and those of music in folders, by their names.

    Names that begin with a dot are hidden, such as what macOS writes beside a file.
    """
    kinds = (*MIDI, *COLLECTIONS)
    for path in paths:
        if not path.is_dir():
            if not path.suffix and not path.exists():
                raise UserError(f"cannot read {path}: No such file or folder")
            if path.suffix.lower() not in kinds:
                raise UserError(
                    f"{path} must be a folder, or end in {', '.join(kinds)}"
                )
            yield path
            continue
        inside = sorted(
            p
            for p in path.rglob("*")
            if p.suffix.lower() in kinds
            and not p.is_dir()
            and not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        if not inside:
            raise UserError(f"the folder {path} has no file of {', '.join(kinds)}")
        yield from inside


def first_piece(path: Path, per_beat: int) -> np.ndarray:
    """Read the piece of a MIDI file, or the first one to test on of a collection.

    Raises:
        UserError: the file cannot be read.
    """
    path = next(_files([path]))
    if path.suffix.lower() in MIDI:
        return _one(path, per_beat)
    test = _collection(path).test
    if not test:
        raise UserError(f"{path} must have a piece to test on, got none")
    return test[0]


def _one(path: Path, per_beat: int) -> np.ndarray:
    with _one_line(path):
        return midi.read(path, per_beat)


def _collection(path: Path) -> Pieces:
    """Read the pieces of a file that has three parts."""
    with _one_line(path):
        found = COLLECTIONS[path.suffix.lower()](path)
        if not isinstance(found, Mapping) or not {*PARTS} <= found.keys():
            raise UserError(f"it must have the parts {', '.join(PARTS)}")
        parts, total = [], 0
        for part in PARTS:
            rolls = []
            pieces = found[part]
            listed = isinstance(pieces, list | tuple | np.ndarray)
            if not listed or getattr(pieces, "ndim", 1) == 0:
                raise UserError(f"{part} must be a list of pieces, got {short(pieces)}")
            for number, frames in enumerate(pieces, 1):
                try:
                    rolls.append(roll_of(frames))
                except UserError as error:
                    raise UserError(f"{part}, piece {number}: {error}") from None
                if (total := total + len(rolls[-1])) > MOST_TOTAL:
                    raise UserError(f"it must have at most {MOST_TOTAL:,} frames")
            parts.append(rolls)
        return Pieces(*parts)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn whatever a malformed file causes into one line about the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe may never be written
            raise UserError("it is no file")
        if status.st_size > MOST_BYTES:
            raise UserError(f"it is too large, of {status.st_size:,} bytes")
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except Exception as error:  # scipy, mido and pickle raise nearly all kinds
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        detail = textwrap.shorten(detail, 200)
        raise UserError(f"cannot read {path}: it is damaged ({detail})") from None
