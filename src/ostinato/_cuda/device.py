"""The GPUs of this machine, as their driver describes them, and whether kernels run.

The driver is asked through ctypes, so that the answer needs no CUDA in JAX, and comes
before JAX has started.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from .. import _native
from . import nvrtc

DRIVER = "libcuda.so.1"
"""The library of the driver; tests put another one in its place."""

OLDEST = (8, 0)
"""The compute capability that kernels are written for: Ampere."""

# CU_DEVICE_ATTRIBUTE_...
_PROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES = 16, 75, 76, 97


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        name: that the driver gives, such as `"NVIDIA H200"`.
        capability: the compute capability, such as `(9, 0)`.
        processors: how many streaming multiprocessors it has.
        shared_bytes: of shared memory that one block can have.
        driver: the newest version of CUDA that the driver knows, such as `"13.0"`.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared_bytes: int
    driver: str

    @property
    def arch(self) -> str:
        """The architecture, as compilers name it."""
        major, minor = self.capability
        own = "a" if self.capability == (9, 0) else ""  # instructions of Hopper alone
        return f"sm_{major}{minor}{own}"


class GpuStatus(NamedTuple):
    """The kind of GPU that kernels run on, or why there is none; the other is None."""

    gpu: Gpu | None
    reason: str | None


@functools.cache
def status() -> GpuStatus:
    """Return whether kernels can run on this machine, the same on every call."""
    try:
        gpu, *others = _gpus(DRIVER)
    except _DriverError as error:
        return GpuStatus(None, str(error))
    if any(other.capability != gpu.capability for other in others):
        names = ", ".join(sorted({each.name for each in (gpu, *others)}))
        reason = f"these GPUs differ ({names}); CUDA_VISIBLE_DEVICES chooses some"
        return GpuStatus(None, reason)
    if gpu.capability < OLDEST:
        major, minor = gpu.capability
        return GpuStatus(
            None, f"{gpu.name} is too old: compute capability {major}.{minor}, want 8.0"
        )
    library, reason = _native.status()
    if library is None:
        return GpuStatus(None, f"its launches need the native library: {reason}")
    refused = library.ostinato_cuda_open(DRIVER.encode())
    if refused is not None:
        return GpuStatus(None, f"the NVIDIA driver is too old: {refused.decode()}")
    compiler, reason = nvrtc.find()
    if compiler is None:
        return GpuStatus(None, reason)
    if not compiler.knows(gpu.capability):
        return GpuStatus(
            None,
            f"NVRTC {compiler.version} does not know {gpu.arch} yet; a newer "
            f"{nvrtc.PACKAGES} does",
        )
    return GpuStatus(gpu, None)


class _DriverError(RuntimeError):
    """The reason why there is no GPU."""


def _gpus(path: str) -> list[Gpu]:
    """Return the GPUs, at least one."""
    try:
        driver = ctypes.CDLL(path)
    except OSError as error:
        raise _DriverError(f"no NVIDIA driver: {error}") from None
    try:
        return _described(driver)
    except AttributeError as error:
        raise _DriverError(f"no NVIDIA driver that can be used: {error}") from None


def _described(driver: ctypes.CDLL) -> list[Gpu]:
    """Return the GPUs that a driver sees, at least one."""

    def ask(name: str, *arguments: object) -> int:
        value = ctypes.c_int()
        _check(driver, name, driver[name](ctypes.byref(value), *arguments))
        return value.value

    _check(driver, "cuInit", driver.cuInit(0))
    count = ask("cuDeviceGetCount")
    if count == 0:
        raise _DriverError("the NVIDIA driver sees no GPU")
    version = ask("cuDriverGetVersion")
    gpus = []
    for ordinal in range(count):
        device = ask("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        result = driver.cuDeviceGetName(name, len(name), device)
        _check(driver, "cuDeviceGetName", result)
        major, minor, processors, shared = (
            ask("cuDeviceGetAttribute", attribute, device)
            for attribute in (_MAJOR, _MINOR, _PROCESSORS, _SHARED_BYTES)
        )
        gpus.append(
            Gpu(
                name.value.decode(errors="replace"),
                (major, minor),
                processors,
                shared,
                f"{version // 1000}.{version % 1000 // 10}",
            )
        )
    return gpus


def _check(driver: ctypes.CDLL, name: str, result: int) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        what = (text.value or b"").decode() or result
        raise _DriverError(f"the NVIDIA driver fails: {name}: {what}")
