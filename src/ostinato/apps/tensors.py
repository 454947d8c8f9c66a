"""Files of arrays with a header, in the format safetensors, read with suspicion.

What a file contains is checked as far as it is used; anything wrong with it becomes one
line about the file. They contain no code.
"""

import json
import re
import shlex
import stat
import struct
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from . import files
from .errors import UserError
from .fields import check, check_range
from .training import Params, State, init_state

MOST_STEP = 2**31 - 2  # a step is an int32 in `update`
MODEL_FILE, RESUME_FILE = "model.safetensors", "resume.safetensors"
_FORMAT = re.compile(r"ostinato-(?P<job>g2p|forecast|music)-\d+")
MALFORMED = (
    UserError,
    AttributeError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
    struct.error,
)


class TensorFiles(NamedTuple):
    """The files of one job.

    `model.safetensors` holds everything that the use of a trained model needs: the best
    parameters, and in the header the sizes of the model and the figures of its run.
    `resume.safetensors` holds the whole state of a run.

    Attributes:
        format: the name of the format, in the metadata of every file.
        first: the command that makes the files, for errors about missing ones.
        most_params: the largest number of parameters of a model.
    """

    format: str
    first: str
    most_params: int

    @property
    def most_bytes(self) -> dict[str, int]:
        """The largest size of each file, by its name."""
        # One float32 for each parameter, or four, and a quarter more for the rest.
        return {MODEL_FILE: 5 * self.most_params, RESUME_FILE: 20 * self.most_params}

    def save(
        self, path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any]
    ) -> None:
        """Write a file; if that fails, the old file stays as it was."""
        text = json.dumps(header)
        metadata = {"format": self.format, "header": text}
        metadata["checksum"] = _checksum(tensors, text)
        files.write(path, save(tensors, metadata))

    def save_state(self, folder: Path, state: State, header: dict[str, Any]) -> None:
        """Write `resume.safetensors`, with `header` as JSON in its metadata."""
        leaves = jax.tree.leaves(state[1:])
        tensors = {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        self.save(folder / RESUME_FILE, tensors, {**header, "step": state.step})

    def load_state(self, folder: Path, init: Callable[[jax.Array], Params]) -> State:
        """Read the state of a run whose parameters `init` draws.

        Raises:
            UserError: the file is missing, damaged, or holds another model.
        """
        path = folder / RESUME_FILE
        tensors, header = self.read(path)
        template = jax.eval_shape(lambda: init_state(0, init)[1:])
        shapes, tree = jax.tree.flatten(template)
        with self.damage(path):
            leaves = fitting(
                tensors, {f"{i:03}": want for i, want in enumerate(shapes)}
            )
            step = header["step"]
            check("step", int, step)
            check_range("step", f"0 to {MOST_STEP}", step, 0 <= step <= MOST_STEP)
        return State(step, *jax.tree.unflatten(tree, leaves))

    def read(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Read the arrays and the header of a file.

        Raises:
            UserError: the file is missing or damaged.
        """
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"cannot read {path}: it is no file")
            if status.st_size > (most := self.most_bytes[path.name]):
                size = f"{status.st_size:,} bytes, and at most {most:,} can be right"
                raise UserError(f"cannot read {path}: it is too large, of {size}")
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(self._missing(path)) from None
        except OSError as error:
            if path.parent.is_file():
                raise UserError(_no_folder(path.parent)) from None
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        with self.damage(path):
            tensors = _arrays(content)
            (size,) = struct.unpack("<Q", content[:8])
            metadata = json.loads(content[8 : 8 + size])["__metadata__"]
            check("metadata", dict, metadata)
            got = metadata.get("format")
        self._check_job(path, got)
        with self.damage(path):
            check_range("format", self.format, got, got == self.format)
            text, got = metadata["header"], metadata.get("checksum")
            check("header", str, text)
            same = got == _checksum(tensors, text)
            check_range("checksum", "that of what it holds", got, same)
            header = json.loads(text)
            check("header", dict, header)
        return tensors, header

    def _missing(self, path: Path) -> str:
        """Tell that a file is missing, and where that of the run before is."""
        told, previous = f"there is no {path}; ", path.parent / files.PREVIOUS
        if (previous / path.name).exists():
            told += f"the run before has left one in {previous}; or "
        return f"{told}{self.first} --out {shlex.quote(str(path.parent))}"

    def _check_job(self, path: Path, got: object) -> None:
        """Check that a file is of no other job.

        Raises:
            UserError: it is of another one.
        """
        mine, other = (_FORMAT.fullmatch(str(one)) for one in (self.format, got))
        if mine and other and mine["job"] != other["job"]:
            raise UserError(
                f"{path} was written by `ostinato train {other['job']}`; {self.first}"
            )

    @contextmanager
    def damage(self, path: Path) -> Iterator[None]:
        """Turn errors caused by the content of a file into one line about the file.

        Raises:
            UserError: in place of any error that malformed content causes.
        """
        try:
            yield
        except KeyError as error:
            detail = f"it lacks {error}"
        except MALFORMED as error:
            detail = str(error)
        else:
            return
        detail = textwrap.shorten(detail, 400) or "it cannot be read"
        raise UserError(
            f"{path} is damaged or no file of this program: {detail}; {self.first}"
        )


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a file; raise a ValueError if NumPy lacks a dtype."""
    try:
        return load(content)
    except KeyError as error:
        raise ValueError(
            f"it has an array of {error}, a dtype that NumPy lacks"
        ) from error


def _no_folder(file: Path) -> str:
    """Tell that a file was given in place of the folder of a run."""
    told = f"{file} is a file; give the folder "
    if file.name in (MODEL_FILE, RESUME_FILE):
        return told + f"that it is in: {shlex.quote(str(file.parent))}"
    return told + "of a training run"


def fitting(tensors: dict[str, np.ndarray], wanted: dict[str, Any]) -> list[jax.Array]:
    """Return the arrays in the order of `wanted`, after checks of names and values."""
    check_range(
        "arrays", ", ".join(wanted), [*tensors], tensors.keys() == wanted.keys()
    )
    for name, want in wanted.items():
        got = tensors[name]
        fits = got.shape == want.shape and got.dtype == want.dtype
        kind = f"{want.dtype} {want.shape}"
        check_range(name, kind, f"{got.dtype} {got.shape}", fits)
        check_range(name, "finite", "NaN or infinity", bool(np.isfinite(got).all()))
    return [jnp.asarray(tensors[name]) for name in wanted]


def named(params: Params) -> list[tuple[str, Any]]:
    """Return the arrays of the parameters with their paths, such as `decoder.0.v`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return [(name(path), leaf) for path, leaf in leaves]


def _checksum(tensors: dict[str, np.ndarray], header: str) -> str:
    digest = blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
