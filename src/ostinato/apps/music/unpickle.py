"""Pickles of lists, tuples, numbers and arrays, read without running what they name.

The functions that a pickle may name are replaced by those below; any other name is an
error.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Iterable
from reprlib import repr as short
from typing import Any

import numpy as np

from ..errors import UserError

NUMBERS = r"[biuf]\d{1,2}"  # as numpy names them, such as i8
OBJECTS = r"O\d?"


class _Dtype:
    """What stands in for `numpy.dtype`: numbers, or objects."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = str(code).lstrip("<>|=")
        self.objects = bool(re.fullmatch(OBJECTS, self.code))
        if not self.objects and not re.fullmatch(NUMBERS, self.code):
            raise UserError(f"an array must hold numbers, got the dtype {self.code!r}")

    def __setstate__(self, state: Any) -> None:
        if not self.objects and state[1] in ("<", ">"):
            self.code = state[1] + self.code

    def numbers(self, content: Any) -> np.ndarray:
        """Return bytes, or what Python 2 has for them, as numbers."""
        raw = content.encode("latin1") if isinstance(content, str) else content
        if not isinstance(raw, bytes | bytearray):  # a number would become zeros
            raise UserError(
                f"an array must have its content as bytes, got {short(raw)}"
            )
        return np.frombuffer(raw, np.dtype(self.code))


class _Array(list):
    """What stands in for `numpy.ndarray`: a list of its rows."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, column_major, content = state
        if dtype.objects:
            if len(shape) != 1:
                raise UserError(
                    f"an array of objects must have one axis, got the shape {shape}; "
                    "save pieces of equal length as an array of numbers"
                )
            self[:] = content
        else:
            order = "F" if column_major else "C"
            self[:] = dtype.numbers(content).reshape(shape, order=order)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(
    content: Any, dtype: _Dtype, shape: Any, order: Any, axis_order: Any = None
) -> _Array:
    """Return an array of protocol 5; its order is "K" if `axis_order` is given."""
    if axis_order is None:
        return _Array(dtype.numbers(content).reshape(shape, order=order))
    return _Array(dtype.numbers(content).reshape(shape).transpose(axis_order))


def _scalar(dtype: _Dtype, content: Any) -> Any:
    return dtype.numbers(content)[0]


def _encode(text: str, _: str) -> bytes:
    """Return the bytes that Python 3 writes as text in the oldest kinds of pickles."""
    return text.encode("latin1")


_STAND_INS = {
    "ndarray": _Array,
    "dtype": _Dtype,
    "_reconstruct": _reconstruct,
    "_frombuffer": _from_buffer,
    "scalar": _scalar,
}
_MODULES = ("numpy", "numpy.core", "numpy._core")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        parent = module.removesuffix(".multiarray").removesuffix(".numeric")
        if parent in _MODULES and name in _STAND_INS:
            return _STAND_INS[name]
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise UserError(
            f"a pickle must hold lists, numbers and arrays alone; this one names "
            f"{module}.{name}, which is not run"
        )


def loads(content: bytes) -> Any:
    """Return what a pickle holds; arrays become lists of their rows.

    Raises:
        UserError: it names something else than arrays of numbers.
        Exception: the pickle is malformed.
    """
    # Python reserves the memory that a number in the file asks for; lengths are checked
    # by `genops`, places by us.
    for operation, place, _ in pickletools.genops(content):
        if operation.name in ("PUT", "LONG_BINPUT") and (place or 0) > len(content):
            raise UserError(f"place {place:,} is not in a pickle of its size")
    return _Unpickler(io.BytesIO(content), encoding="latin1").load()


def load_objects(content: bytes) -> Iterable[Any]:
    """Return the rows of an array in a `.npy` file, which may hold objects.

    Raises:
        UserError: it holds something else than numbers, lists and arrays.
        Exception: the file is malformed.
    """
    file = io.BytesIO(content)
    layout = np.lib.format
    first = layout.read_magic(file) == (1, 0)
    read = layout.read_array_header_1_0 if first else layout.read_array_header_2_0
    if read(file)[2].hasobject:
        return loads(content[file.tell() :])
    return np.load(io.BytesIO(content), allow_pickle=False)
