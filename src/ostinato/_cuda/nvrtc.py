"""NVRTC, NVIDIA's compiler of kernels as a library: found and called through ctypes.

It needs neither a GPU nor a driver. It comes as a package of PyPI, which `jax[cuda12]`
and `jax[cuda13]` bring along, or with a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAJORS = (13, 12)
_IN_PACKAGES = ("cu13/lib", "cuda_nvrtc/lib")  # of the namespace package `nvidia`
_TOOLKIT = Path("/usr/local/cuda/lib64")
PACKAGES = "nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12"


class CompileError(RuntimeError):
    """The error for a text that NVRTC refuses; it holds NVRTC's messages."""


class Compiler(NamedTuple):
    """NVRTC, opened.

    Attributes:
        library: its functions.
        version: such as `"12.9"`.
        capabilities: that it compiles for, such as 90; None if it does not say.
    """

    library: ctypes.CDLL
    version: str
    capabilities: tuple[int, ...] | None = None

    def knows(self, capability: tuple[int, int]) -> bool:
        """Return whether it compiles for a compute capability, such as `(9, 0)`."""
        major, minor = capability
        return self.capabilities is None or 10 * major + minor in self.capabilities


class Found(NamedTuple):
    """The compiler, or the reason why there is none; the other one is None."""

    compiler: Compiler | None
    reason: str | None


class Compiled(NamedTuple):
    """Machine code for one architecture, and what the compiler said."""

    cubin: bytes
    log: str


@functools.cache
def find() -> Found:
    """Open NVRTC on the first call, and return the same on every call."""
    return open_first(_candidates())


def open_first(paths: Iterable[Path]) -> Found:
    """Open the first library that can be opened."""
    failures = []
    for path in paths:
        try:
            _load_builtins(path)
            return Found(_opened(ctypes.CDLL(str(path))), None)
        except (OSError, AttributeError) as error:
            if path.is_file():
                failures.append(f"{path} cannot be used: {error}")
    hint = f"no NVRTC: install {PACKAGES}, as jax[cuda13] or jax[cuda12] does"
    return Found(None, "; ".join([*failures, hint]))


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    for root in roots:
        for inside in _IN_PACKAGES:
            yield from sorted((Path(root) / inside).glob("libnvrtc.so.*"))
    for major in _MAJORS:
        yield Path(f"libnvrtc.so.{major}")  # where the system looks for libraries
    for major in _MAJORS:
        yield _TOOLKIT / f"libnvrtc.so.{major}"


def _load_builtins(path: Path) -> None:
    """Load what NVRTC looks for by name only, so that it finds it."""
    for beside in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)


def _opened(library: ctypes.CDLL) -> Compiler:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    version, count = f"{major.value}.{minor.value}", ctypes.c_int()
    if library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) != 0:
        return Compiler(library, version)
    capabilities = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(capabilities)
    return Compiler(library, version, tuple(capabilities))


def compile_text(compiler: Compiler, text: str, options: Sequence[str]) -> Compiled:
    """Compile the text of a kernel to machine code.

    Args:
        compiler: from `find`.
        text: CUDA C++ that includes no file.
        options: of NVRTC; `-arch=sm_90a` and the like is one of them.

    Raises:
        CompileError: the text or an option is wrong.
    """
    library = compiler.library
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
        ),
    )
    try:
        given = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(given))(*given)
        result = library.nvrtcCompileProgram(program, len(given), array)
        log = _read(library, program, "ProgramLog").rstrip(b"\0").decode()
        _check(library, result, log)
        return Compiled(_read(library, program, "CUBIN"), log.strip())
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, library[f"nvrtcGet{what}"](program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, result: int, log: str = "") -> None:
    if result != 0:
        name = library.nvrtcGetErrorString(result).decode()
        raise CompileError(f"{name}\n{log.strip()}".strip())
