"""Script that reads a `.mat` file in a process of its own, for `read`.

scipy's reader can crash on a damaged file, and so end the program. Nothing imports this
module: it is run with the path of a file, and writes a `.npz` file to the standard
output: the pieces of each part in one array `[frames, keys]`, and their lengths as
`PART_lengths`. In place of that it may write a line that says what is wrong.
"""

import io
import sys
from typing import Any

import numpy as np
from scipy.io import loadmat

PARTS = ("train", "valid", "test")


def main(path: str) -> None:
    """Write what the file at `path` holds to the standard output."""
    try:
        found = loadmat(path, variable_names=[f"{part}data" for part in PARTS])
        arrays = {}
        for part in PARTS:
            pieces = [_real(piece) for piece in found[f"{part}data"].ravel()]
            arrays[part] = np.concatenate([np.zeros((0, 88)), *pieces])
            arrays[f"{part}_lengths"] = np.array([len(p) for p in pieces], np.int64)
        content = io.BytesIO()
        np.savez(content, **arrays)
        sys.stdout.buffer.write(content.getvalue())
    except Exception as error:  # whatever scipy meets in damaged bytes
        sys.stdout.write(" ".join(f"{type(error).__name__}: {error}".split()))


def _real(piece: Any) -> np.ndarray:
    """Return the numbers of a matrix as float64."""
    if np.iscomplexobj(piece):
        raise ValueError("a matrix must hold real numbers, got complex ones")
    return np.asarray(piece, np.float64)


if __name__ == "__main__":
    main(sys.argv[1])
