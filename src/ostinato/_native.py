"""The native library: its loader and the registration of its FFI targets with XLA.

A library that cannot be used is no error: ``status()`` returns either the library or
the reason, and the XLA backend runs without it.
"""

import ctypes
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _compat, _config

_LIBRARY_NAME = "libostinato_cpu.so"
_NOTE_NAME = "not_built.txt"  # holds CMake's reason for not building the library
_ABI_VERSION = 14  # kAbiVersion in native/include/ostinato/abi.h
_CPU_TARGETS = (
    "ostinato_cpu_features",
    "ostinato_rnn_fwd",
    "ostinato_rnn_bwd",
    "ostinato_rnn_pack",
    "ostinato_join",
    "ostinato_split",
    "ostinato_step",
    "ostinato_linear_fwd",
    "ostinato_linear_bwd",
    "ostinato_filter",
    "ostinato_gae",
)
CUDA_TARGET = "ostinato_cuda_launch"
"""The target of launches on a GPU, see native/ffi/cuda_launch.h."""
_CUDA_STAGES = {
    "initialize": "ostinato_cuda_prepare",
    "execute": "ostinato_cuda_launch",
}


class NativeStatus(NamedTuple):
    """The native library, or the reason why it is missing; the other one is None."""

    library: ctypes.CDLL | None
    reason: str | None


class CpuFeatures(NamedTuple):
    """The CPU: a level of ``_config.CPU_ISAS``, and the number of CPUs."""

    isa: str
    cpus: int


@functools.cache
def status() -> NativeStatus:
    """Load the library on the first call, and return the same status on every call.

    The first call starts JAX's backends.

    Raises:
        ValueError: an ``OSTINATO_*`` variable holds none of its allowed values.
    """
    if _config.read().disable_native:
        return _without("disabled by the environment variable OSTINATO_DISABLE_NATIVE")
    # An editable install splits the package into two folders.
    assert __package__ is not None
    package = sys.modules[__package__].__path__
    return load(Path(folder) / "_lib" for folder in package)


def load(folders: Iterable[Path]) -> NativeStatus:
    """Open the library in the first folder that has it and register its targets."""
    folders = tuple(folders)
    for folder in folders:
        if (folder / _LIBRARY_NAME).is_file():
            return _open(folder / _LIBRARY_NAME)
    for folder in folders:
        if (folder / _NOTE_NAME).is_file():
            note = (folder / _NOTE_NAME).read_text(encoding="utf-8").strip()
            return _without(f"not built when ostinato was installed: {note}")
    searched = ", ".join(str(folder) for folder in folders)
    return _without(f"no {_LIBRARY_NAME} in {searched}; `pip install` builds it")


@functools.cache
def cpu_features() -> CpuFeatures:
    """Ask the native library, through XLA, for the features of this machine.

    It can be called at any time, even while JAX traces.

    Raises:
        RuntimeError: there is no native library; the message says why.
    """
    library, reason = status()
    if library is None:
        raise RuntimeError(f"cpu_features() needs the native library: {reason}")
    result = jax.ShapeDtypeStruct((3,), "int32")
    # The highest level would ask Linux for the registers of tiles, for good.
    most = np.int32(_config.CPU_ISAS.index(_config.read().cpu_isa))
    features = jax.ffi.ffi_call("ostinato_cpu_features", result)

    def ask() -> Any:
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.jit(lambda: features(most_isa=most))().tolist()

    _, level, cpus = _compat.outside_of_traces(ask)
    return CpuFeatures(_config.CPU_ISAS[level], cpus)


def why_no_tiles() -> str | None:
    """Return why kernels for avx512_amx cannot run on this machine; None if they can.

    Raises:
        RuntimeError: there is no native library; the message says why.
    """
    library, reason = status()
    if library is None:
        raise RuntimeError(f"why_no_tiles() needs the native library: {reason}")
    reason = library.ostinato_why_no_tiles()
    return None if reason is None else reason.decode()


def _without(reason: str) -> NativeStatus:
    return NativeStatus(None, reason)


def _open(path: Path) -> NativeStatus:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return _without(f"cannot be opened: {error}")
    # Check the version first, because another one may have other targets.
    if not hasattr(library, "ostinato_abi_version"):
        return _without(f"{path} is not a library of ostinato")
    version = library.ostinato_abi_version()
    if version != _ABI_VERSION:
        return _without(
            f"{path} has ABI version {version}, want {_ABI_VERSION}; "
            "reinstall ostinato to rebuild it"
        )
    try:
        # If XLA refuses a target before its CPU backend is up, that backend never
        # starts; if it refuses one afterwards, the registration raises.
        jax.devices("cpu")
        for name in _CPU_TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        stages = {
            stage: jax.ffi.pycapsule(getattr(library, name))
            for stage, name in _CUDA_STAGES.items()
        }
        jax.ffi.register_ffi_target(CUDA_TARGET, stages, platform="CUDA")
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]  # then where in the sources of XLA
        return _without(f"refused by jax {jax.__version__}: {reason}")
    _declare(library)
    config = _config.read()
    isa = _config.CPU_ISAS.index(config.cpu_isa)
    library.ostinato_configure(isa, config.num_threads or 0)
    return NativeStatus(library, None)


def _declare(library: ctypes.CDLL) -> None:
    """Declare to ctypes the types of the functions that are not FFI targets."""
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    library.ostinato_configure.argtypes = (int32, int32)
    library.ostinato_configure.restype = None
    library.ostinato_why_no_tiles.argtypes = ()
    library.ostinato_why_no_tiles.restype = ctypes.c_char_p
    library.ostinato_contract.argtypes = ()
    library.ostinato_contract.restype = ctypes.c_char_p
    library.ostinato_prepared_bytes.argtypes = (int32, ctypes.POINTER(int64))
    library.ostinato_prepared_bytes.restype = int64
    library.ostinato_is_prepared.argtypes = (
        int32,
        ctypes.POINTER(int64),
        ctypes.c_void_p,
        int64,
    )
    library.ostinato_is_prepared.restype = ctypes.c_bool
    library.ostinato_stream.argtypes = (ctypes.c_void_p,)
    library.ostinato_stream.restype = ctypes.c_char_p
    library.ostinato_cuda_open.argtypes = (ctypes.c_char_p,)
    library.ostinato_cuda_open.restype = ctypes.c_char_p
    library.ostinato_step_open.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.ostinato_step_open.restype = ctypes.c_char_p
    library.ostinato_step_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.ostinato_step_run.restype = ctypes.c_char_p
    library.ostinato_step_close.argtypes = (ctypes.c_void_p,)
    library.ostinato_step_close.restype = None
